"""Rewired models of any architecture, made from the original layers by hooks alone.

Nothing of fxskip is used, and no arithmetic of a layer is written again. A decoder layer is run several times:

-   What a block *reads* is set by a hook on the module that reads the stream (its norm, as a rule).
-   A stream that *lacks* an addend is what the layer gives when the module that makes the addend returns zeros.

So for x + attention(norm1(x)) followed by x + moe(norm2(x)), under farskip:

    x' = layer(x | norm1 reads y, norm2 reads x)
    y' = layer(x | norm1 reads y, norm2 reads x, experts return zeros)

Every sum is then made by the model's own code, so that a correct compiler agrees to the last bit or nearly.
"""

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Drops = Mapping[str, str]
"""What the blocks of each kind no longer see of the write just before them: "routed" or "all"."""

FARSKIP: Drops = {"attention": "routed", "moe": "all", "dense": "all"}
LADDER: Drops = {"attention": "all", "moe": "all", "dense": "all"}


@dataclass(frozen=True)
class Block:
    """One sub-block of a decoder layer, by paths of modules inside the layer."""

    kind: str
    """attention (whatever mixes the sequence), moe or dense."""
    read: tuple[str, ...]
    """The modules whose first input is the stream, or the `norm` of the stream; in any shape."""
    write: tuple[str, ...]
    """The modules whose outputs make up the write: zeros from all of them mean no write."""
    routed: tuple[str, ...] = ()
    """Those whose outputs make up the routed addend alone."""
    norm: str = ""
    """The norm before `read` where several blocks share it."""
    offset: str = ""
    """A parameter that the layer adds to what the modules give: its negative is no write."""
    sees: bool = True
    """Whether the original code lets it see the write just before its own: there is nothing to leave out else."""


# Names of modules in decoder layers of transformers, the first that a layer has is taken.
_MIXERS = ("self_attn", "linear_attn", "self_attention", "mamba", "conv", "norm_attn_norm.attn")
_MIXER_READERS = ("attn_hc", "input_layernorm", "operator_norm", "norm_attn_norm.norm_1")
_FEED_FORWARDS = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
_FEED_FORWARD_READERS = (
    "ffn_hc", "pre_feedforward_layernorm", "pre_mlp_layernorm", "pre_ff_layernorm", "ffn_norm", "norm_attn_norm.norm_2",
    "post_attention_layernorm",
)  # fmt: skip
_EXPERTS = ("experts", "text_moe.experts", "up_embed")
_SHARED_BESIDE = ("shared_mlp",)
"""Shared experts that a layer keeps beside its MoE module."""


def blocks_of(layer: nn.Module) -> tuple[Block, ...]:
    """The sub-blocks of a decoder layer in the order in which they write."""
    if _has(layer, "mixer"):  # nemotron_h: one block a layer
        return (_one_block(layer),)
    if isinstance(getattr(layer, "self_attn", None), nn.ModuleList):  # longcat_flash
        return _shortcut_blocks()
    if {name for name, _ in layer.named_children()} == {"self_attn", "mlp", "input_layernorm"}:  # cohere2_moe
        return _parallel_blocks(layer)
    mixer = _first(layer, _MIXERS)
    feed_forward = _first(layer, _FEED_FORWARDS)
    routed = _experts_in(layer, feed_forward)
    beside = tuple(name for name in _SHARED_BESIDE if _has(layer, name))
    # Without a norm before them, blocks read the stream themselves (flex_olmo).
    normed = _has(layer, "input_layernorm") or not _has(layer, "post_feedforward_layernorm")
    reader = _first(layer, _FEED_FORWARD_READERS) if normed else feed_forward
    if _has(layer, "experts"):  # gemma4: experts beside a dense MLP, each with a norm of its own
        return (
            Block("attention", ("input_layernorm",), (mixer,)),
            Block("moe", (reader, f"{reader}_2", "router"), (feed_forward, "experts"), ("experts",)),
        )
    offsets = [f"post_{name}_residual_scale.hidden_states_bias" for name in ("attention", "mlp")]
    if not _has(layer, "post_mlp_residual_scale"):  # zaya
        offsets = ["", ""]
    return (
        Block(
            "attention", (_first(layer, _MIXER_READERS) if normed else mixer,), (mixer,), offset=offsets[0]
        ),
        Block("moe" if routed else "dense", (reader,), (feed_forward, *beside), routed, offset=offsets[1]),
    )


def _one_block(layer: nn.Module) -> Block:
    routed = _experts_in(layer, "mixer")
    return Block("moe" if routed else "attention", ("norm",), ("mixer",), routed)


def _shortcut_blocks() -> tuple[Block, ...]:
    """Two attentions and two dense MLPs in turn; the experts read beside the first MLP and are added last."""
    return (
        Block("attention", ("input_layernorm.0",), ("self_attn.0",)),
        Block("dense", ("mlps.0",), ("mlps.0",), norm="post_attention_layernorm.0"),
        Block("attention", ("input_layernorm.1",), ("self_attn.1",)),
        Block("dense", ("post_attention_layernorm.1",), ("mlps.1",)),
        Block("moe", ("mlp",), ("mlp",), ("mlp",), sees=False),
    )


