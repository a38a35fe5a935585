"""The public calls: transform, plan, explain, trainable, spec_of, is_transformed."""

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
from fxskip.capture.sharding import is_sharded
from fxskip.capture.wrappers import inner_model, refuse_wrapped
from fxskip.checkpoint.family import adopt, base_class, record_of
from fxskip.checkpoint.record import WiringRecord
from fxskip.errors import CaptureError, CheckpointError, PassError
from fxskip.ir import with_streams
from fxskip.passes.sub_blocks import sub_blocks
from fxskip.pipeline import analyse, rewire
from fxskip.planning import Plan, Trainable, make_plan, trainable_parameters
from fxskip.schedule.costs import Costs, block_costs
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
            The result is an instance of a subclass that saves and loads with its wiring. In a PeftModel, the model
            inside is rewired, adapters and all.
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
    if not inplace and is_sharded(model):
        raise PassError(
            "transform",
            f"{type(model).__name__} is sharded by fully_shard and cannot be copied",
            hint="pass inplace=True, or transform the model before it is sharded",
        )
    refuse_wrapped("transform", model)
    analysis = _analyse_stock("transform", inner_model(model))
    wiring = analysis.connect(loaded)
    analysis.try_out(wiring)
    with torch.inference_mode(False):  # a copy made in inference mode could never be trained
        student = model if inplace else copy.deepcopy(model)
    adopt(inner_model(student), WiringRecord.of(loaded, analysis.blocks, wiring), within=student)
    return student


def plan(model: nn.Module | PreTrainedConfig, spec: SpecSource) -> Plan:
    """Say what `transform` would do, without doing it. A config is enough: no weights are made or read.

    Raises what `transform` raises for the spec and the architecture; stages that do not exist yet are no error.
    """
    loaded = load_spec(spec)
    analysis = _analyse_stock(
        "plan", _without_weights(model) if isinstance(model, PreTrainedConfig) else inner_model(model)
    )
    return analysis.plan(loaded, analysis.connect(loaded))


def explain(student: nn.Module) -> Plan:
    """Say what was done to a rewired model. The model is captured again and checked against its record.

    Raises PassError for a model that is not rewired, CheckpointError where its layers are not wired as recorded.
    """
    student = inner_model(student)
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
    return analysis.plan(spec, wiring)


def trainable(student: nn.Module) -> Trainable:
    """Say which parameters of a rewired model train, sub-block by sub-block, and which experts stay frozen.

    Raises PassError for a model that is not rewired.
    """
    model = inner_model(student)
    return trainable_parameters(model, _require_record("trainable", model).blocks)


def spec_of(student: nn.Module) -> Spec:
    """The spec that a rewired model was made with. Raises PassError for any other model."""
    return load_spec(_require_record("spec_of", inner_model(student)).spec)


def is_transformed(model: object) -> bool:
    """Whether `model` was rewired by fxskip, here or before it was saved."""
    return record_of(inner_model(model)) is not None


@dataclass(frozen=True)
class _Analysis:
    """Everything known about a model before a spec is applied."""

    model: str
    graphs: tuple[fx.Graph, ...]
    """The captured graph of each layer; layers of one kind share one."""
    blocks: tuple[SubBlock, ...]
    costs: tuple[Costs, ...]

    @classmethod
    def of(cls, who: str, model: PreTrainedModel) -> _Analysis:
        captured = capture_layers(model)
        analysed: dict[int, fx.Graph] = {}
        for layer in captured:
            if id(layer.graph) not in analysed:
                try:
                    analysed[id(layer.graph)] = analyse(layer.graph)
                except PassError as error:
                    raise error.within(f"{base_class(model).__name__}, {layer.path}") from None
        bytes_per_element = model.dtype.itemsize
        blocks: list[SubBlock] = []
        costs: list[Costs] = []
        for index, layer in enumerate(captured):
            graph = analysed[id(layer.graph)]
            found = sub_blocks(graph, layer=index, layer_path=layer.path)
            blocks += found
            costs += [
                block_costs(graph, i, bytes_per_element=bytes_per_element) for i in range(1, len(found) + 1)
            ]
        _require_experts(who, model, blocks)
        return cls(base_class(model).__name__, tuple(c.graph for c in captured), tuple(blocks), tuple(costs))

    def connect(self, spec: Spec) -> ModelWiring:
        return connect(spec, self.blocks)

    def try_out(self, wiring: ModelWiring) -> None:
        """Rewire each kind of layer once, so that a defect shows now and not at the first forward."""
        for graph, region in dict.fromkeys(zip(self.graphs, wiring.regions, strict=True)):
            rewire(with_streams(graph, len(region.inputs), len(region.outputs)), region)

    def plan(self, spec: Spec, wiring: ModelWiring) -> Plan:
        return make_plan(self.model, spec.name or "an unnamed spec", wiring, self.blocks, self.costs)


def _analyse_stock(who: str, model: object) -> _Analysis:
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
    return _Analysis.of(who, cast(PreTrainedModel, model))


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
