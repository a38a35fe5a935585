"""The argument checks that all losses share. Each error names function, argument and what would be right."""

import math
from numbers import Real
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from fxskip.errors import FxskipError
from fxskip.loss.head import Head
from fxskip.loss.products import accumulation_dtype, gemm_operand

DEFAULT_CHUNK_TOKENS = 4096
FLOAT32 = torch.finfo(torch.float32)
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64


class KLOptions(TypedDict, total=False):
    """The keyword arguments that all forms of the KL share; `hidden_kl` documents them."""

    temperature: float
    token_weight: Tensor | None
    denominator: float | Tensor | None
    chunk_tokens: int
    student_bias: Tensor | None
    teacher_bias: Tensor | None
    scale: float
    softcap: float | None


class Reduction(NamedTuple):
    """How the tokens of a call are put together, checked but for the values of the weights."""

    weight_N: Tensor | None
    denominator: Tensor | float
    chunk_tokens: int


def checked_pair(
    who: str,
    student_hidden: Any,
    student_weight: Any,
    teacher_hidden: Any,
    teacher_weight: Any,
    /,
    **options: Unpack[KLOptions],
) -> Reduction:
    """Both sides are what they should be, and speak of the same tokens and of the same vocabulary."""
    known = KLOptions.__annotations__
    for name in options:
        if name not in known:
            raise FxskipError(who, f"{name} is no argument of it", hint=f"arguments are {', '.join(known)}")
    checked_hidden(who, "student_hidden", student_hidden)
    checked_hidden(who, "teacher_hidden", teacher_hidden)
    after_gemm: dict[str, Any] = {
        "scale": options.get("scale", 1.0),
        "softcap": options.get("softcap"),
        "temperature": options.get("temperature", 1.0),
    }
    student = student_hidden, student_weight, options.get("student_bias")
    teacher = teacher_hidden, teacher_weight, options.get("teacher_bias")
    require_head(who, "student_", *student, **after_gemm)
    require_head(who, "teacher_", *teacher, **after_gemm)
    require_a_pair(who, student_hidden, student_weight, teacher_hidden, teacher_weight)
    weight_N = checked_token_weight(who, student_hidden, options.get("token_weight"), name="student_hidden")
    return Reduction(
        weight_N,
        checked_denominator(who, student_hidden, weight_N, options.get("denominator")),
        checked_chunk(who, options.get("chunk_tokens", DEFAULT_CHUNK_TOKENS)),
    )


def require_a_pair(
    who: str, student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor
) -> None:
    require_same_device(who, student_hidden=student_hidden, teacher_hidden=teacher_hidden)
    if student_hidden.shape[0] != teacher_hidden.shape[0]:
        raise FxskipError(
            who,
            f"teacher_hidden has {teacher_hidden.shape[0]} tokens, student_hidden {student_hidden.shape[0]}",
            hint="give both models the same tokens, in the same order",
        )
    student_size, teacher_size = student_weight.shape[0], teacher_weight.shape[0]
    if student_size != teacher_size:
        smaller = min(student_size, teacher_size)
        raise FxskipError(
            who,
            f"teacher_weight has {teacher_size} tokens in its vocabulary, student_weight {student_size}",
            hint=f"if the surplus is padding, cut it with weight[:{smaller}]: "
            "a padded logit of 0 is not a probability of 0",
        )


def checked_hidden(who: str, name: str, hidden: Any) -> Tensor:
    """`hidden` if it is a [N, D] tensor of a float type."""
    if not isinstance(hidden, Tensor):
        raise FxskipError(
            who, f"{name} is a {type(hidden).__name__}", hint=f"{name} is a [N, D] float tensor"
        )
    if hidden.dim() != 2:
        raise FxskipError(
            who, f"{name} has shape {list(hidden.shape)}", hint=f"{name} is [N, D]: {name}.flatten(0, -2)"
        )
    if hidden.dtype not in DTYPES or hidden.layout != torch.strided:
        raise FxskipError(
            who,
            f"{name} is {hidden.dtype}, {hidden.layout}",
            hint="float32, bfloat16, float16 or float64, and dense",
        )
    return hidden


