"""What a layer gives when the operations inside it run in a format, rather than on rounded operands in float32.

A layer that is one product sums up in float32 whatever the format, so that rounding what goes in and comes out tells
all. Attention is several operations, and what users write themselves may be any: a norm by hand overflows between an
input and an output that both fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfwise.torch.emulation import emulated_region
from halfwise.torch.nested import floating_tensors, map_tensors
from halfwise.torch.region import COMPUTE_DTYPES, device_type_of, region
from halfwise.torch.snapshot import RandomState, devices_of

__all__ = ["Pass", "has_an_inside", "passes_inside"]

_PEAKS = (2.0**10, 2.0**4, 2.0**-2)
"""What the largest gradient is scaled to in float16; where that overflows inside, the next: a loss scale backs off."""

_UNSCALED = (1.0,)


@dataclass(frozen=True)
class Pass:
    """A layer's floating outputs, and the gradients of its trained weights; all in float32."""

    outputs: list[Tensor]
    weight_gradients: list[Tensor | None]


def has_an_inside(module: nn.Module) -> bool:
    """True for attention, and for layers whose code is not PyTorch's.

    >>> has_an_inside(nn.Linear(2, 2)), has_an_inside(nn.MultiheadAttention(2, 1))
    (False, True)
    """
    return isinstance(module, nn.MultiheadAttention) or type(module).forward.__module__.partition(".")[0] != "torch"


def passes_inside(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gradients: Sequence[Tensor | None],
    format_name: str,
    rules: str,
) -> tuple[Pass, Pass] | None:
    """Forward and backward of the layer by itself, in float32 and with its operations in the format.

    Attention is compared without its dropout, for masks may differ between formats. None where another layer draws
    random numbers, or where the format cannot be tried here.

    Args:
        module: a layer with `has_an_inside`, on any device. Its buffers, weights, gradients and settings stay as they
            are; what it draws random numbers from does not.
        args, kwargs: what it gets. In the format, so do the floating tensors: as from a layer before it that computes
            in it.
        gradients: the loss's, with respect to each floating output; None where there is none.
        format_name: a name in `halfwise.FORMATS`.
        rules: the device type whose rules for mixed precision hold, `"cpu"`, `"cuda"` or `"tpu"`.
    """
    device_type = device_type_of(module)
    within = _region(device_type, rules, format_name)
    if within is None:
        return None
    dtype = COMPUTE_DTYPES.get(format_name, torch.float32)
    lowered = map_tensors((args, kwargs), lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    with _without_dropout(module):
        before = _generators(module)
        exact = _pass(module, (args, kwargs), gradients, region(device_type, "float32"), _UNSCALED)
        if not all(map(torch.equal, before, _generators(module))):
            return None
        largest = _largest([*gradients, *exact.weight_gradients])
        scales = [peak / largest for peak in _PEAKS] if dtype is torch.float16 and largest else _UNSCALED
        return exact, _pass(module, lowered, gradients, within, scales)


def _pass(
    module: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    gradients: Sequence[Tensor | None],
    within: AbstractContextManager[object],
    scales: Sequence[float],
) -> Pass:
    """On copies of the weights and buffers; with the gradients of the first of the scales at which none overflows."""
    args, kwargs = map_tensors(inputs, torch.Tensor.detach)
    weights = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.nn.utils.stateless._reparametrize_module(module, {**weights, **buffers}), within:
        outputs = list(floating_tensors(type(module).forward(module, *args, **kwargs)))
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=False) if g is not None and o.requires_grad]
    trained = [weight for weight in weights.values() if weight.requires_grad]
    found: list[Tensor | None] = []
    for scale in scales if pairs and trained else ():
        incoming = [(g * scale).to(o.dtype) for o, g in pairs]
        scaled = torch.autograd.grad([o for o, _ in pairs], trained, incoming, allow_unused=True, retain_graph=True)
        found = [None if g is None else g.to_dense().float() / scale for g in scaled]
        if math.isfinite(_largest(found)):
            break
    return Pass([tensor.detach().float() for tensor in outputs], found)


def _largest(tensors: Sequence[Tensor | None]) -> float:
    """The largest magnitude; NaN counts as infinite."""
    found = [float(tensor.abs().max()) for tensor in tensors if tensor is not None and tensor.numel()]
    return max((size if math.isfinite(size) else math.inf for size in found), default=0.0)


def _region(device_type: str, rules: str, format_name: str) -> AbstractContextManager[object] | None:
    """Where operations run in the format: by this device's own rules, or on a CPU by another's."""
    if device_type == "cpu" and (rules != "cpu" or format_name not in COMPUTE_DTYPES):
        return emulated_region(rules, "float8" if format_name.startswith("float8") else format_name)
    return region(device_type, format_name, cache=False) if format_name in COMPUTE_DTYPES else None


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    if not isinstance(module, nn.MultiheadAttention):
        yield
        return
    before, module.dropout = module.dropout, 0.0
    try:
        yield
    finally:
        module.dropout = before


def _generators(module: nn.Module) -> list[Tensor]:
    return list(RandomState(devices_of(module), hosts=()).state_dict().values())
