"""Tensors inside what modules take and return: nested tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

__all__ = ["floating_tensors", "map_tensors"]


def floating_tensors(value: Any, *, _within: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """The floating-point tensors in `value` that hold anything."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
        return
    if isinstance(value, Mapping):
        items: Any = value.values()
    elif isinstance(value, list | tuple):
        items = value
    elif _is_instance_of_dataclass(value) and id(value) not in _within:  # a tree's node may know its parent
        items = _values(value).values()
        _within = (*_within, id(value))
    else:
        return
    for item in items:
        yield from floating_tensors(item, _within=_within)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor], *, _within: tuple[int, ...] = ()) -> Any:
    """`value` with `function` applied to its tensors; containers are new objects of the same type, all else is kept.

    A dataclass in which no tensor changes is kept too: a module may write what it did into the one that it was given.
    """
    if isinstance(value, Tensor):
        return function(value)

    def mapped(item: Any) -> Any:
        return map_tensors(item, function, _within=_within)

    if type(value) is dict:
        return {key: mapped(item) for key, item in value.items()}
    if isinstance(value, dict):
        changed = copy.copy(value)  # such as transformers' ModelOutput, whose attributes follow its items
        for key in list(changed):
            changed[key] = mapped(changed[key])
        return changed
    if isinstance(value, tuple):
        items = [mapped(item) for item in value]
        if type(value) is tuple:
            return tuple(items)
        return value._make(items) if hasattr(value, "_make") else type(value)(items)  # such as torch.return_types.topk
    if isinstance(value, list):
        return [mapped(item) for item in value]
    if _is_instance_of_dataclass(value) and id(value) not in _within:
        return _map_dataclass(value, function, (*_within, id(value)))
    return value


def _map_dataclass(value: Any, function: Callable[[Tensor], Tensor], within: tuple[int, ...]) -> Any:
    changes = False

    def noted(tensor: Tensor) -> Tensor:
        nonlocal changes
        result = function(tensor)
        changes = changes or result is not tensor
        return result

    items = {name: map_tensors(item, noted, _within=within) for name, item in _values(value).items()}
    if not changes:
        return value
    changed = copy.copy(value)
    for name, item in items.items():
        object.__setattr__(changed, name, item)  # also where it is frozen
    return changed


def _is_instance_of_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _values(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
