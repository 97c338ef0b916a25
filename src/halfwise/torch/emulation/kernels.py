"""Kernels that treat a CPU's tensors as CUDA's autocast treats a GPU's.

A product in half precision is made of float32 ones: the operands are rounded to half and taken back, the operation is
carried out in float32, the result is rounded to half. That is what a GPU does but for the order of additions, and on a
CPU much faster than native half. Gradients pass the same casts on their way back, and are rounded by them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfwise.torch.emulation.lists import Category
from halfwise.torch.nested import map_tensors
from halfwise.torch.rounding import rounded

__all__ = ["WeightCasts", "kernel"]

_FLOATING = (torch.float32, torch.float16, torch.bfloat16)
_BELOW_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_WITH_DTYPE = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
_IN_FLOAT8 = ("linear", "addmm", "mm", "matmul")
_REFUSAL = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)


class WeightCasts:
    """Weights cast to half once for all their uses in a region, as autocast does: their gradients add up in half."""

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype], tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def get(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight` in `dtype`."""
        found = self._casts.get((id(weight), dtype))
        if found is not None and found[0]() is weight and found[1] == weight._version:
            return found[2]
        cast = weight.to(dtype)
        self._casts[id(weight), dtype] = (weakref.ref(weight), weight._version, cast)
        return cast

    def clear(self) -> None:
        """Forgets all."""
        self._casts.clear()


def kernel(name: str, category: Category, casts: WeightCasts, compute: Callable[[], str]) -> Callable[..., Any]:
    """The kernel of the operation `name`.

    Args:
        name: as in `lists.CATEGORIES`.
        category: what autocast does with it.
        casts: of the weights.
        compute: the format that is emulated, asked at each call: `"half"` (autocast's own dtype), `"tensorfloat32"` or
            `"float8"`.
    """
    operation = _overload(name)
    dtype_place = _place_of_dtype(operation) if category == "float32_set_opt_dtype" else 0

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BELOW_AUTOCAST):
            mode = compute()
            if mode == "tensorfloat32":
                return (
                    _tensorfloat32(operation, args, kwargs)
                    if category == "lower_precision"
                    else operation(*args, **kwargs)
                )
            match category:
                case "lower_precision":
                    if mode == "float8" and name in _IN_FLOAT8:
                        return _float8(operation, args, kwargs)
                    return _in_half(operation, args, kwargs, casts)
                case "float32":
                    return operation(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))
                case "float32_set_opt_dtype":
                    return operation(*_with_dtype(args, kwargs, dtype_place), **kwargs)
                case "float32_append_dtype":
                    return _append_dtype(name, operation, args, kwargs)
                case "widest":
                    widest = _widest((args, kwargs))
                    return operation(*_cast(args, widest), **_cast(kwargs, widest))
                case "refused":
                    raise RuntimeError(_REFUSAL)

    return run


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_half(operation: Any, args: Any, kwargs: Any, casts: WeightCasts) -> Any:
    half = torch.get_autocast_dtype("cpu")

    def operand(tensor: Tensor) -> Tensor:
        if not _eligible(tensor):
            return tensor
        if tensor.dtype is half:
            return tensor.float()
        cached = tensor.is_leaf and tensor.requires_grad and tensor.dtype is torch.float32 and not tensor._is_view()
        if cached and torch.is_grad_enabled() and torch.is_autocast_cache_enabled():
            return casts.get(tensor, half).float()
        return tensor.to(half).float()

    result = operation(*map_tensors(args, operand), **map_tensors(kwargs, operand))
    return map_tensors(result, lambda tensor: tensor.to(half) if tensor.dtype is torch.float32 else tensor)


def _tensorfloat32(operation: Any, args: Any, kwargs: Any) -> Any:
    """Operands rounded on the way forward, and the gradient that comes back, which is an operand there."""

    def operand(tensor: Tensor) -> Tensor:
        return _rounded_both_ways(tensor, "tensorfloat32", "", False) if tensor.dtype is torch.float32 else tensor

    def result(tensor: Tensor) -> Tensor:
        return _rounded_both_ways(tensor, "", "tensorfloat32", False) if tensor.dtype is torch.float32 else tensor

    return map_tensors(operation(*map_tensors(args, operand), **map_tensors(kwargs, operand)), result)


def _float8(operation: Any, args: Any, kwargs: Any) -> Any:
    """As Transformer Engine's linear layers: operands in e4m3, gradients in e5m2, both scaled; bfloat16 between."""

    def operand(tensor: Tensor) -> Tensor:
        if not _eligible(tensor):
            return tensor
        full = tensor.float()
        return (
            full if full.dim() < 2 else _rounded_both_ways(full, "float8_e4m3fn", "", True)
        )  # a bias is added unrounded

    def result(tensor: Tensor) -> Tensor:
        return (
            _rounded_both_ways(tensor, "", "float8_e5m2", True).bfloat16() if tensor.dtype is torch.float32 else tensor
        )

    return map_tensors(operation(*map_tensors(args, operand), **map_tensors(kwargs, operand)), result)


def _rounded_both_ways(tensor: Tensor, forward: str, backward: str, scaled: bool) -> Tensor:
    if torch._C._functorch.peek_interpreter_stack() is not None:  # a functorch transform takes no Function here
        return tensor + (rounded(tensor, forward, scaled=scaled) - tensor).detach() if forward else tensor
    found: Tensor = _Rounded.apply(tensor, forward, backward, scaled)  # type: ignore[no-untyped-call]
    return found


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
        return (rounded(gradient, ctx.format, scaled=ctx.scaled) if ctx.format else gradient), None, None, None


def _eligible(tensor: Tensor) -> bool:
    return tensor.dtype in _FLOATING


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return map_tensors(values, lambda tensor: tensor.to(dtype) if _eligible(tensor) else tensor)


def _with_dtype(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> tuple[Any, ...]:
    """The arguments with `dtype` float32 where none is given; `kwargs` is changed."""
    if not _eligible(args[0]):
        return args
    if len(args) > place:
        given = args[place] if args[place] is not None else torch.float32
        return (*args[:place], given, *args[place + 1 :])
    if kwargs.get("dtype") is None:
        kwargs["dtype"] = torch.float32
    return args


def _place_of_dtype(operation: Any) -> int:
    """Where `dtype` stands among the positional arguments; beyond them where it is keyword-only."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dtype" and not argument.kwarg_only:
            return place
    return len(operation._schema.arguments)


def _append_dtype(name: str, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _eligible(args[0]):
        return operation(*args, **kwargs)
    defaults = [argument.default_value for argument in operation._schema.arguments]
    given = [*args, *defaults[len(args) :]]
    for place, argument in enumerate(operation._schema.arguments):
        given[place] = kwargs.get(argument.name, given[place])
    return getattr(torch.ops.aten.norm, _WITH_DTYPE[name])(*given, dtype=torch.float32)


def _widest(values: Any) -> torch.dtype:
    dtypes: set[torch.dtype] = set()

    def note(tensor: Tensor) -> Tensor:
        if _eligible(tensor):
            dtypes.add(tensor.dtype)
        return tensor

    map_tensors(values, note)
    if not dtypes or torch.float32 in dtypes or len(dtypes) > 1:
        return torch.float32
    return dtypes.pop()
