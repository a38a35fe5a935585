"""Everything known about a captured program before a spec is applied to it; the counterpart of `analysis`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from torch import fx, nn

from fxskip.analysis import require_experts, require_not_rewired
from fxskip.capture.plain import without_values
from fxskip.capture.program import (
    ProgramCapture,
    block_paths,
    capture_program,
    layer_numbers,
    parameters_of,
    with_graph,
)
from fxskip.checkpoint.program import ProgramRecord, keep_record, operations
from fxskip.checkpoint.record import WiringRecord
from fxskip.errors import CaptureError, CheckpointError, PassError
from fxskip.passes.sub_blocks import sub_blocks
from fxskip.pipeline import analyse, rewire
from fxskip.planning import Plan, make_plan
from fxskip.schedule.costs import Costs, block_costs
from fxskip.spec import Spec, load_spec
from fxskip.wiring import ModelWiring, SubBlock, as_one_region, connect


@dataclass(frozen=True)
class ProgramAnalysis:
    """A captured program, its sub-blocks and their costs."""

    program: ProgramCapture
    graph: fx.Graph
    """The program's graph, analysed."""
    blocks: tuple[SubBlock, ...]
    costs: tuple[Costs, ...]

    @classmethod
    def of(cls, who: str, module: fx.GraphModule, example_inputs: tuple[Any, ...] | None) -> ProgramAnalysis:
        """Analyse a program that is not rewired yet; `who` is the call that errors name."""
        if example_inputs is None:
            raise CaptureError(
                who,
                f"{type(module).__name__} is a captured program, and fxskip does not know how to call it",
                hint=f"say what it is called with: fxskip.{who}(program, spec, example_inputs=(ids,))",
            )
        require_not_rewired(who, module)
        program = capture_program(module, without_values(example_inputs))
        graph = analyse(program.graph)
        paths = block_paths(graph)
        found = sub_blocks(graph, layer=0, layer_path="")
        layers = layer_numbers(paths, [block.kind for block in found])
        blocks = tuple(
            replace(block, layer=layer, path=path)
            for block, layer, path in zip(found, layers, paths, strict=True)
        )
        require_experts(who, type(module).__name__, blocks)
        size = next((p.dtype.itemsize for p in module.parameters() if p.is_floating_point()), 4)
        costs = tuple(
            replace(
                block_costs(graph, number, bytes_per_element=size, leaf_parameters={}),
                parameters=parameters_of(module, graph, number),
            )
            for number in range(1, len(blocks) + 1)
        )
        return cls(program, graph, blocks, costs)

    def connect(self, spec: Spec) -> ModelWiring:
        """What the spec means for the program."""
        return connect(spec, self.blocks)

    def plan(self, spec: Spec, wiring: ModelWiring) -> Plan:
        """The wiring as a table."""
        name = type(self.program.module).__name__
        return make_plan(name, spec.name or "an unnamed spec", wiring, self.blocks, self.costs)

    def rewired(self, spec: Spec, wiring: ModelWiring, *, inplace: bool) -> fx.GraphModule:
        """The program, or a copy, with the rewired graph and its record."""
        runtime = spec.runtime
        if runtime is not None and (runtime.recompute, runtime.lower) != ("none", "none"):
            raise PassError(
                "transform",
                "runtime.recompute and runtime.lower are for models with layers; this is a captured program",
                hint="leave them out, and give the result to torch.compile",
            )
        graph = rewire(self.program.graph, as_one_region(wiring))
        student = with_graph(self.program.module, graph, inplace=inplace)
        record = WiringRecord.of(spec, self.blocks, wiring, ())
        keep_record(student, ProgramRecord(record, self.costs, operations(student)))
        return student


def explain_program(student: nn.Module, record: ProgramRecord) -> Plan:
    """What was done to a rewired program. Raises CheckpointError where its graph changed afterwards."""
    program = cast(fx.GraphModule, student)
    if operations(program) != record.operations:
        raise CheckpointError(
            "explain",
            "the program's operations are not those that were rewired",
            where=type(program).__name__,
            hint="something changed its graph after the transform; transform the original program again",
        )
    spec, wiring = load_spec(record.wiring.spec), record.wiring.wiring(where="the program's record")
    name = type(program).__name__
    return make_plan(name, spec.name or "an unnamed spec", wiring, record.wiring.blocks, record.costs)
