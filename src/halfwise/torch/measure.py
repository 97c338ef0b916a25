"""How long each layer takes in each format on this device: forward and backward on the inputs that it really gets.

A layer is timed inside a forward pass that happens anyway, on detached copies of its inputs, so that nothing has to be
kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfwise.core.layer_timing import time_formats
from halfwise.core.timing import TimingTable
from halfwise.torch.nested import floating_tensors, map_tensors
from halfwise.torch.profile import is_whole, profiled_layers
from halfwise.torch.region import region
from halfwise.torch.snapshot import BufferCopies, RandomState, devices_of

__all__ = ["LayerTimer", "half_formats", "now"]

_LOG = logging.getLogger("halfwise")


def half_formats(device_type: str) -> tuple[str, ...]:
    """The half-precision formats that `device_type` can run at all."""
    if device_type == "cuda" and not torch.cuda.is_bf16_supported():
        return ("float16",)
    return ("bfloat16", "float16")


class LayerTimer:
    """Times the layers of a model that have weights; see the text of this file."""

    def __init__(self, model: nn.Module, device_type: str, formats: Sequence[str]) -> None:
        self._device_type = device_type
        self._formats = tuple(formats)
        self._layers = {path: module for path, module in profiled_layers(model).items() if _is_timed(module)}
        self._visited: set[str] = set()  # a layer that is called again, or calls itself, is timed once
        self._seconds: dict[str, dict[str, float]] = {}
        self._cut_short: set[tuple[str, str]] = set()

    @property
    def table(self) -> TimingTable:
        """What was measured so far."""
        return TimingTable({p: dict(t) for p, t in self._seconds.items()}, frozenset(self._cut_short))

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Within the block, each layer is timed when it is called for the first time."""
        with ExitStack() as stack:
            for path, module in self._layers.items():
                handle = module.register_forward_pre_hook(partial(self._before_forward, path), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _before_forward(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path in self._visited or not torch.is_grad_enabled():
            return
        self._visited.add(path)
        random_state = RandomState(devices_of(module))
        buffers = BufferCopies(module)
        buffers.save()
        try:
            # what the probes save for backward is no affair of checkpointing or offloading around the real pass
            with torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
                probe = partial(_forward_and_backward, module, args, kwargs, self._device_type)
                self._seconds[path], bounds = time_formats(path, self._formats, probe)
                self._cut_short |= {(path, name) for name in bounds}
        except Exception as error:  # a probe must never end a training
            _LOG.info("layer %r could not be timed and keeps float32: %s", path, error)
        finally:
            buffers.restore()
            random_state.restore()


def _is_timed(module: nn.Module) -> bool:
    """Modules with weights that contain no other timed module, so that no time is counted twice."""
    has_weights = next(module.parameters(), None) is not None
    return has_weights and (is_whole(module) or not any(True for _ in module.children()))


def _forward_and_backward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str, name: str, limit: float
) -> float:
    """Seconds of one forward and backward; of the forward alone where that already exceeds `limit`."""
    args, kwargs = map_tensors(args, _own_copy), map_tensors(kwargs, _own_copy)
    parameters = [p for p in module.parameters() if p.requires_grad]
    inputs = [t for t in (*floating_tensors(args), *floating_tensors(kwargs)) if t.requires_grad]
    start = now(device_type)
    with region(device_type, name, cache=False):
        output = type(module).forward(module, *args, **kwargs)
    outputs = [t for t in floating_tensors(output) if t.requires_grad]
    if not outputs or not (parameters or inputs):
        return now(device_type) - start
    if limit != float("inf") and (forward := now(device_type) - start) > limit:
        return forward
    ones = [torch.ones_like(t) for t in outputs]
    # the graph is kept because a part of it may be the real pass's: weights that a parametrization computed before
    torch.autograd.grad(outputs, [*inputs, *parameters], ones, allow_unused=True, retain_graph=True)
    return now(device_type) - start


def _own_copy(tensor: Tensor) -> Tensor:
    """A copy that the layer may write into; one with a gradient is no leaf, so that in-place operations are allowed."""
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    if not tensor.requires_grad:
        return tensor.detach().clone()
    return tensor.detach().requires_grad_().clone()


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def now(device_type: str) -> float:
    """Seconds on a steady clock, once the device has done all that it was given."""
    if device_type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
