"""Runs a script that compiles Triton kernels for a GPU that need not be there."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lines_of(script: str, which: str, cache: Path) -> list[str]:
    """What `script`, a path in tests/, prints for its argument `which`: a line a kernel. Kernels are put into `cache`.

    A process of its own: where this one has switched Triton's interpreter on, there is nothing to compile.
    """
    path = os.pathsep.join([str(ROOT), *sys.path])  # it finds the packages that this process does
    changed = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / script, which],
        env=os.environ | changed,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
