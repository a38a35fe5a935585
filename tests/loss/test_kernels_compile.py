"""The kernels compile for an H200 and keep their rows in registers; the interpreter would not know."""

import pytest

from tests.compiled import lines_of
from tests.loss.implementations import NEEDS_TRITON


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("which", "kernels"), [("some", 10), pytest.param("all", 104, marks=pytest.mark.slow)]
)
def test_kernels_compile(which, kernels, tmp_path):
    lines = lines_of("loss/compile_kernels.py", which, tmp_path)
    stacks = [int(line.split()[-4]) for line in lines if line.endswith(" bytes of stack")]
    assert len(stacks) == kernels
    assert max(stacks) <= 32, lines