def _parallel_blocks(layer: nn.Module) -> tuple[Block, ...]:
    """Attention and MoE read the same stream through the same norm."""
    norm, routed = "input_layernorm", _experts_in(layer, "mlp")
    return (
        Block("attention", ("self_attn",), ("self_attn",), norm=norm),
        Block("moe" if routed else "dense", ("mlp",), ("mlp",), routed, sees=False),
    )


def _experts_in(layer: nn.Module, feed_forward: str) -> tuple[str, ...]:
    # jetmoe: no module of experts, and a bias that is theirs
    if _has(layer, f"{feed_forward}.output_linear"):
        return (feed_forward,)
    names = [f"{feed_forward}.{name}" for name in _EXPERTS if _has(layer, f"{feed_forward}.{name}")]
    return tuple(names[:1])


def _first(layer: nn.Module, names: tuple[str, ...]) -> str:
    found = next((name for name in names if _has(layer, name)), None)
    if found is None:
        children = [name for name, _ in layer.named_children()]
        raise LookupError(f"reference: {type(layer).__name__} has none of {names}; it has {children}")
    return found


def _has(layer: nn.Module, path: str) -> bool:
    return path in dict(layer.named_modules())


def rewired(model: PreTrainedModel, layers_path: str, drops: Drops) -> PreTrainedModel:
    """A copy of `model` in which the blocks of each kind read the stream without what `drops` says.

    The copy is run without a cache. `model` is left alone.
    """
    twin = copy.deepcopy(model)
    layers = list(twin.get_submodule(layers_path))
    needed = sorted({"", *drops.values()})
    streams: dict[str, Tensor] = {}
    for index, layer in enumerate(layers):
        layer.forward = functools.partial(
            _forward, layer, blocks_of(layer), drops, needed, streams, index == 0
        )
    return twin


def _forward(
    layer: nn.Module,
    blocks: tuple[Block, ...],
    drops: Drops,
    needed: list[str],
    streams: dict[str, Tensor],
    is_first: bool,
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run one rewired layer. `streams` holds the layer's input without each addend of the write before it."""
    if is_first:
        streams.update(dict.fromkeys(needed, hidden_states))
    # The loop of the model may only pass the stream on: anything it did in between would be a lost write.
    assert hidden_states is streams[""]

    def run(**changes: Any) -> tuple[Any, dict[str, Tensor]]:
        with _changed(layer, **changes) as seen:
            return type(layer).forward(layer, hidden_states, *args, **kwargs), seen

    reads: dict[str, Tensor] = {}
    for number, block in enumerate(blocks):
        drop = drops[block.kind]
        stream = block.norm or block.read[0]
        if not block.sees:
            continue
        if number == 0:
            seen = streams[drop]
        elif silent := _makers(blocks[number - 1], drop):
            seen = run(reads=reads, silent=silent, watch=stream)[1][stream]
        else:
            continue
        # The norm is called past its hooks, which are for what the layer itself calls.
        value = layer.get_submodule(block.norm).forward(seen) if block.norm else seen
        reads |= dict.fromkeys(block.read, value)
    output, _ = run(reads=reads)
    for drop in needed:
        silent = _makers(blocks[-1], drop)
        streams[drop] = _stream(run(reads=reads, silent=silent)[0] if silent else output)
    return output


def _makers(block: Block, addend: str) -> dict[str, str]:
    """The modules that make an addend of a block's write, with its offset; none where it has no such addend."""
    return dict.fromkeys({"": (), "all": block.write, "routed": block.routed}[addend], block.offset)


def _stream(output: Any) -> Tensor:
    stream = output[0] if isinstance(output, tuple) else output
    assert isinstance(stream, Tensor)
    return stream


@contextmanager
def _changed(
    layer: nn.Module, *, reads: Mapping[str, Tensor], silent: Mapping[str, str] | None = None, watch: str = ""
) -> Iterator[dict[str, Tensor]]:
    """Within, the modules in `reads` get these inputs, and those in `silent` return zeros less the named offset.

    Yields a dictionary that receives the input of the module `watch`.
    """
    seen: dict[str, Tensor] = {}

    def put(value: Tensor, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (value.view(args[0].shape), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": value.view(kwargs["hidden_states"].shape)}

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[watch] = args[0] if args else kwargs["hidden_states"]

    def silence(offset: str, _: nn.Module, __: Any, output: Any) -> Any:
        first, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
        nothing = torch.zeros_like(first)
        if offset:
            nothing = nothing - layer.get_parameter(offset)
        return nothing if rest is None else (nothing, *rest)

    with ExitStack() as hooks:
        if watch:
            hooks.enter_context(_removed(_hook(layer, watch, record)))
        for name, value in reads.items():
            hooks.enter_context(_removed(_hook(layer, name, functools.partial(put, value))))
        for name, offset in (silent or {}).items():
            hook = functools.partial(silence, offset)
            hooks.enter_context(_removed(layer.get_submodule(name).register_forward_hook(hook)))
        yield seen
    missing = [watch] if watch and watch not in seen else []
    assert not missing, f"{missing} did not run"


def _hook(layer: nn.Module, name: str, hook: Any) -> Any:
    return layer.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
