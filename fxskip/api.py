"""The public calls: transform, parallelize, transport_of, plan, explain, trainable, spec_of, is_transformed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from os import PathLike
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from fxskip.analysis import Analysis
from fxskip.capture.program import as_module, is_program
from fxskip.capture.wrappers import inner_model, refuse_wrapped
from fxskip.checkpoint.auto_classes import loader
from fxskip.checkpoint.family import record_of, require_record, rewired_layers
from fxskip.checkpoint.program import program_record
from fxskip.collectives.cut_linear import Cut
from fxskip.errors import CheckpointError, PassError
from fxskip.passes.tensor_plan import tensor_plan
from fxskip.pipeline import analyse
from fxskip.planning import Plan, Trainable, trainable_parameters
from fxskip.planning.deployment import TOKENS, Wishes
from fxskip.program_analysis import ProgramAnalysis, explain_program
from fxskip.runtime.measured_costs import read_costs
from fxskip.runtime.parallelize import is_parallel, make_mesh, refuse_spread, spread
from fxskip.schedule.cost_table import CostTable
from fxskip.schedule.costs import CONTEXT
from fxskip.schedule.hardware import DEFAULT_HARDWARE, Hardware, MatrixType, load_hardware
from fxskip.schedule.roofline import CopiesPer
from fxskip.sharding import is_sharded
from fxskip.spec import Spec, load_spec
from fxskip.transport import TransportChoice

Model = TypeVar("Model", bound=nn.Module)
SpecSource = str | PathLike[str] | Mapping[str, Any] | Spec


def transform(
    model: Model,
    spec: SpecSource,
    *,
    inplace: bool = False,
    example_inputs: tuple[Any, ...] | None = None,
    mesh: DeviceMesh | None = None,
) -> Model:
    """Rewire the residual stream of a Mixture-of-Experts model as `spec` says.

    Args:
        model: a causal language model of transformers, or any module whose layers are a list that it calls in order,
            `x = layer(x, ...)`. Modules, parameters and state_dict keys stay. A model of transformers becomes an
            instance of a subclass that saves and loads with its wiring; any other keeps its class, and its wiring
            goes with deepcopy, pickle and torch.save of the whole model. Captured programs are taken too: an
            fx.GraphModule, or an ExportedProgram, which becomes the GraphModule of its `module()`. In a
            PeftModel, the model inside is rewired, adapters and all.
        spec: a file, a mapping, the name of a preset, or a loaded Spec.
        inplace: rewire `model` itself. By default a deep copy is made, so that the original can teach it.
        example_inputs: what a model that is not from transformers is called with, such as `(ids,)`. Only the tensors'
            shapes and dtypes matter: the model is called on the meta device, and computes nothing.
        mesh: a DeviceMesh with an axis "expert", for the spec's `parallel`. Without one, `parallel` spans all
            processes of the default group; see `parallelize`.

    Raises:
        SpecError: the spec is wrong, selects layers that the model does not have, or names a table of costs that
            cannot be read.
        ScheduleError: the costs were measured for another student.
        CaptureError: the model cannot be captured, or has no chain of layers.
        PassError: the architecture cannot be rewired like that, a rule has no effect, the model has no routed
            experts or is rewired already, or the spec asks for a stage that this version does not have.
    """
    loaded = load_spec(spec)
    _refuse_missing_stages(loaded, mesh)
    costs = None
    if is_parallel(loaded):
        mesh = make_mesh(loaded, model, mesh)  # before the work: what is missing shows now
        costs = read_costs(loaded, mesh)
    student = rewire(model, loaded, inplace=inplace, example_inputs=example_inputs)
    return _spread(student, loaded, mesh, costs) if mesh is not None else student


def rewire(
    model: Model, spec: Spec, *, inplace: bool = False, example_inputs: tuple[Any, ...] | None = None
) -> Model:
    """`transform` for one process, whatever the spec's `parallel` says."""
    if is_program(model):
        _refuse_parallel_program(spec)
        program = ProgramAnalysis.of("transform", as_module(model), example_inputs)
        return cast(Model, program.rewired(spec, program.connect(spec), inplace=inplace))
    if not inplace and is_sharded(model):
        raise PassError(
            "transform",
            f"{type(model).__name__} is sharded by fully_shard and cannot be copied",
            hint="pass inplace=True, or transform the model before it is sharded",
        )
    refuse_wrapped("transform", model)
    analysis = Analysis.of_original("transform", inner_model(model), example_inputs)
    wiring = analysis.connect(spec)
    analysis.try_out(inner_model(model), wiring)
    with torch.inference_mode(False):  # a copy made in inference mode could never be trained
        student = model if inplace else copy.deepcopy(model)
    analysis.install(student, spec, wiring)
    return student


