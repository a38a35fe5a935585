"""Write docs/coverage.md.

python -m tests.ecosystem                 all architectures of the installed transformers (half an hour)
python -m tests.ecosystem TYPE...         these anew, the others as the page has them
"""

import sys

import torch
import transformers

from tests.ecosystem.architectures import moe_types
from tests.ecosystem.assess import assess
from tests.ecosystem.table import FILE, page, read


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    known = moe_types()
    if unknown := sorted(set(wanted) - set(known)):
        raise SystemExit(f"no Mixture-of-Experts types of transformers {transformers.__version__}: {unknown}")
    rows = {t: row for t, row in read()[1].items() if t in known} if wanted else {}
    for model_type in wanted or known:
        rows[model_type] = assess(model_type)
        torch._dynamo.reset()
        print(f"{model_type:24} {rows[model_type].state:14} {rows[model_type].seconds:6.0f} s", flush=True)
        FILE.write_text(page(rows.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