def checked_head(
    who: str,
    prefix: str,
    hidden: Tensor,
    weight: Any,
    bias: Any,
    *,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> Head:
    """The head that belongs to `hidden`, its weight cast to the dtype of `hidden`, as autocast would do."""
    require_head(who, prefix, hidden, weight, bias, scale=scale, softcap=softcap, temperature=temperature)
    return Head(gemm_operand(weight.to(hidden.dtype)), bias, scale, softcap, temperature)


def require_head(
    who: str,
    prefix: str,
    hidden: Tensor,
    weight: Any,
    bias: Any,
    *,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> None:
    name = f"{prefix}weight"
    checked_hidden(who, name, weight)
    if weight.shape[1] != hidden.shape[1]:
        raise FxskipError(
            who,
            f"{name} is {list(weight.shape)}, {prefix}hidden is {list(hidden.shape)}: their widths differ",
            hint=f"{name} is [V, {hidden.shape[1]}], the layout of nn.Linear.weight",
        )
    if weight.shape[0] == 0:
        raise FxskipError(who, f"{name} has no rows", hint="the vocabulary needs at least one token")
    if bias is not None and (not isinstance(bias, Tensor) or list(bias.shape) != [weight.shape[0]]):
        found = list(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise FxskipError(
            who, f"{prefix}bias is {found}", hint=f"{prefix}bias is [{weight.shape[0]}] or None"
        )
    if bias is not None and bias.dtype not in DTYPES:
        raise FxskipError(who, f"{prefix}bias is {bias.dtype}", hint="a float dtype")
    require_same_device(who, **{f"{prefix}hidden": hidden, name: weight, f"{prefix}bias": bias})
    require_positive(who, temperature=temperature)
    if softcap is not None:
        require_positive(who, softcap=softcap)
    if not math.isfinite(require_number(who, "scale", scale)) or scale == 0:
        raise FxskipError(
            who, f"scale is {scale}", hint="scale multiplies the logits: a finite number that is not 0"
        )


def require_number(who: str, name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise FxskipError(who, f"{name} has shape {list(value.shape)}", hint=f"{name} is a number")
        if value.requires_grad:
            raise FxskipError(
                who,
                f"{name} requires a gradient, and there is none by it",
                hint=f"{name} is a constant: {name}.item()",
            )
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise FxskipError(who, f"{name} is {value!r}", hint=f"{name} is a number")
    try:
        number = float(value)
    except OverflowError:  # of a large int
        number = math.inf
    if number != 0 and not FLOAT32.tiny <= abs(number) <= FLOAT32.max:  # NaN too
        raise FxskipError(who, f"{name} is {number}", hint=f"{name} is a finite number that float32 can hold")
    return number


def require_positive(who: str, **values: Any) -> None:
    for name, value in values.items():
        number = require_number(who, name, value)
        if not math.isfinite(number) or number <= 0:
            raise FxskipError(who, f"{name} is {value}", hint=f"{name} is a finite number above 0")


def require_same_device(who: str, **tensors: Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in tensors.items():
        if type(tensor).__name__ == "DTensor":
            raise FxskipError(
                who,
                f"{name} is a DTensor",
                hint=f"pass this rank's tensor: {name}.full_tensor(), or to_local() of a shard of the vocabulary",
            )
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise FxskipError(who, f"arguments are on several devices: {found}", hint="move them to one device")


def checked_chunk(who: str, chunk_tokens: Any) -> int:
    return require_whole_number(who, "chunk_tokens", chunk_tokens)


def require_whole_number(who: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**62:
        raise FxskipError(who, f"{name} is {value!r}", hint=f"{name} is a whole number, 1 or more")
    return value


def checked_token_weight(
    who: str, hidden: Tensor, token_weight: Any, *, name: str = "hidden"
) -> Tensor | None:
    """`token_weight` as [N] in a float dtype, or None when all tokens count the same; `require_weights` looks at
    the values. `name` is what the caller calls `hidden`."""
    if token_weight is None:
        return None
    count = hidden.shape[0]
    if not isinstance(token_weight, Tensor) or list(token_weight.shape) != [count]:
        found = list(token_weight.shape) if isinstance(token_weight, Tensor) else type(token_weight).__name__
        raise FxskipError(
            who, f"token_weight is {found}", hint=f"token_weight is [{count}], one number a token"
        )
    require_same_device(who, **{name: hidden, "token_weight": token_weight})
    if token_weight.is_complex():
        raise FxskipError(who, f"token_weight is {token_weight.dtype}", hint="real numbers, 0 or more")
    if token_weight.requires_grad:
        raise FxskipError(
            who, "token_weight requires a gradient", hint="weights are constants: token_weight.detach()"
        )
    return token_weight.to(accumulation_dtype(hidden.dtype))


def require_weights(who: str, weight_N: Tensor | None) -> None:
    """Values of token weights; waits for the device."""
    if weight_N is None:
        return
    bad = ~(torch.isfinite(weight_N) & (weight_N >= 0))
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise FxskipError(
            who, f"token_weight[{at}] is {float(weight_N[at])}", hint="weights are finite and 0 or more"
        )


def require_denominator(who: str, denominator: Tensor) -> None:
    """The value of a denominator that came as a tensor, or is a sum of weights; waits for the device."""
    value = float(denominator)
    require_positive(who, denominator=value)


def as_scalar(denominator: Tensor | float, hidden: Tensor) -> Tensor:
    wide = accumulation_dtype(hidden.dtype)
    if isinstance(denominator, Tensor):
        return denominator.to(hidden.device, wide)
    return torch.full((), denominator, dtype=wide, device=hidden.device)


def checked_denominator(
    who: str, hidden: Tensor, weight_N: Tensor | None, denominator: Any
) -> Tensor | float:
    """What the weighted sum is divided by: the given number, or the sum of the weights.

    A sum of 0 becomes 1: without a counted token the loss is 0, and 0 / 0 would make it NaN. A tensor (say,
    the tokens of all ranks after an all-reduce) is not read here: reading it would wait for the device.
    """
    if denominator is None:
        if weight_N is None:
            return float(max(hidden.shape[0], 1))
        total = weight_N.sum()
        return torch.where(total > 0, total, torch.ones_like(total))
    if isinstance(denominator, Tensor):
        if denominator.dim() != 0 or denominator.requires_grad:
            raise FxskipError(
                who,
                f"denominator has shape {list(denominator.shape)}, requires_grad={denominator.requires_grad}",
                hint="a number, or a tensor of shape [] without gradient",
            )
        return denominator
    require_positive(who, denominator=denominator)
    return float(denominator)
