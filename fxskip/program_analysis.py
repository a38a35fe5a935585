"""Everything known about a captured program before a spec is applied to it; the counterpart of `analysis`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, fx, nn

from fxskip.analysis import dtype_of, require_experts, require_not_rewired
from fxskip.capture.plain import without_values
from fxskip.capture.program import (
    ProgramCapture,
    block_paths,
    capture_program,
    layer_numbers,
    with_graph,
)
from fxskip.checkpoint.program import ProgramRecord, keep_record, operations
from fxskip.checkpoint.record import WiringRecord
from fxskip.errors import CaptureError, CheckpointError, PassError
from fxskip.passes.sub_blocks import sub_blocks
from fxskip.pipeline import analyse, rewire
from fxskip.planning import Plan, make_plan
from fxskip.planning.deployment import Wishes
from fxskip.schedule.attention_span import attended
from fxskip.schedule.costs import CONTEXT, ModelCosts, graph_costs
from fxskip.schedule.parts import Held
from fxskip.spec import Spec, load_spec
from fxskip.wiring import ModelWiring, SubBlock, as_one_region, connect


@dataclass(frozen=True)
class ProgramAnalysis:
    """A captured program, its sub-blocks and their costs."""

    program: ProgramCapture
    graph: fx.Graph
    """The program's graph, analysed."""
    blocks: tuple[SubBlock, ...]
    costs: ModelCosts

    @classmethod
    def of(
        cls,
        who: str,
        module: fx.GraphModule,
        example_inputs: tuple[Any, ...] | None,
        context: int = CONTEXT,
    ) -> ProgramAnalysis:
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
        costs = graph_costs(graph, keys=attended(context), held=_held(module))
        whole = sum(p.numel() for p in module.parameters())
        outside = whole - sum(c.parameters for c in costs)
        return cls(program, graph, blocks, ModelCosts(costs, dtype_of(module), whole, outside, head=None))

    @property
    def name(self) -> str:
        """Of the program's class."""
        return type(self.program.module).__name__

    def connect(self, spec: Spec) -> ModelWiring:
        """What the spec means for the program."""
        return connect(spec, self.blocks)

    def plan(self, spec: Spec, wiring: ModelWiring, wishes: Wishes) -> Plan:
        """The wiring as a table, with estimates."""
        return make_plan(self.name, spec, wiring, self.blocks, self.costs, wishes)

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
        keep_record(student, ProgramRecord(self.name, record, self.costs, operations(student)))
        return student


def _held(module: fx.GraphModule) -> Held:
    """Where a program's parameters are: attributes that it reads, and in the modules that it calls."""
    own = dict(module.named_parameters(remove_duplicate=False))

    def held(node: fx.Node) -> dict[Hashable, Tensor]:
        if node.op == "call_module":
            return {id(p): p for p in module.get_submodule(str(node.target)).parameters()}
        found = own.get(str(node.target)) if node.op == "get_attr" else None
        return {} if found is None else {id(found): found}

    return held


def explain_program(student: nn.Module, record: ProgramRecord, wishes: Wishes) -> Plan:
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
    return make_plan(record.model, spec, wiring, record.wiring.blocks, record.costs, wishes)
