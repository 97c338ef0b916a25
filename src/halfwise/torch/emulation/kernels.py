"""Kernels that treat a CPU's tensors as CUDA's autocast treats a GPU's.

What is emulated follows from autocast's own state, which threads and nested regions have for themselves: float16 and
bfloat16 are its formats; float32, which it never has otherwise, stands for tensorfloat32. Only float8, which is
bfloat16 with other products, has to be told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfwise.torch.emulation.casts import WeightCasts, cast, eligible
from halfwise.torch.emulation.lists import CARELESS, CATEGORIES, RECURRENT
from halfwise.torch.emulation.products import in_float8, in_half, in_tensorfloat32, takes_float8
from halfwise.torch.nested import map_tensors

__all__ = ["kernels"]

_HALF = (torch.float16, torch.bfloat16)
_BELOW_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_WITH_DTYPE = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
_REFUSAL = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)

_Kernel = Callable[..., Any]


def kernels(casts: WeightCasts, is_float8: Callable[[], bool]) -> dict[str, _Kernel]:
    """`{operation: its kernel}` for all that CUDA's autocast knows and the installed PyTorch has.

    Args:
        casts: of the weights.
        is_float8: whether a region in bfloat16 is meant to be one in float8; asked at each call.
    """
    made: dict[str, _Kernel] = {}
    for name in (*CATEGORIES, *RECURRENT, *CARELESS):
        operation = _overload(name)
        if operation is not None:
            made[name] = _kernel(name, operation, casts, is_float8)
    return made


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _kernel(name: str, operation: Any, casts: WeightCasts, is_float8: Callable[[], bool]) -> _Kernel:
    act = _action(name, operation, casts)
    is_product = name in RECURRENT or CATEGORIES.get(name) == "lower_precision"

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BELOW_AUTOCAST):
            half = torch.get_autocast_dtype("cpu")
            if half is torch.float32:
                return in_tensorfloat32(operation, args, kwargs) if is_product else operation(*args, **kwargs)
            if is_product and half is torch.bfloat16 and takes_float8(name, args) and is_float8():
                return in_float8(operation, args, kwargs)
            return act(args, kwargs)

    return run


def _action(name: str, operation: Any, casts: WeightCasts) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """What autocast in a half precision does with the operation's arguments."""
    if name in RECURRENT:  # cuDNN's kernel casts its weights anew
        return lambda args, kwargs: in_half(operation, args, kwargs, casts, keep=False)
    if name in CARELESS:
        return lambda args, kwargs: _with_care(operation, args, kwargs)
    match CATEGORIES[name]:
        case "lower_precision":
            return lambda args, kwargs: in_half(operation, args, kwargs, casts, keep=True)
        case "float32":
            return lambda args, kwargs: operation(*cast(args, torch.float32), **cast(kwargs, torch.float32))
        case "float32_set_opt_dtype":
            place = _place_of_dtype(operation)
            return lambda args, kwargs: _in_float32_or_as_asked(operation, args, kwargs, place)
        case "float32_append_dtype":
            return lambda args, kwargs: _append_dtype(name, operation, args, kwargs)
        case "widest":
            return lambda args, kwargs: _in_widest(operation, args, kwargs)
        case "refused":
            return _refuse


def _with_care(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In float32, the result rounded to its input's half precision, where one tensor alone is in half."""
    halves: list[torch.dtype] = []

    def raised(tensor: Tensor) -> Tensor:
        if tensor.dtype not in _HALF:
            return tensor
        halves.append(tensor.dtype)
        return tensor.float()

    raised_args = map_tensors(args, raised)
    if len(halves) != 1:  # several: running statistics, say, that are to be changed where they are
        return operation(*args, **kwargs)
    return operation(*raised_args, **kwargs).to(halves[0])


def _in_float32_or_as_asked(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> Any:
    """In float32 where no dtype is asked for. `cross_entropy` asks for its input's, half or not.

    CUDA's kernels then keep sums in float32 and round the result, from which the gradient is computed; the CPU's keep
    them in half: the logarithm of a probability near 1 would be 0.
    """
    if not eligible(args[0]):
        return operation(*args, **kwargs)
    asked = args[place] if len(args) > place else kwargs.get("dtype")
    in_full = torch.float32 if asked is None or asked in _HALF else asked
    if len(args) > place:
        args = (*args[:place], in_full, *args[place + 1 :])
    else:
        kwargs = {**kwargs, "dtype": in_full}
    full = operation(*args, **kwargs)
    if asked not in _HALF:
        return full
    result = full.to(asked)
    if full.requires_grad and torch._C._functorch.peek_interpreter_stack() is None:
        full.data.copy_(result.data)  # kept for the backward pass, which then reads it rounded, as on CUDA
    return result


def _place_of_dtype(operation: Any) -> int:
    """Where `dtype` stands among the positional arguments; beyond them where it is keyword-only."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dtype" and not argument.kwarg_only:
            return place
    return len(operation._schema.arguments)


def _append_dtype(name: str, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not eligible(args[0]):
        return operation(*args, **kwargs)
    defaults = [argument.default_value for argument in operation._schema.arguments]
    given = [*args, *defaults[len(args) :]]
    for place, argument in enumerate(operation._schema.arguments):
        given[place] = kwargs.get(argument.name, given[place])
    return getattr(torch.ops.aten.norm, _WITH_DTYPE[name])(*given, dtype=torch.float32)


def _in_widest(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    half = torch.get_autocast_dtype("cpu")
    widest = half

    def note(tensor: Tensor) -> Tensor:
        nonlocal widest
        if eligible(tensor) and widest is not torch.float32:
            if tensor.dtype not in (half, torch.float32):
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
            widest = tensor.dtype
        return tensor

    map_tensors((args, kwargs), note)
    return operation(*cast(args, widest), **cast(kwargs, widest))


def _refuse(*_: Any) -> Any:
    raise RuntimeError(_REFUSAL)
