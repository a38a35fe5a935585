"""Everything known about a model before a spec is applied to it: its layers' graphs, sub-blocks and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch import fx, nn
from transformers import PreTrainedModel

from fxskip.capture import hf, plain
from fxskip.capture.twin import LayerCapture
from fxskip.capture.wrappers import inner_model
from fxskip.checkpoint.family import adopt, base_class, record_of
from fxskip.checkpoint.plain import PlainRecord, adopt_plain, plain_record
from fxskip.checkpoint.record import WiringRecord
from fxskip.errors import CaptureError, PassError
from fxskip.ir import with_streams
from fxskip.passes.sub_blocks import sub_blocks
from fxskip.pipeline import analyse, rewire
from fxskip.planning import Plan, make_plan
from fxskip.schedule.costs import Costs, block_costs
from fxskip.spec import Spec, load_spec
from fxskip.wiring import ModelWiring, SubBlock, connect


@dataclass(frozen=True)
class Analysis:
    """A captured model. `inputs` are the example inputs without values; None for a model of transformers."""

    model: str
    layers: tuple[LayerCapture, ...]
    blocks: tuple[SubBlock, ...]
    costs: tuple[Costs, ...]
    inputs: tuple[Any, ...] | None

    @classmethod
    def of_original(cls, who: str, model: object, example_inputs: tuple[Any, ...] | None) -> Analysis:
        """Capture and analyse a model that is not rewired yet; `who` is the call that errors name.

        Raises CaptureError for what is no model or cannot be captured, PassError for what cannot be rewired.
        """
        module = _require_original(who, model)
        if isinstance(module, PreTrainedModel):
            if example_inputs is not None:
                raise CaptureError(
                    who,
                    f"{type(module).__name__} is a model of transformers: fxskip knows how to call it",
                    hint="leave example_inputs= out; they are for models that are not from transformers",
                )
            return cls._of(who, module, hf.capture_layers(module), None)
        if example_inputs is None:
            raise CaptureError(
                who,
                f"{type(module).__name__} is no causal language model of transformers, and fxskip does not know how to "
                "call it",
                hint=f"say what it is called with: fxskip.{who}(model, spec, example_inputs=(ids,))",
            )
        inputs = plain.without_values(example_inputs)
        return cls._of(who, module, plain.capture_layers(module, inputs), inputs)

    @classmethod
    def of_student(cls, who: str, student: nn.Module) -> Analysis:
        """Capture and analyse a rewired model's original layers again."""
        if (record := plain_record(student)) is not None:
            captured = plain.capture_layers(student, record.inputs, record.layers)
            return cls._of(who, student, captured, record.inputs)
        assert isinstance(student, PreTrainedModel)
        return cls._of(who, student, hf.capture_layers(student), None)

    @classmethod
    def _of(
        cls, who: str, model: nn.Module, captured: Sequence[LayerCapture], inputs: tuple[Any, ...] | None
    ) -> Analysis:
        name = base_class(model).__name__
        analysed: dict[int, fx.Graph] = {}
        for layer in captured:
            if id(layer.graph) not in analysed:
                try:
                    analysed[id(layer.graph)] = analyse(layer.graph)
                except PassError as error:
                    raise error.within(f"{name}, {layer.path}") from None
        bytes_per_element = next(p.dtype.itemsize for p in model.parameters() if p.is_floating_point())
        blocks: list[SubBlock] = []
        costs: list[Costs] = []
        for index, layer in enumerate(captured):
            graph = analysed[id(layer.graph)]
            found = sub_blocks(graph, layer=index, layer_path=layer.path)
            blocks += found
            sizes = {path: _size(model.get_submodule(f"{layer.path}.{path}")) for path in layer.leaves}
            costs += [
                block_costs(graph, i, bytes_per_element=bytes_per_element, leaf_parameters=sizes)
                for i in range(1, len(found) + 1)
            ]
        require_experts(who, name, blocks)
        return cls(name, tuple(captured), tuple(blocks), tuple(costs), inputs)

    def connect(self, spec: Spec) -> ModelWiring:
        """What the spec means for the model."""
        return connect(spec, self.blocks)

    def try_out(self, model: nn.Module, wiring: ModelWiring) -> None:
        """Rewire each kind of layer once, so that a defect shows now and not at the first forward."""
        graphs = (layer.graph for layer in self.layers)
        for graph, region in dict.fromkeys(zip(graphs, wiring.regions, strict=True)):
            rewire(with_streams(graph, len(region.inputs), len(region.outputs)), region)
        if self.inputs is not None and any(len(region.outputs) > 1 for region in wiring.regions):
            plain.require_streams_pass(model, self.inputs, self.layers)

    def plan(self, spec: Spec, wiring: ModelWiring) -> Plan:
        """The wiring as a table."""
        return make_plan(self.model, spec.name or "an unnamed spec", wiring, self.blocks, self.costs)

    def install(self, student: nn.Module, spec: Spec, wiring: ModelWiring) -> None:
        """Rewire `student`, the analysed model or a copy, in place."""
        leaves = [f"{layer.path}.{leaf}" for layer in self.layers for leaf in layer.leaves]
        record = WiringRecord.of(spec, self.blocks, wiring, leaves)
        inner = inner_model(student)
        if isinstance(inner, PreTrainedModel):
            adopt(inner, record, within=student)
            return
        assert self.inputs is not None
        adopt_plain(inner, PlainRecord(record, tuple(layer.path for layer in self.layers), self.inputs))


def require_not_rewired(who: str, model: object) -> None:
    """Refuse what is a student already."""
    if (record := record_of(model)) is not None:
        raise PassError(
            who,
            f"this model is rewired already, by the spec {load_spec(record.spec).name!r}",
            hint="transform the original model; fxskip.explain shows what was done to this one",
        )


def _require_original(who: str, model: object) -> nn.Module:
    require_not_rewired(who, model)
    if isinstance(model, str | PathLike):
        raise CaptureError(
            who,
            f"{str(model)!r} is a path",
            hint="pass AutoModelForCausalLM.from_pretrained(path); plan also takes AutoConfig.from_pretrained(path)",
        )
    if not isinstance(model, nn.Module):
        raise CaptureError(
            who,
            f"{type(model).__name__} is no model",
            hint="pass a model made by AutoModelForCausalLM, or any nn.Module together with example_inputs=(ids,)",
        )
    return model


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def require_experts(who: str, model: str, blocks: Sequence[SubBlock]) -> None:
    """Refuse a model without a MoE block."""
    if any(block.kind == "moe" for block in blocks):
        return
    raise PassError(
        who,
        f"{model} has no routed experts in any layer",
        where=f"layer 0: {', '.join(f'{b.kind} ({b.path})' for b in blocks if b.layer == 0)}",
        hint="fxskip rewires Mixture-of-Experts models",
    )