def parallelize(student: Model, mesh: DeviceMesh | None = None) -> Model:
    """Spread a rewired model over processes, in place, as its spec's `parallel` says; returns it.

    `transform` does this by itself. A model that was saved and loaded runs in one process until this is called.

    Args:
        student: a rewired model, the same on every process.
        mesh: a DeviceMesh with an axis "expert" of the size that the spec says. By default one over all processes of
            the default group, where ranks 0..size-1 share one set of experts and further axes are data parallel.

    Parameters of routed experts become DTensors, sharded by expert. Every process then calls the model with tokens of
    its own, all of them equally often; a gradient of an expert is the sum over the processes of the axis. See
    docs/overlap.md.

    Raises:
        PassError: there is no process group, sizes do not fit, the processes hold different models or tables of
            costs, the model is spread already, or its experts cannot be cut.
        SpecError: `schedule.costs` names a file that is no table of costs.
        ScheduleError: the costs were measured for another student.
    """
    model = inner_model(student)
    spec = load_spec(require_record("parallelize", model).spec)
    if not is_parallel(spec):
        raise PassError(
            "parallelize",
            "the spec has no parallel section, or none with a size above 1",
            hint="transform with a spec that says, for example, parallel: {expert: {size: 2}}",
        )
    _refuse_missing_stages(spec, mesh)
    refuse_spread(rewired_layers(model))
    mesh = make_mesh(spec, model, mesh)
    return _spread(student, spec, mesh, read_costs(spec, mesh))


def _spread(student: Model, spec: Spec, mesh: DeviceMesh, table: CostTable | None) -> Model:
    model = inner_model(student)
    spread(
        model,
        rewired_layers(model),
        spec,
        mesh,
        _tensor_plans(model, spec),
        lambda: Analysis.of_student("parallelize", model).costs,
        table,
    )
    return student


def transport_of(student: nn.Module) -> TransportChoice:
    """What moves the rows of a spread model's experts between ranks, and why: times, where it was measured.

    Raises PassError for a model that is not rewired, and for one that runs in one process.
    """
    model = inner_model(student)
    require_record("transport_of", model)
    choice = getattr(next(iter(rewired_layers(model).values()), None), "fxskip_transport", None)
    if choice is None:
        raise PassError(
            "transport_of",
            "the model runs in one process, where nothing moves",
            hint="fxskip.parallelize(student), or transform with parallel: {expert: {size: 2}}",
        )
    return cast(TransportChoice, choice)


def _tensor_plans(student: nn.Module, spec: Spec) -> dict[str, dict[str, Cut]]:
    """How matrices are cut, by layer; nothing where the spec cuts none."""
    if spec.parallel is None or spec.parallel.tensor is None or spec.parallel.tensor.size == 1:
        return {}
    layers = Analysis.of_student("parallelize", student).layers
    graphs = {id(layer.graph): layer.graph for layer in layers}
    plans = {key: tensor_plan(analyse(graph)) for key, graph in graphs.items()}
    if not any(plans.values()):
        raise PassError(
            "parallelize",
            f"parallel.tensor.size is {spec.parallel.tensor.size}, and {type(student).__name__} has no matrix to cut",
            hint="attention and MLPs are cut whose last matrix, a linear layer, follows others; leave parallel.tensor "
            "out for this architecture",
        )
    return {layer.path: plans[id(layer.graph)] for layer in layers}


