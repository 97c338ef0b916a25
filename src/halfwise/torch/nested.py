"""Tensors inside what modules take and return: nested tuples, lists and mappings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["floating_tensors", "map_tensors"]


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in `value` that hold anything."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from floating_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from floating_tensors(item)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` applied to its tensors; containers are new objects of the same type, all else is kept."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is dict:
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, dict):
        changed = copy.copy(value)  # such as transformers' ModelOutput, whose attributes follow its items
        for key in list(changed):
            changed[key] = map_tensors(changed[key], function)
        return changed
    if isinstance(value, tuple):
        items = [map_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_tensors(item, function) for item in value]
    return value
