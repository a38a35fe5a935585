"""Compiles the kernels of the losses for an H200, without a GPU: `python tests/loss/compile_kernels.py some|all`.

A process of its own: where Triton's interpreter is switched on, there is nothing to compile. Prints a line a kernel:
its name, what it was compiled with, registers and bytes of stack a thread (into which registers are spilled).
"""

import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fxskip.loss import hidden_kernels, row_kernels, sparse_kernels
from fxskip.loss.gradient_rules import SCALE_BLOCK
from fxskip.loss.hidden_triton import Tuning as PairTuning
from fxskip.loss.sparse_triton import COMPARED_ENTRIES, Tuning, capacity_of

H200 = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
FLAGS = ("HAS_BIAS", "HAS_SOFTCAP", "HAS_COUNTS", "HAS_Z_BIAS", "HAS_Y_BIAS")
INTEGERS = {"first_column", "K", "size"}


def compiled(kernel, logits, gradient, warps, *, ids="i64", **constants):
    constants |= {name: constants.get(name, True) for name in FLAGS if name in kernel.arg_names}
    pointers = {"z_ptr": logits, "y_ptr": logits, "d_ptr": gradient, "ids_ptr": ids, "counts_ptr": ids}
    pointers |= {"source_ptr": logits, "target_ptr": gradient}

    def type_of(name):
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return f"*{pointers.get(name, 'fp32')}"
        return "i64" if name.startswith("stride") else "i32" if name in INTEGERS else "fp32"

    source = ASTSource(
        fn=kernel,
        signature={name: type_of(name) for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    binary = triton.compile(source, target=H200, options={"num_warps": warps}).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups()
    shown = " ".join(f"{name}={value}" for name, value in constants.items() if name not in FLAGS)
    print(
        f"{kernel.__name__} {logits} to {gradient} {shown}: {registers} registers, {stack} bytes of stack",
        flush=True,
    )


def main(which):
    dtypes = [("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32")] if which == "all" else [("fp32", "bf16")]
    widths = (100, COMPARED_ENTRIES, 131072) if which == "all" else (100,)
    tails = range(4) if which == "all" else (1,)
    stages = range(3) if which == "all" else (0,)
    vocabulary = {"V": 129280}  # a multiple of no step: both loops of a row
    rows, pairs = Tuning(), PairTuning()
    every_ids = [(one, "i64") for one in dtypes] + [(dtypes[0], "i32")]
    for ((logits, gradient), ids), width in product(every_ids, widths):
        sizes = {"CAPACITY": capacity_of(width), "BLOCK_K": 128, "BLOCK_J": rows.support_block}
        compiled(
            sparse_kernels.take_support, logits, gradient, rows.support_warps,
            ids=ids, COMPARE=width <= COMPARED_ENTRIES, **sizes, **vocabulary,
        )  # fmt: skip
    every_gradient = [(one, True) for one in dtypes] + [(dtypes[0], False)]
    for ((logits, gradient), wanted), tail, stage in product(every_gradient, tails, stages):
        compiled(
            sparse_kernels.reduce_rows, logits, gradient, rows.warps, BLOCK=rows.block, TAIL=tail, STAGE=stage,
            CAPACITY=112, BLOCK_K=128, WITH_GRADIENT=wanted, **vocabulary,
        )  # fmt: skip
    kinds = [(kind, stage) for kind in range(3) for stage in range(4) if kind == 2 or stage != 2]
    chosen = kinds if which == "all" else [(2, 0)]
    for ((logits, gradient), wanted), (kind, stage) in product(every_gradient, chosen):
        compiled(
            hidden_kernels.compare_rows, logits, gradient, pairs.warps, BLOCK=pairs.block, KIND=kind, STAGE=stage,
            WITH_GRADIENT=wanted, **vocabulary,
        )  # fmt: skip
    # The last two are in place.
    for source, target in (("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "bf16"), ("fp32", "fp32")):
        compiled(row_kernels.scale_into, source, target, 8, BLOCK=SCALE_BLOCK)


if __name__ == "__main__":
    main(sys.argv[1])
