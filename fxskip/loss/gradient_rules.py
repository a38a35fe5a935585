"""How autograd and torch.compile see a loss whose gradient was formed in its forward.

Each loss is a custom operator with the arguments (hidden, weight, bias, wanted, who, ...) and the results (loss,
d hidden, d weight, d bias); results that are not wanted are empty. torch.compile sees one call, and its shapes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef  # torch.library has it too, but not for type checkers
from torch.autograd import forward_ad

from fxskip.errors import FxskipError
from fxskip.loss.engine import Formed
from fxskip.loss.implementation import obstacle_to_triton
from fxskip.loss.products import accumulation_dtype, gradient_dtype

SCALE_BLOCK = 8192  # elements a program

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def wanted_of(who: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[bool]:
    """The operators' argument `wanted`. Asked outside of them: inside, nothing requires a gradient."""
    refuse_transforms(who, (hidden, weight, bias))
    enabled = torch.is_grad_enabled()
    return [enabled and x is not None and x.requires_grad for x in (hidden, weight, bias)]


def refuse_transforms(who: str, arguments: Sequence[Tensor | None]) -> None:
    """Forward-mode derivatives and torch.func see an operator without derivative rules of theirs, and would be silent:
    a tangent of 0, or no gradient."""
    if torch.compiler.is_compiling():
        return
    for argument in arguments:
        if argument is None:
            continue
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(argument)
        if is_wrapped or forward_ad.unpack_dual(argument).tangent is not None:
            raise FxskipError(
                who,
                "torch.func transforms and forward-mode derivatives do not go through it",
                hint="use .backward() or torch.autograd.grad; without vmap, put the batch into the tokens",
            )


def as_results(formed: Formed, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Results:
    """`formed` in the shapes of the arguments: the gradient of a vocabulary's padding is 0."""
    d_hidden = hidden.new_empty(0) if formed.hidden is None else formed.hidden
    d_weight = hidden.new_empty(0) if formed.weight is None else with_padding(formed.weight, weight)
    d_bias = hidden.new_empty(0) if formed.bias is None or bias is None else with_padding(formed.bias, bias)
    return formed.loss, d_hidden, d_weight, d_bias


def with_padding(gradient: Tensor, argument: Tensor) -> Tensor:
    if gradient.shape == argument.shape:
        return gradient
    padded = gradient.new_zeros(argument.shape)
    padded[: len(gradient)] = gradient
    return padded


def register_gradient_rules(operator: CustomOpDef) -> None:
    """Gives `operator` its shapes and its derivative."""

    def shapes(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool], *_: Any) -> Results:
        wide = accumulation_dtype(hidden.dtype)

        def gradient(x: Tensor | None, dtype: torch.dtype, is_wanted: bool) -> Tensor:
            if x is None or not is_wanted:
                return hidden.new_empty(0)
            return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

        loss, (for_hidden, for_weight, for_bias) = hidden.new_empty((), dtype=wide), wanted
        return (
            loss,
            gradient(hidden, gradient_dtype(hidden.dtype), for_hidden),
            gradient(weight, wide, for_weight),
            gradient(bias, wide, for_bias),
        )

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        hidden, weight, bias, ctx.wanted, ctx.who, *others = inputs
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.other_inputs = 2 + len(others)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])

    def backward(ctx: Any, d_loss: Tensor | None, *_: Any) -> Any:
        if torch.is_grad_enabled():  # only with create_graph=True
            raise FxskipError(
                ctx.who,
                "create_graph=True asks for a gradient of the gradient, and there is none: "
                "the gradient was formed in the forward, as a constant",
                hint="drop create_graph=True, or use fxskip.loss.dense_kl",
            )
        # With retain_graph=True the saved gradients are used again; without, autograd forgets them after this call.
        is_used_again = torch._C._autograd._get_current_graph_task_keep_graph()
        gradients = (
            scaled(saved, d_loss, dtype, in_place=not is_used_again)
            if is_wanted and d_loss is not None
            else None
            for saved, dtype, is_wanted in zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted, strict=True)
        )
        return *gradients, *[None] * ctx.other_inputs

    operator.register_fake(shapes)
    operator.register_autograd(backward, setup_context=keep)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
    """gradient * factor in `dtype`, rounded once; `in_place` says that `gradient` may be overwritten."""
    if gradient.dtype == dtype and in_place:
        scale_in_place(gradient, factor)
        return gradient
    result: Tensor = scaled_copy(gradient, factor, dtype)
    return result


@torch.library.custom_op("fxskip::scaled_copy", mutates_args=())
def scaled_copy(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient * factor` in another tensor, in one pass without a temporary."""
    result = torch.empty_like(gradient, dtype=dtype)
    write_scaled(gradient, factor, result)
    return result


@scaled_copy.register_fake
def _(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


@torch.library.custom_op("fxskip::scale_in_place", mutates_args=("gradient",))
def scale_in_place(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor."""
    write_scaled(gradient, factor, gradient)


@scale_in_place.register_fake
def _(gradient: Tensor, factor: Tensor) -> None:
    pass


def write_scaled(gradient: Tensor, factor: Tensor, result: Tensor) -> None:
    """result = gradient * factor, on CUDA by a kernel: PyTorch's own is slow where bfloat16 meets a float32 scalar."""
    if gradient.is_cuda and obstacle_to_triton(gradient, 1.0) is None:
        from fxskip.loss.row_kernels import scale_into

        size = gradient.numel()
        scale_into[(-(-size // SCALE_BLOCK),)](gradient, result, factor, size, BLOCK=SCALE_BLOCK, num_warps=8)
    else:
        torch.mul(gradient, factor, out=result)
