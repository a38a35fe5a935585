"""Compiles the kernels of routed experts for an H200, without a GPU.

    python tests/collectives/compile_routing.py bf16|all

A process of its own: where Triton's interpreter is switched on, there is nothing to compile. Prints a line a kernel:
its name, the type of rows, and whether an assertion that fails stops it.
"""

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fxskip.collectives import routing_kernels as kernels
from fxskip.collectives.routing_triton import Tuning

H200 = GPUTarget("cuda", 90, 32)
TUNING = Tuning()
ROWS = {"source_ptr", "target_ptr", "rows_ptr", "gradient_ptr", "d_rows_ptr"}
WEIGHTS = {"weights_ptr", "d_weights_ptr"}
WIDTH = {"K": 6, "D": 2048, "BLOCK": TUNING.columns}
SORT = {"E": 64, "BINS": 64, "BLOCK": TUNING.block}
TYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32, "fp64": tl.float64}


def compiled(kernel, rows="bf16", weights="fp32", options=None, **constants):
    def type_of(name):
        if name in constants:
            return "constexpr"
        if name in ROWS | WEIGHTS:
            return f"*{rows if name in ROWS else weights}"
        if name.endswith("_ptr"):
            return (
                "*i32"
                if name in ("ends_ptr",) or (name, kernel) == ("table_ptr", kernels.count_blocks)
                else "*i64"
            )
        return "i32"

    source = ASTSource(
        fn=kernel,
        signature={name: type_of(name) for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": TUNING.warps, "debug": bool(kernel.debug)} | (options or {})
    binary = triton.compile(source, target=H200, options=options)
    print(kernel.__name__, rows, "assertion" if "__assertfail" in binary.asm["ptx"] else "-", flush=True)


def main(which):
    compiled(kernels.count_blocks, **SORT)
    compiled(kernels.place_pairs, **SORT, STEP=TUNING.step)
    compiled(kernels.order_runs, RANKS=8, E=32, RUNS=256, BLOCK=TUNING.block)
    pairs = [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")]
    for rows, wide in pairs if which == "all" else pairs[:1]:
        types = {"SUM": TYPES[wide], "PRODUCT": TYPES[wide]}
        common = {"rows": rows, "weights": wide, "options": {"enable_fp_fusion": False}, **WIDTH}
        compiled(kernels.gather_rows, rows, **WIDTH)
        compiled(kernels.add_choices, IS_WEIGHED=True, **types, **common)
        compiled(kernels.weigh_back, FOR_ROWS=True, FOR_WEIGHTS=True, **types, **common)


if __name__ == "__main__":
    main(sys.argv[1])
