"""Operands in half precision: which tensors autocast casts, and the casts of weights that it keeps."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from halfwise.torch.nested import map_tensors

__all__ = ["WeightCasts", "cast", "eligible"]

_FLOATING = (torch.float32, torch.float16, torch.bfloat16)


class WeightCasts:
    """Weights cast to half once for all their uses in a region, so that their gradients add up in half.

    As in autocast's own cache a weight is found by its identity alone, apart for code that records no gradient: a
    weight that was changed since is used as it was, and one that was cast to another format is a mistake that shows.
    """

    def __init__(self) -> None:
        self._casts: dict[tuple[int, bool], tuple[weakref.ref[Tensor], Tensor]] = {}

    def in_half(self, tensor: Tensor, half: torch.dtype, *, keep: bool = True) -> Tensor:
        """`tensor` rounded to `half`, in float32; weights from the cache.

        Args:
            tensor: of any dtype; what autocast does not cast is returned as it is.
            half: `torch.float16` or `torch.bfloat16`.
            keep: False leaves the cache alone.

        Raises:
            RuntimeError: the cache has the weight in the other format.
        """
        if not eligible(tensor):
            return tensor
        if keep and _is_weight(tensor) and torch.is_autocast_cache_enabled():
            return self._get(tensor, half).float()
        return tensor.to(half).float()

    def clear(self) -> None:
        """Forgets all."""
        self._casts.clear()

    def _get(self, weight: Tensor, half: torch.dtype) -> Tensor:
        key = (id(weight), torch.is_grad_enabled())
        found = self._casts.get(key)
        if found is None or found[0]() is not weight:
            found = (weakref.ref(weight), weight.to(half))
            self._casts[key] = found
        if found[1].dtype is not half:
            raise RuntimeError(
                f"expected operands in one dtype: a weight was cast to {found[1].dtype} before, and autocast's cache "
                f"gives that to a region in {half}; enter one of the regions with cache_enabled=False"
            )
        return found[1]


def eligible(tensor: Tensor) -> bool:
    """Whether autocast casts it."""
    return tensor.dtype in _FLOATING and tensor.device.type == "cpu"


def cast(values: Any, dtype: torch.dtype) -> Any:
    """`values`, a nested structure, with its tensors cast that autocast casts."""
    return map_tensors(values, lambda tensor: tensor.to(dtype) if eligible(tensor) else tensor)


def _is_weight(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
