"""Everything known about a model before a spec is applied to it: its layers' graphs, sub-blocks and costs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from fxskip.capture import hf, plain
from fxskip.capture.twin import LayerCapture
from fxskip.capture.wrappers import inner_model
from fxskip.checkpoint.family import adopt, base_class, record_of
from fxskip.checkpoint.plain import PlainRecord, adopt_plain, plain_record
from fxskip.checkpoint.record import WiringRecord
from fxskip.errors import CaptureError, PassError
from fxskip.ir import is_leaf, leaf_path, value, with_streams
from fxskip.passes.sub_blocks import sub_blocks
from fxskip.pipeline import analyse, rewire
from fxskip.planning import Plan, make_plan
from fxskip.planning.deployment import Wishes
from fxskip.schedule.attention_span import attended, attended_in
from fxskip.schedule.costs import CONTEXT, Costs, ModelCosts, graph_costs
from fxskip.schedule.parts import Held
from fxskip.spec import Spec, load_spec
from fxskip.wiring import ModelWiring, SubBlock, connect


@dataclass(frozen=True)
class Analysis:
    """A captured model. `inputs` are the example inputs without values; None for a model of transformers."""

    model: str
    layers: tuple[LayerCapture, ...]
    blocks: tuple[SubBlock, ...]
    costs: ModelCosts
    inputs: tuple[Any, ...] | None

    @classmethod
    def of_original(
        cls, who: str, model: object, example_inputs: tuple[Any, ...] | None, context: int = CONTEXT
    ) -> Analysis:
        """Capture and analyse a model that is not rewired yet; `who` is the call that errors name.

        `context` is the number of tokens of a sequence for which costs are counted.

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
            return cls._of(who, module, hf.capture_layers(module), None, context)
        if example_inputs is None:
            raise CaptureError(
                who,
                f"{type(module).__name__} is no causal language model of transformers, and fxskip does not know how to "
                "call it",
                hint=f"say what it is called with: fxskip.{who}(model, spec, example_inputs=(ids,))",
            )
        inputs = plain.without_values(example_inputs)
        return cls._of(who, module, plain.capture_layers(module, inputs), inputs, context)

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
        cls,
        who: str,
        model: nn.Module,
        captured: Sequence[LayerCapture],
        inputs: tuple[Any, ...] | None,
        context: int = CONTEXT,
    ) -> Analysis:
        name = base_class(model).__name__
        analysed: dict[int, fx.Graph] = {}
        for layer in captured:
            if id(layer.graph) not in analysed:
                try:
                    analysed[id(layer.graph)] = analyse(layer.graph)
                except PassError as error:
                    raise error.within(f"{name}, {layer.path}") from None
        blocks: list[SubBlock] = []
        costs: list[Costs] = []
        for index, layer in enumerate(captured):
            graph = analysed[id(layer.graph)]
            blocks += sub_blocks(graph, layer=index, layer_path=layer.path)
            keys = attended(context)
            if isinstance(model, PreTrainedModel):
                keys = attended_in(model.config.get_text_config(), index, context)
            costs += graph_costs(graph, keys=keys, held=_held(model.get_submodule(layer.path)))
        require_experts(who, name, blocks)
        paths = [layer.path for layer in captured]
        return cls(name, tuple(captured), tuple(blocks), _model_costs(model, paths, costs), inputs)

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

    def plan(self, spec: Spec, wiring: ModelWiring, wishes: Wishes) -> Plan:
        """The wiring as a table, with estimates."""
        return make_plan(self.model, spec, wiring, self.blocks, self.costs, wishes)

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


def _held(layer: nn.Module) -> Held:
    """Where a captured layer's parameters are: placeholders, and in the modules that are leaves."""

    def held(node: fx.Node) -> dict[Hashable, Tensor]:
        if is_leaf(node):
            return {id(p): p for p in layer.get_submodule(leaf_path(node)).parameters()}
        is_parameter = node.op == "placeholder" and isinstance(value(node), nn.Parameter)
        return {node: value(node)} if is_parameter else {}

    return held


def _model_costs(model: nn.Module, paths: Sequence[str], costs: Sequence[Costs]) -> ModelCosts:
    sizes = {id(p): p.numel() for p in model.parameters()}
    layers = [p for path in paths for p in model.get_submodule(path).parameters()]
    are_shared = len(layers) > len({id(p) for p in layers})
    outside = None if are_shared else sum(sizes.values()) - sum(c.parameters for c in costs)
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return ModelCosts(
        tuple(costs),
        dtype_of(model),
        sum(sizes.values()),
        outside,
        sum(p.numel() for p in head.parameters()) if head is not None else None,
    )


def dtype_of(model: nn.Module) -> str:
    """The type of a model's parameters, of the first that has floating point; the default type where none has."""
    found = (p.dtype for p in model.parameters() if p.is_floating_point())
    return str(next(found, torch.get_default_dtype())).removeprefix("torch.")


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
