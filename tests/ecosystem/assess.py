"""What fxskip makes of one architecture: a row of docs/coverage.md."""

import functools
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import fxskip
from fxskip.analysis import Analysis
from fxskip.capture.hf import decoder_layers
from fxskip.checkpoint.family import record_of
from tests.ecosystem.architectures import auto_class, tiny
from tests.ecosystem.reference import FARSKIP, LADDER, Drops, rewired
from tests.zoo import batch

ROWS, COLUMNS, NEW_TOKENS = 2, 20, 8
ROUNDING = 1e-5
"""Largest difference of logits from the reference, in units of their standard deviation, that counts as exact."""
DISTINCT = 1e-2
"""Smallest difference between the reference and the original: below, a wrong wire would not show."""


@dataclass(frozen=True)
class Row:
    """What was found for one model type. "exact", a difference, or the reason of a refusal."""

    model_type: str
    blocks: str = ""
    identity: str = ""
    farskip: str = ""
    ladder: str = ""
    generate: str = ""
    reload: str = ""
    refused: str = ""
    seconds: float = 0.0

    @property
    def state(self) -> str:
        """exact, whole writes (all but farskip, which is refused), refused, or failed."""
        if self.refused:
            return "refused"
        others = (self.identity, self.ladder, self.generate, self.reload)
        if any(not found.startswith("exact") for found in others):
            return "failed"
        if self.farskip == "exact":
            return "exact"
        return "whole writes" if self.farskip.startswith("refused") else "failed"


def be_quiet() -> None:
    """What a process that only assesses needs: one thread, and no messages of transformers."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def assess(model_type: str) -> Row:
    """Try everything on a tiny model of `model_type`."""
    start = time.perf_counter()
    model = tiny(model_type)
    ids = batch(ROWS, COLUMNS)["input_ids"]
    with _captured_once():
        try:
            identity = fxskip.transform(model, "identity")
        except fxskip.FxskipError as error:
            return Row(model_type, refused=_reason(error), seconds=time.perf_counter() - start)
        farskip, ladder = _student(model, "farskip"), _student(model, "ladder")
    saved = identity if isinstance(farskip, fxskip.PassError) else farskip
    return Row(
        model_type,
        blocks=_blocks(identity),
        identity=_or_error(_same_values, model, identity, ids),
        farskip=_or_error(_against_reference, model, farskip, FARSKIP, ids),
        ladder=_or_error(_against_reference, model, ladder, LADDER, ids),
        generate=_or_error(_generation, model, identity, farskip, ids),
        reload=_or_error(_reload, model_type, saved, ids),
        seconds=time.perf_counter() - start,
    )


@contextmanager
def _captured_once() -> Iterator[None]:
    """Within, transforms of one model share its analysis: capture is most of their time."""
    with patch.object(Analysis, "of_original", functools.cache(Analysis.of_original)):
        yield


def _or_error(check: Callable[..., str], *arguments: object) -> str:
    """What the check found, or what fxskip raised in it: errors of others are not for a table."""
    try:
        return check(*arguments)
    except fxskip.FxskipError as error:
        return f"fails: {_reason(error)}"


def _reason(error: fxskip.FxskipError) -> str:
    """The error in one line, with the paths of transformers' files as they are in every installation."""
    line = f"{error.who}: {error.found}" + (f" ({error.where.splitlines()[0]})" if error.where else "")
    return re.sub(r'File "[^"]*/site-packages/', 'File "', line)


def _student(model: PreTrainedModel, spec: str) -> PreTrainedModel | fxskip.PassError:
    try:
        return fxskip.transform(model, spec)
    except fxskip.PassError as error:
        return error


