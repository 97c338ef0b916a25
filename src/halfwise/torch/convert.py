"""Tensors, modules and state dicts in another format, with an account of what that loses."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from halfwise.core.conversion import Loss
from halfwise.core.formats import get_format, round_to
from halfwise.errors import UsageError

__all__ = ["conversion_account", "to_precision"]

Convertible = TypeVar("Convertible", bound=Tensor | nn.Module | Mapping[str, Any])

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def to_precision(value: Convertible, format_name: str) -> Convertible:
    """A copy of a tensor, a module or a state dict with floating values rounded to `format_name`.

    Integers, booleans and complex numbers stay as they are; so does what is in the format already. Ties between tensors
    are kept. A value beyond the format becomes inf (NaN in `float8_e4m3fn`), never the largest finite number, and a
    warning names the tensors in which that happens; `conversion_account` gives the numbers. `tensorfloat32` has no
    dtype: values are rounded, the dtype is float32.

    Args:
        value: a tensor of any shape, a module (a deep copy comes back), or a mapping of names to anything.
        format_name: one of `halfwise.FORMATS`.

    Raises:
        PolicyError: the format is unknown. UsageError: `value` is nothing that can be converted.

    Example:
        >>> import torch, halfwise.torch as hw
        >>> hw.to_precision(torch.tensor([1.0, 3.14159]), "bfloat16")
        tensor([1.0000, 3.1406], dtype=torch.bfloat16)
    """
    get_format(format_name)
    overflowed: list[str] = []
    seen: dict[int, Tensor] = {}

    def convert(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"{name or 'the tensor'} has the layout {tensor.layout}; convert its dense form: .to_dense()"
            )
        if id(tensor) not in seen:
            seen[id(tensor)] = converted = _rounded(tensor, format_name)
            if bool((~torch.isfinite(converted.float()) & torch.isfinite(tensor.float())).any()):
                overflowed.append(name)
        return seen[id(tensor)]

    result = _map(value, convert)
    if overflowed:
        names = ", ".join(overflowed[:5]) + (f" and {len(overflowed) - 5} more" if len(overflowed) > 5 else "")
        largest = get_format(format_name).largest
        warnings.warn(
            f"values beyond {largest:.6g} do not fit {format_name} and became inf or NaN: {names}", stacklevel=2
        )
    return cast("Convertible", result)


def conversion_account(value: Tensor | nn.Module | Mapping[str, Any], format_name: str) -> dict[str, Loss]:
    """What each floating tensor would lose by `to_precision`, by name (`""` for a single tensor).

    Example:
        >>> import torch, halfwise.torch as hw
        >>> hw.conversion_account(torch.tensor([1e5, 1e-9, 1.0]), "float16")[""].overflowed
        1
    """
    get_format(format_name)
    account: dict[str, Loss] = {}

    def weigh(name: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.layout is torch.strided:
            account[name] = _loss(tensor.detach(), format_name)
        return tensor

    if isinstance(value, nn.Module):
        value = value.state_dict(keep_vars=True)
    _map(value, weigh)
    return account


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function("", value)
    if isinstance(value, nn.Module):
        module = copy.deepcopy(value)
        names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        return module._apply(lambda tensor: function(names.get(id(tensor), "?"), tensor))
    if isinstance(value, dict):
        return _map_dict(value, function, "")
    raise UsageError(f"cannot convert {type(value).__name__}; give a tensor, a torch.nn.Module or a state dict")


def _map_dict(value: dict[Any, Any], function: Any, prefix: str) -> dict[Any, Any]:
    changed = copy.copy(value)  # an OrderedDict with the `_metadata` that torch keeps on it, a defaultdict, ...
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Tensor):
            changed[key] = function(name, item)
        elif isinstance(item, dict):
            changed[key] = _map_dict(item, function, f"{name}.")
    return changed


def _rounded(tensor: Tensor, format_name: str) -> Tensor:
    if format_name == "tensorfloat32":
        values = tensor.detach().float().cpu()
        rounded = torch.from_numpy(round_to(values.numpy(), get_format(format_name))).reshape(values.shape)
        return rounded.to(tensor.device)
    dtype = _DTYPES[format_name]
    if tensor.dtype is dtype:
        return tensor.detach().clone()
    converted = tensor.detach().to(dtype)
    if format_name == "float8_e4m3fn":  # torch's cast saturates, and turns inf into 448
        beyond = ~(tensor.detach().float().abs() <= _LARGEST_THAT_ROUNDS_TO_448)
        converted = torch.where(beyond, torch.full((), float("nan"), device=tensor.device), converted.float()).to(dtype)
    return converted


_LARGEST_THAT_ROUNDS_TO_448 = 464.0  # half way to the next value that the format would have


def _loss(tensor: Tensor, format_name: str) -> Loss:
    values = tensor.double()
    rounded = _rounded(tensor, format_name).double()
    finite = torch.isfinite(values)
    kept = finite & torch.isfinite(rounded)
    norm = float(values[kept].norm())
    return Loss(
        elements=tensor.numel(),
        overflowed=int((finite & ~torch.isfinite(rounded)).sum()),
        underflowed=int(((values != 0) & finite & (rounded == 0)).sum()),
        relative_error=float((values[kept] - rounded[kept]).norm()) / norm if norm > 0.0 else 0.0,
    )
