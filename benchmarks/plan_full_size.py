"""What `fxskip plan` costs at full size, from configs alone: CPU seconds, wall seconds, peak memory.

    python benchmarks/plan_full_size.py --out benchmarks/results/plan-full-size.json [--samples 3]

Each sample is the whole command in a process of its own, imports included; `imports` is a process that only imports
fxskip, so the difference is the plan. No GPU is used and no weights exist.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ("deepseek-v3", "qwen3-235b-a22b", "llama-4-scout")


def measured(*arguments: str) -> dict[str, float]:
    """Run Python with `arguments`; CPU seconds of user and system, wall seconds, MiB of peak resident memory."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *arguments], env=environment, cwd=ROOT, stdout=subprocess.DEVNULL
    ) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"python {' '.join(arguments)} ended with exit code {process.returncode}")
    return {
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "wall_s": round(time.perf_counter() - started, 2),
        "peak_rss_mib": round(used.ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--samples", type=int, default=3, help="processes of each kind")
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit.stdout.strip(),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "imports": [measured("-c", "import fxskip, fxskip.cli.models") for _ in range(arguments.samples)],
    }
    for name in CONFIGS:
        command = ("-m", "fxskip", "plan", f"examples/configs/{name}.json", "farskip", "--ep", "8")
        report[name] = {
            "arguments": " ".join(command),
            "samples": [measured(*command) for _ in range(arguments.samples)],
        }
        print(name, report[name]["samples"], flush=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
