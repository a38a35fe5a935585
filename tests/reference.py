"""Rewired models written by hand, against which the compiled ones are judged.

The residual stream of a decoder with L layers receives 2 L writes, numbered from 1 in the order they happen:
the attention of layer l (from 0) makes write 2 l + 1 and its MLP or MoE makes write 2 l + 2. The embedding is
not a write. A write is a sum of addends: `routed` and `shared` for an MoE (`routed` alone where there is no
shared expert), and one addend for an attention or a dense MLP.

A block that reads without (addend, n) sees the stream as it would be had that addend of the n-th write before
the block never been added. `all` is every addend of that write. A write before the first one, or an addend
that the write does not have, has nothing to drop. The full stream receives every write, and the final norm
reads it.

Nothing here comes from fxskip: a model of transformers keeps its own loop, mask, cache, loss and submodules,
and only its decoder layers are replaced, by ones that spell out each read and each write.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Drop = tuple[str, int]  # ("routed", 1): the routed addend of the write just before the block


@dataclass(frozen=True)
class Without:
    """What the two blocks of one layer no longer see."""

    attention: tuple[Drop, ...] = ()
    mlp: tuple[Drop, ...] = ()


Rules = Mapping[int, Without]  # by layer; a layer that is absent reads the full stream


@dataclass(frozen=True)
class Write:
    """One write: its addends by name, and the terms that the stream receives, one addition after another.

    The original code sums the addends first, `r + (routed + shared)`: one term. `sum: split` has one each.
    """

    addends: dict[str, Tensor]
    terms: tuple[Tensor, ...]

    def without(self, names: set[str]) -> tuple[Tensor, ...]:
        if not names:
            return self.terms
        return tuple(addend for name, addend in self.addends.items() if name not in names)


class Stream:
    """The residual stream, kept as its value after each write so that any read can be spelt out.

    `values[k]` is the full stream after k writes. A read that drops nothing is the newest value. Any other
    starts at the value just before the first write that it drops from and adds the later ones again, in their
    order and grouped as the original code groups them: equal to the last bit means the same additions.
    """

    def __init__(self, embedding: Tensor) -> None:
        self.values = [embedding]
        self.writes: list[Write] = []

    def write(self, write: Write) -> None:
        self.values.append(sum(write.terms, start=self.values[-1]))
        self.writes.append(write)

    def read(self, drops: Iterable[Drop]) -> Tensor:
        dropped = self._dropped(drops)
        if not any(dropped):
            return self.values[-1]
        first = next(k for k, names in enumerate(dropped) if names)
        value = self.values[first]
        for write, names in zip(self.writes[first:], dropped[first:], strict=True):
            value = sum(write.without(names), start=value)
        return value

    def _dropped(self, drops: Iterable[Drop]) -> list[set[str]]:
        """For each write so far, the names of the addends that the reader does not see."""
        dropped: list[set[str]] = [set() for _ in self.writes]
        for name, n in drops:
            if n < 1:
                raise ValueError(f"reference: ({name!r}, {n}): the write just before a block is number 1")
            if n <= len(self.writes):
                addends = set(self.writes[-n].addends)
                dropped[-n] |= addends if name == "all" else addends & {name}
        return dropped


class RewiredLayer(nn.Module):
    """A decoder layer with the submodules, and so the state_dict keys, of the one that it replaces.

    The layers of one model share `streams`, a list that holds the stream of the running forward and nothing
    between forwards, so that the model can be copied and its activations are freed.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        index: int,
        last: bool,
        without: Without,
        split_sum: bool,
        streams: list[Stream],
    ) -> None:
        super().__init__()
        for name, child in layer.named_children():
            self.add_module(name, child)
        self.index, self.last, self.without = index, last, without
        self.split_sum, self.streams = split_sum, streams

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if self.index == 0:
            self.streams[:] = [Stream(hidden_states)]
        stream = self.streams[0]
        # The loop of the model may only pass the stream on: anything it did in between would be a lost write.
        assert hidden_states is stream.values[-1], f"layer {self.index} did not get the last layer's output"

        seen = stream.read(self.without.attention)
        attention = self.self_attn(hidden_states=self.input_layernorm(seen), **kwargs)[0]
        stream.write(Write({"attention": attention}, (attention,)))

        seen = stream.read(self.without.mlp)
        mlp = self.feed_forward if hasattr(self, "feed_forward") else self.mlp  # llama4 says feed_forward
        write = split_mlp(mlp, self.post_attention_layernorm(seen))
        stream.write(Write(write.addends, tuple(write.addends.values())) if self.split_sum else write)

        if self.last:
            self.streams.clear()
        return stream.values[-1]


def split_mlp(mlp: nn.Module, x: Tensor) -> Write:
    """Run a dense MLP or an MoE on `x`, with the operations of the original code in their original order.

    The addends are named in the order in which `sum: split` adds them: shared, then routed.
    """
    if not hasattr(mlp, "experts"):
        dense = mlp(x)
        return Write({"dense": dense}, (dense,))

    if hasattr(mlp, "shared_experts"):  # deepseek, glm4_moe
        # The router makes its own view of x, and makes it first: backward sums gradients of x in that order.
        _, weights, chosen = mlp.gate(x)
        routed = mlp.experts(x.view(-1, x.shape[-1]), chosen, weights).view(x.shape)
        shared = mlp.shared_experts(x)
        return Write({"shared": shared, "routed": routed}, (routed + shared,))

    rows = x.view(-1, x.shape[-1])
    if hasattr(mlp, "router"):  # llama4: each expert sees every token, scaled by its score
        scores, _ = mlp.router(rows)
        scaled = rows.repeat(scores.shape[1], 1) * scores.transpose(0, 1).reshape(-1, 1)
        routed = mlp.experts(scaled)
        shared = mlp.shared_expert(rows)
        routed = routed.reshape(scores.shape[1], -1, routed.shape[-1]).sum(dim=0).view(x.shape)
        shared = shared.view(x.shape)
        return Write({"shared": shared, "routed": routed}, (shared + routed,))

    if hasattr(mlp, "shared_expert"):  # qwen2_moe: a gate scales the shared expert
        shared = mlp.shared_expert(rows)
        _, weights, chosen = mlp.gate(rows)
        routed = mlp.experts(rows, chosen, weights).view(x.shape)
        shared = (torch.sigmoid(mlp.shared_expert_gate(rows)) * shared).view(x.shape)
        return Write({"shared": shared, "routed": routed}, (routed + shared,))

    _, weights, chosen = mlp.gate(rows)
    routed = mlp.experts(rows, chosen, weights).view(x.shape)
    return Write({"routed": routed}, (routed,))


def rewired(model: PreTrainedModel, rules: Rules, *, split_sum: bool = False) -> PreTrainedModel:
    """A copy of `model` whose blocks read as `rules` say. `model` is left alone.

    split_sum   add (r + shared) + routed instead of the original r + (routed + shared)
    """
    reference = copy.deepcopy(model)
    decoder = reference.model
    count = len(decoder.layers)
    if unknown := sorted(set(rules) - set(range(count))):
        raise ValueError(f"reference: rules name layers {unknown}, the model has layers 0 to {count - 1}")
    streams: list[Stream] = []
    decoder.layers = nn.ModuleList(
        RewiredLayer(
            layer,
            index=index,
            last=index == count - 1,
            without=rules.get(index, Without()),
            split_sum=split_sum,
            streams=streams,
        )
        for index, layer in enumerate(decoder.layers)
    )
    return reference