def _blocks(student: PreTrainedModel) -> str:
    """The kinds of sub-block with their addends and how often each occurs: "3 attention, 2 moe (routed, shared)"."""
    record = record_of(student)
    assert record is not None
    names = [f"moe ({', '.join(b.addends)})" if b.kind == "moe" else b.kind for b in record.blocks]
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def _same_values(model: PreTrainedModel, student: PreTrainedModel, ids: Tensor) -> str:
    """Whether logits and the gradient of every parameter are equal to the last bit."""
    found = []
    for each in (model, student):
        each.zero_grad()
        logits = each(input_ids=ids, use_cache=False).logits
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
        (logits * weights).sum().backward()
        gradients = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
        found.append({"logits": logits.detach(), **gradients})
        each.zero_grad()
    stock, own = found
    if stock.keys() != own.keys():
        return f"gradients of {len(stock.keys() ^ own.keys())} parameters are missing"
    wrong = {n: float((stock[n] - own[n]).abs().max()) for n in stock if not torch.equal(stock[n], own[n])}
    if not wrong:
        return "exact"
    worst = max(wrong, key=lambda name: wrong[name])
    return f"{len(wrong)} of {len(stock)} tensors differ, {worst} by {wrong[worst]:.0e}"


def _against_reference(
    model: PreTrainedModel, student: PreTrainedModel | fxskip.PassError, drops: Drops, ids: Tensor
) -> str:
    if isinstance(student, fxskip.PassError):
        return f"refused: {_reason(student)}"
    expected = _logits(rewired(model, decoder_layers(model)[0], drops), ids)
    if (moved := _difference(expected, _logits(model, ids))) < DISTINCT:
        return f"not tested: the wiring changes the logits by only {moved:.0e}"
    wrong = _difference(_logits(student, ids), expected)
    return "exact" if wrong <= ROUNDING else f"wrong by {wrong:.0e}"


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference in units of the standard deviation of `expected`."""
    return float((found - expected).abs().max() / expected.std())


def _generation(
    model: PreTrainedModel,
    identity: PreTrainedModel,
    farskip: PreTrainedModel | fxskip.PassError,
    ids: Tensor,
) -> str:
    """Whether eight greedy tokens with a cache are those of the original, and of farskip those without a cache."""
    stock = _generate(model, ids)
    if not torch.equal(_generate(identity, ids), stock):
        return "identity gives other tokens"
    if isinstance(farskip, fxskip.PassError):
        return "exact"
    if not _computes_the_same_with_a_cache(model, stock):  # doge routes tokens by what comes after them
        return "exact for identity; the original gives other logits without a cache"
    same = torch.equal(_generate(farskip, ids), _recomputed(farskip, ids))
    return "exact" if same else "farskip gives other tokens"


def _computes_the_same_with_a_cache(model: PreTrainedModel, tokens: Tensor) -> bool:
    """Whether the logits of `tokens`, one after the other with a cache, are those of all at once, up to rounding."""
    with torch.no_grad():
        cached = model(input_ids=tokens[:, :-NEW_TOKENS], use_cache=True)
        found = [cached.logits[:, -1]]
        for index in range(-NEW_TOKENS, -1):
            one = tokens[:, index : index + 1]
            cached = model(input_ids=one, past_key_values=cached.past_key_values, use_cache=True)
            found.append(cached.logits[:, -1])
    whole = _logits(model, tokens)[:, -NEW_TOKENS - 1 : -1]
    return bool((torch.stack(found, 1) - whole).abs().max() < 100 * ROUNDING * whole.std())


def _recomputed(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`ids` with eight greedy tokens, each from a forward of all tokens before it."""
    for _ in range(NEW_TOKENS):
        ids = torch.cat([ids, _logits(model, ids)[:, -1:].argmax(-1)], dim=1)
    return ids


def _generate(model: PreTrainedModel, ids: Tensor) -> Tensor:
    tokens = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    assert isinstance(tokens, Tensor)
    return tokens


def _reload(model_type: str, student: PreTrainedModel, ids: Tensor) -> str:
    """Whether the saved student, loaded by its Auto class, gives the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        student.save_pretrained(folder)
        loaded = auto_class(model_type).from_pretrained(folder)
    return "exact" if torch.equal(_logits(loaded, ids), _logits(student, ids)) else "other values"
