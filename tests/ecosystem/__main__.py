"""Write docs/coverage.md.

python -m tests.ecosystem                 all architectures of the installed transformers (half an hour of one core)
python -m tests.ecosystem TYPE...         these anew, the others as the page has them
python -m tests.ecosystem --jobs 8 ...    eight at a time
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed

import transformers

from tests.ecosystem.architectures import moe_types
from tests.ecosystem.assess import Row, assess, be_quiet
from tests.ecosystem.table import FILE, page, read


def main(wanted: list[str], jobs: int) -> None:
    known = moe_types()
    if unknown := sorted(set(wanted) - set(known)):
        raise SystemExit(f"no Mixture-of-Experts types of transformers {transformers.__version__}: {unknown}")
    rows = {t: row for t, row in read()[1].items() if t in known} if wanted else {}
    # A process for each type: captures of many models would fill the memory and slow each other down.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=be_quiet, max_tasks_per_child=1) as pool:
        found = {pool.submit(assess, model_type): model_type for model_type in wanted or known}
        for future in as_completed(found):
            try:
                row = future.result()
            except Exception as error:
                row = Row(found[future], identity=f"fails: {type(error).__name__}: {error}"[:300])
            rows[row.model_type] = row
            print(f"{row.model_type:24} {row.state:14} {row.seconds:6.0f} s", flush=True)
            FILE.write_text(page(rows.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    main(options.types, options.jobs)
