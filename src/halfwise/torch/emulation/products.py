"""Products of matrices in half precision, tensorfloat32 and float8, carried out in float32.

The operands are rounded and taken back, the operation runs in float32, its result is rounded. That is what a GPU does
but for the order of additions, and on a CPU much faster than native half. Gradients pass the same casts on their way
back, and are rounded by them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfwise.torch.emulation.casts import WeightCasts, eligible
from halfwise.torch.nested import map_tensors
from halfwise.torch.rounding import rounded

__all__ = ["in_float8", "in_half", "in_tensorfloat32", "takes_float8"]

_LINEAR = ("linear", "addmm", "mm")


def in_half(operation: Any, args: Any, kwargs: Any, casts: WeightCasts, *, keep: bool) -> Any:
    """In autocast's format; `keep` as in `WeightCasts.in_half`."""
    half = torch.get_autocast_dtype("cpu")

    def operand(tensor: Tensor) -> Tensor:
        return casts.in_half(tensor, half, keep=keep)

    result = operation(*map_tensors(args, operand), **map_tensors(kwargs, operand))
    return map_tensors(result, lambda tensor: tensor.to(half) if tensor.dtype is torch.float32 else tensor)


def in_tensorfloat32(operation: Any, args: Any, kwargs: Any) -> Any:
    """Operands rounded on the way forward, and the gradient that comes back, which is an operand there."""

    def operand(tensor: Tensor) -> Tensor:
        return _round(tensor, "tensorfloat32", scaled=False) if tensor.dtype is torch.float32 else tensor

    def result(tensor: Tensor) -> Tensor:
        return _round_gradient(tensor, "tensorfloat32", scaled=False) if tensor.dtype is torch.float32 else tensor

    return map_tensors(operation(*map_tensors(args, operand), **map_tensors(kwargs, operand)), result)


def takes_float8(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the operation is a layer's product, and not one of two batches of matrices, as attention's are."""
    return name in _LINEAR or (name == "matmul" and len(args) > 1 and args[1].dim() == 2)


def in_float8(operation: Any, args: Any, kwargs: Any) -> Any:
    """As Transformer Engine's linear layers: operands in e4m3, gradients in e5m2, both scaled; bfloat16 between."""

    def operand(tensor: Tensor) -> Tensor:
        if not eligible(tensor):
            return tensor
        is_weight = tensor.requires_grad and tensor.is_leaf
        full = tensor.float() if is_weight and tensor.dim() > 1 else tensor.bfloat16().float()
        return full if full.dim() < 2 else _round(full, "float8_e4m3fn", scaled=True)  # a bias stays in bfloat16

    def result(tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        return _round_gradient(tensor, "float8_e5m2", scaled=True).bfloat16()

    return map_tensors(operation(*map_tensors(args, operand), **map_tensors(kwargs, operand)), result)


def _round(tensor: Tensor, format_name: str, *, scaled: bool) -> Tensor:
    """`tensor` rounded; its gradient passes as it is."""
    if _in_functorch():
        target = rounded(tensor, format_name, scaled=scaled)
        return torch.where(tensor.isfinite(), tensor + (target - tensor).detach(), target)
    found: Tensor = _Rounded.apply(tensor, format_name, "", scaled)  # type: ignore[no-untyped-call]
    return found


def _round_gradient(tensor: Tensor, format_name: str, *, scaled: bool) -> Tensor:
    """`tensor`, whose gradient is rounded; in a functorch transform it is not."""
    if _in_functorch():
        return tensor
    found: Tensor = _Rounded.apply(tensor, "", format_name, scaled)  # type: ignore[no-untyped-call]
    return found


def _in_functorch() -> bool:
    """Inside `torch.func`'s transforms a kernel of autocast cannot call an autograd Function."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class _Rounded(torch.autograd.Function):
    """`apply(tensor, forward, backward, scaled)`: rounds the tensor and its gradient to these formats, "" to none."""

    @staticmethod
    def forward(tensor: Tensor, forward: str, backward: str, scaled: bool) -> Tensor:  # noqa: ARG004
        return rounded(tensor, forward, scaled=scaled) if forward else tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        del output
        _, _, ctx.format, ctx.scaled = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        if ctx.format:  # by itself, so that a second derivative passes
            gradient = _Rounded.apply(gradient, ctx.format, "", ctx.scaled)  # type: ignore[no-untyped-call]
        return gradient, None, None, None
