"""Nested states as a JSON tree plus named tensors: the types that state dicts are made of, kept exactly.

A tensor becomes `{"$tensor": name}` and goes into a separate mapping, ready for safetensors. Dicts with other keys than
strings, tuples, and floats that JSON does not have get tags of their own: int keys stay ints, and tuples tuples.
Nothing is pickled: a state can hold no code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfwise.errors import DataError, UsageError

__all__ = ["SAFETENSORS_DTYPES", "decode", "encode", "stored"]

SAFETENSORS_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.bool, torch.complex64),
    }
)
"""The dtypes that safetensors stores as they are. Others are stored as their bytes."""

_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """`value` as a JSON tree. Its tensors are added to `tensors` under names that begin with `path`.

    Raises:
        UsageError: something in it is neither a tensor, number, string, bool, None, list, tuple nor mapping.
    """
    if isinstance(value, Tensor):
        return _encode_tensor(value, tensors, path)
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return {"$float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if isinstance(value, list):
        return [encode(item, tensors, f"{path}/{index}") for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(item, tensors, f"{path}/{index}") for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, tensors, f"{path}/{key}") for key, item in value.items()}
        return {"$dict": [[encode(k, tensors, path), encode(v, tensors, f"{path}/{k}")] for k, v in value.items()]}
    raise UsageError(
        f"cannot save {path}: a {type(value).__module__}.{type(value).__qualname__}; a state may hold tensors, "
        "numbers, strings, bools, None, lists, tuples and dicts. Convert it first, say with .item() or .tolist()."
    )


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode`. Mappings come back as dicts.

    Raises:
        DataError: the tree names a tensor that is missing, or has a tag that this version does not know.
    """
    if isinstance(tree, list):
        return [decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next((key for key in tree if key.startswith("$")), None)
    try:
        match tag:
            case None:
                return {key: decode(item, tensors) for key, item in tree.items()}
            case "$tensor":
                return _decode_tensor(tree, tensors)
            case "$tuple":
                return tuple(decode(item, tensors) for item in tree["$tuple"])
            case "$dict":
                return {decode(key, tensors): decode(item, tensors) for key, item in tree["$dict"]}
            case "$float":
                return _NONFINITE[tree["$float"]]
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise DataError(
            f"the saved state is damaged at {str(tree)[:80]!r} ({error!r}); use another checkpoint."
        ) from error
    raise DataError(
        f"the saved state has the tag {tag!r}, which this version of halfwise does not know; use a newer one."
    )


def stored(tensor: Tensor) -> Tensor:
    """A copy of `tensor` on the CPU that shares no memory with any other: what safetensors takes.

    Raises:
        UsageError: the tensor is sparse or quantised.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UsageError(f"cannot save a {kind} tensor; convert it first, say with .to_dense() or .dequantize().")
    return tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)


def _encode_tensor(tensor: Tensor, tensors: dict[str, Tensor], path: str) -> dict[str, Any]:
    name = path
    while name in tensors:  # {1: ..., "1": ...}
        name += "'"
    copy = stored(tensor)
    if copy.dtype in SAFETENSORS_DTYPES:
        tensors[name] = copy
        return {"$tensor": name}
    tensors[name] = copy.reshape(-1).view(torch.uint8)
    return {"$tensor": name, "dtype": str(copy.dtype).removeprefix("torch."), "shape": list(copy.shape)}


def _decode_tensor(tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[tree["$tensor"]]
    if "dtype" not in tree:
        return tensor
    dtype = getattr(torch, tree["dtype"])
    return tensor.view(dtype).reshape(tree["shape"])
