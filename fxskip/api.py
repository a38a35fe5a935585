"""The public calls: transform, plan, explain, spec_of, is_transformed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeVar, cast

import torch
from pydantic import BaseModel
from torch import fx, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fxskip.capture.hf import capture_layers, decoder_layers
from fxskip.checkpoint.family import adopt, base_class, record_of
from fxskip.checkpoint.record import WiringRecord
from fxskip.errors import CaptureError, CheckpointError, PassError
from fxskip.ir import with_streams
from fxskip.passes.sub_blocks import sub_blocks
from fxskip.pipeline import analyse, rewire
from fxskip.planning import Plan, Rest, make_plan
from fxskip.planning.deployment import DEFAULT_HARDWARE, TOKENS, Wishes, deployment
from fxskip.schedule.attention_span import attended_in
from fxskip.schedule.costs import CONTEXT, Costs, block_costs
from fxskip.schedule.hardware import Hardware, MatrixType, load_hardware
from fxskip.schedule.roofline import CopiesPer
from fxskip.spec import Spec, load_spec
from fxskip.wiring import ModelWiring, SubBlock, connect

Model = TypeVar("Model", bound=nn.Module)
SpecSource = str | PathLike[str] | Mapping[str, Any] | Spec


def transform(
    model: Model,
    spec: SpecSource,
    *,
    inplace: bool = False,
    example_inputs: tuple[Any, ...] | None = None,
    mesh: Any = None,
) -> Model:
    """Rewire the residual stream of a Mixture-of-Experts causal language model as `spec` says.

    Args:
        model: a causal language model of transformers; its class, modules, parameters and state_dict keys stay.
            The result is an instance of a subclass that saves and loads with its wiring.
        spec: a file, a mapping, the name of a preset, or a loaded Spec.
        inplace: rewire `model` itself. By default a deep copy is made, so that the original can teach it.
        example_inputs: positional inputs for models that are not from transformers; not supported yet.
        mesh: a device mesh for the parallel section of the spec; not supported yet.

    Raises:
        SpecError: the spec is wrong, or selects layers that the model does not have.
        CaptureError: the model cannot be captured.
        PassError: the architecture cannot be rewired like that, a rule has no effect, the model has no routed
            experts or is rewired already, or the spec asks for a stage that this version does not have.
    """
    loaded = load_spec(spec)
    _refuse_missing_stages(loaded, example_inputs, mesh)
    analysis = _analyse_stock("transform", model)
    wiring = analysis.connect(loaded)
    analysis.try_out(wiring)
    with torch.inference_mode(False):  # a copy made in inference mode could never be trained
        student = model if inplace else copy.deepcopy(model)
    adopt(cast(PreTrainedModel, student), WiringRecord.of(loaded, analysis.blocks, wiring))
    return student


def plan(
    model: nn.Module | PreTrainedConfig,
    spec: SpecSource,
    *,
    hardware: str | PathLike[str] | Hardware = DEFAULT_HARDWARE,
    tokens_per_rank: int = TOKENS,
    context_tokens: int = CONTEXT,
    expert_size: int | None = None,
    tensor_size: int | None = None,
    dtype: MatrixType | None = None,
    copies_per: CopiesPer = "expert",
) -> Plan:
    """Say what `transform` would do, without doing it, and estimate what that is worth on given hardware.

    Args:
        model: a model, or a config alone: no weights are made or read, and no GPU is used.
        spec: as in `transform`. Stages that do not exist yet are no error here.
        hardware: h200, mi300x, b200, or the path of such a file; see docs/plan.md.
        tokens_per_rank: tokens of one rank in one forward pass.
        context_tokens: tokens of one sequence; a query attends to half of them on average.
        expert_size: ranks that the routed experts are spread over. By default that of the spec's `parallel`; where
            the spec has none, one domain of the hardware (8 GPUs), and the plan says so.
        tensor_size: ranks that attention, dense MLPs and shared experts are cut over; by default the spec's, or 1.
        dtype: type of weights, activations and what travels; by default the model's, bfloat16 for a config.
        copies_per: whether a token crosses the network for each "expert" (a plain all-to-all) or once for each other
            "domain" that holds some of its experts, which passes it on (as DeepEP does).

    Raises what `transform` raises for the spec and the architecture, and SpecError for hardware and sizes.
    """
    loaded = load_spec(spec)
    wishes = Wishes(
        load_hardware(hardware), tokens_per_rank, context_tokens, expert_size, tensor_size, dtype, copies_per
    )
    analysis = _analyse_stock(
        "plan", _without_weights(model) if isinstance(model, PreTrainedConfig) else model, context_tokens
    )
    return analysis.plan(loaded, analysis.connect(loaded), wishes)


def explain(student: nn.Module) -> Plan:
    """Say what was done to a rewired model. The model is captured again and checked against its record.

    Raises PassError for a model that is not rewired, CheckpointError where its layers are not wired as recorded.
    """
    record = _require_record("explain", student)
    analysis = _Analysis.of("explain", cast(PreTrainedModel, student))
    spec = load_spec(record.spec)
    wiring = analysis.connect(spec)
    installed = tuple(getattr(layer, "fxskip_wiring", None) for layer in decoder_layers(student)[1])
    if installed != wiring.regions:
        raise CheckpointError(
            "explain",
            "the decoder layers are not wired as the model's record says",
            where=type(student).__name__,
            hint="a layer or the config was replaced after the transform; transform the original model again",
        )
    return analysis.plan(spec, wiring, Wishes(load_hardware(DEFAULT_HARDWARE)))


def spec_of(student: nn.Module) -> Spec:
    """The spec that a rewired model was made with. Raises PassError for any other model."""
    return load_spec(_require_record("spec_of", student).spec)


def is_transformed(model: object) -> bool:
    """Whether `model` was rewired by fxskip, here or before it was saved."""
    return record_of(model) is not None


@dataclass(frozen=True)
class _Analysis:
    """Everything known about a model before a spec is applied."""

    model: str
    graphs: tuple[fx.Graph, ...]
    """The captured graph of each layer; layers of one kind share one."""
    blocks: tuple[SubBlock, ...]
    costs: tuple[Costs, ...]
    dtype: str
    heads: int
    rest: Rest

    @classmethod
    def of(cls, who: str, model: PreTrainedModel, context: int = CONTEXT) -> _Analysis:
        captured = capture_layers(model)
        analysed: dict[int, fx.Graph] = {}
        for layer in captured:
            if id(layer.graph) not in analysed:
                try:
                    analysed[id(layer.graph)] = analyse(layer.graph)
                except PassError as error:
                    raise error.within(f"{base_class(model).__name__}, {layer.path}") from None
        blocks: list[SubBlock] = []
        costs: list[Costs] = []
        for index, layer in enumerate(captured):
            graph = analysed[id(layer.graph)]
            found = sub_blocks(graph, layer=index, layer_path=layer.path)
            blocks += found
            keys = attended_in(model.config.get_text_config(), index, context)
            costs += [block_costs(graph, i, keys=keys) for i in range(1, len(found) + 1)]
        _require_experts(who, model, blocks)
        return cls(
            base_class(model).__name__,
            tuple(c.graph for c in captured),
            tuple(blocks),
            tuple(costs),
            str(model.dtype).removeprefix("torch."),
            model.config.get_text_config().num_attention_heads,
            _rest(model, costs),
        )

    def connect(self, spec: Spec) -> ModelWiring:
        return connect(spec, self.blocks)

    def try_out(self, wiring: ModelWiring) -> None:
        """Rewire each kind of layer once, so that a defect shows now and not at the first forward."""
        for graph, region in dict.fromkeys(zip(self.graphs, wiring.regions, strict=True)):
            rewire(with_streams(graph, len(region.inputs), len(region.outputs)), region)

    def plan(self, spec: Spec, wiring: ModelWiring, wishes: Wishes) -> Plan:
        chosen = deployment(wishes, spec, self.costs, dtype=self.dtype, heads=self.heads)
        name = spec.name or "an unnamed spec"
        return make_plan(self.model, name, wiring, self.blocks, self.costs, chosen, self.rest)


def _rest(model: PreTrainedModel, costs: Sequence[Costs]) -> Rest:
    total = sum(p.numel() for p in model.parameters()) - sum(c.parameters for c in costs)
    return Rest(total, sum(p.numel() for p in model.get_output_embeddings().parameters()))


def _analyse_stock(who: str, model: object, context: int = CONTEXT) -> _Analysis:
    if (record := record_of(model)) is not None:
        raise PassError(
            who,
            f"this model is rewired already, by the spec {load_spec(record.spec).name!r}",
            hint="transform the original model; fxskip.explain shows what was done to this one",
        )
    if isinstance(model, str | PathLike):
        raise CaptureError(
            who,
            f"{str(model)!r} is a path",
            hint="pass AutoModelForCausalLM.from_pretrained(path); plan also takes AutoConfig.from_pretrained(path)",
        )
    decoder_layers(cast(nn.Module, model))  # refuses what is no language model of transformers
    return _Analysis.of(who, cast(PreTrainedModel, model), context)


def _without_weights(config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def _require_record(who: str, student: nn.Module) -> WiringRecord:
    record = record_of(student)
    if record is None:
        raise PassError(
            who,
            f"{type(student).__name__} was not rewired by fxskip",
            hint="student = fxskip.transform(model, spec), or load a saved one with AutoModelForCausalLM",
        )
    return record


def _require_experts(who: str, model: PreTrainedModel, blocks: Sequence[SubBlock]) -> None:
    if any(block.kind == "moe" for block in blocks):
        return
    raise PassError(
        who,
        f"{base_class(model).__name__} has no routed experts in any layer",
        where=f"layer 0: {', '.join(f'{b.kind} ({b.path})' for b in blocks if b.layer == 0)}",
        hint="fxskip rewires Mixture-of-Experts models",
    )


def _refuse_missing_stages(spec: Spec, example_inputs: tuple[Any, ...] | None, mesh: Any) -> None:
    """What the language can say and this version cannot do is refused, never ignored."""
    missing = []
    axes = {"expert": spec.parallel.expert, "tensor": spec.parallel.tensor} if spec.parallel else {}
    for axis, wish in axes.items():
        if wish is not None and (wish.size > 1 or wish.model_fields_set != {"size"}):
            missing.append(f"{_written(f'parallel.{axis}', wish)} (collectives)")
    schedule = spec.schedule
    if schedule is not None and (schedule.overlap, schedule.model_fields_set) != ("none", {"overlap"}):
        missing.append(f"{_written('schedule', schedule)} (the scheduler)")
    if (runtime := spec.runtime) is not None:
        if runtime.recompute != "none":
            missing.append(f"runtime.recompute: {runtime.recompute} (recomputation)")
        if runtime.transport != "auto":
            missing.append(f"runtime.transport: {runtime.transport} (transports)")
        if runtime.mode != "reference" and "mode" in runtime.model_fields_set:
            missing.append(f"runtime.mode: {runtime.mode} (the scheduled runtime)")
    if mesh is not None:
        missing.append("mesh= (collectives)")
    if example_inputs is not None:
        missing.append("example_inputs= (models that are not from transformers)")
    if missing:
        raise PassError(
            "transform",
            "this version has no stage for " + "; ".join(missing),
            hint="leave these out: the rewired model then runs in one process, in plain order. plan accepts them",
        )


def _written(section: str, wish: BaseModel) -> str:
    """The fields of a section that the spec spells out; the section's defaults where it spells out none."""
    values = wish.model_dump(exclude_unset=bool(wish.model_fields_set))
    return ", ".join(f"{section}.{name}: {value}" for name, value in values.items())