def plan(
    model: nn.Module | PreTrainedConfig,
    spec: SpecSource,
    *,
    example_inputs: tuple[Any, ...] | None = None,
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
        model: a model, or a config of transformers alone: no weights are made or read, and no GPU is used.
        spec: as in `transform`. Stages that do not exist yet are no error here.
        example_inputs: as in `transform`: for models that are not from transformers.
        hardware: h200, mi300x, b200, or the path of such a file; see docs/plan.md.
        tokens_per_rank: tokens of one rank in one forward pass.
        context_tokens: tokens of one sequence; a query attends to half of them on average.
        expert_size: ranks that the routed experts are spread over. By default that of the spec's `parallel`; where
            the spec has none, one domain of the hardware (8 GPUs), and the plan says so.
        tensor_size: ranks that attention, dense MLPs and shared experts are cut over; by default the spec's, or 1.
        dtype: type of weights, activations and what travels; by default the model's, bfloat16 for a config.
        copies_per: whether a token crosses the network for each "expert" (a plain all-to-all) or once for each other
            "domain" that holds some of its experts, which passes it on (as DeepEP does).

    What the graphs do not show (the inside of a leaf, the scan of a mixer) is None in the plan, and "unknown" in its
    text. Raises what `transform` raises for the spec and the architecture, and SpecError for hardware and sizes.
    """
    loaded = load_spec(spec)
    wishes = Wishes(
        load_hardware(hardware), tokens_per_rank, context_tokens, expert_size, tensor_size, dtype, copies_per
    )
    if is_program(model):
        program = ProgramAnalysis.of("plan", as_module(model), example_inputs, context_tokens)
        return program.plan(loaded, program.connect(loaded), wishes)
    module = _without_weights(model) if isinstance(model, PreTrainedConfig) else inner_model(model)
    analysis = Analysis.of_original("plan", module, example_inputs, context_tokens)
    return analysis.plan(loaded, analysis.connect(loaded), wishes)


def explain(student: nn.Module) -> Plan:
    """Say what was done to a rewired model. The model is captured again and checked against its record.

    Raises PassError for a model that is not rewired, CheckpointError where its layers are not wired as recorded.
    """
    student = inner_model(student)
    record = require_record("explain", student)
    wishes = Wishes(load_hardware(DEFAULT_HARDWARE))
    if (program := program_record(student)) is not None:
        return explain_program(student, program, wishes)
    analysis = Analysis.of_student("explain", student)
    spec = load_spec(record.spec)
    wiring = analysis.connect(spec)
    layers = [student.get_submodule(layer.path) for layer in analysis.layers]
    installed = tuple(getattr(layer, "fxskip_wiring", None) for layer in layers)
    if installed != wiring.regions:
        raise CheckpointError(
            "explain",
            "the decoder layers are not wired as the model's record says",
            where=type(student).__name__,
            hint="a layer or the config was replaced after the transform; transform the original model again",
        )
    return analysis.plan(spec, wiring, wishes)


def trainable(student: nn.Module) -> Trainable:
    """Say which parameters of a rewired model train, sub-block by sub-block, and which experts stay frozen.

    Raises PassError for a model that is not rewired.
    """
    model = inner_model(student)
    return trainable_parameters(model, require_record("trainable", model).blocks)


def spec_of(student: nn.Module) -> Spec:
    """The spec that a rewired model was made with. Raises PassError for any other model."""
    return load_spec(require_record("spec_of", inner_model(student)).spec)


def is_transformed(model: object) -> bool:
    """Whether `model` was rewired by fxskip, here or before it was saved."""
    return record_of(inner_model(model)) is not None


def _without_weights(config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = loader("plan", config).from_config(config, dtype=torch.bfloat16)
    return model


def _refuse_missing_stages(spec: Spec, mesh: Any) -> None:
    """What the language can say and this version cannot do is refused, never ignored."""
    missing, idle = [], []
    schedule, runtime = spec.schedule, spec.runtime
    if schedule is not None and schedule.costs == "measured":
        _refuse_to_measure()
    if not is_parallel(spec):
        expert = spec.parallel.expert if spec.parallel is not None else None
        if expert is not None and "exchange" in expert.model_fields_set:
            idle.append(f"parallel.expert.exchange: {expert.exchange} with size 1")
        if runtime is not None and runtime.transport != "auto":
            idle.append(f"runtime.transport: {runtime.transport}")
        if runtime is not None and runtime.mode != "reference" and "mode" in runtime.model_fields_set:
            idle.append(f"runtime.mode: {runtime.mode}")
        if schedule is not None and (schedule.overlap, schedule.model_fields_set) != ("none", {"overlap"}):
            idle.append("schedule")
        if mesh is not None:
            idle.append("mesh=")
    elif runtime is not None and runtime.lower != "none":
        missing.append(f"runtime.lower: {runtime.lower} together with parallel")
    if missing:
        raise PassError(
            "transform",
            "this version has no stage for " + "; ".join(missing),
            hint="leave these out; plan accepts them",
        )
    if idle:
        raise PassError(
            "transform",
            f"in one process there is nothing to do for {'; '.join(idle)}",
            hint="add parallel: {expert: {size: 2}}, or leave these out",
        )


def _refuse_to_measure() -> None:
    """Costs are known when a student has run."""
    raise PassError(
        "transform",
        "schedule.costs: measured: nothing has been measured yet, for the student does not exist",
        hint="transform with costs: roofline, then\n"
        "fxskip.trace(student, batch, out='trace')\n"
        "and transform the original again with schedule: {costs: trace/costs.json}; or run fxskip trace",
    )


def _refuse_parallel_program(spec: Spec) -> None:
    if is_parallel(spec):
        raise PassError(
            "transform",
            "parallel: a captured program has no decoder layers that could be spread over processes",
            hint="transform the model that the program was captured from",
        )
