"""The kernels compile for an H200 and keep their rows in registers; the interpreter would not know."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loss.test_sparse_kl import NEEDS_TRITON

ROOT = Path(__file__).parents[2]


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("which", "kernels"), [("some", 10), pytest.param("all", 104, marks=pytest.mark.slow)]
)
def test_kernels_compile(which, kernels, tmp_path):
    path = os.pathsep.join([str(ROOT), *sys.path])  # a subprocess finds the packages that this process does
    changed = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "loss" / "compile_kernels.py", which],
        env=os.environ | changed,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stacks = [int(size) for size in re.findall(r"(\d+) bytes of stack$", done.stdout, flags=re.MULTILINE)]
    assert len(stacks) == kernels
    assert max(stacks) <= 32, done.stdout
