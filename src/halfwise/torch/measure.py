"""How long each layer takes in each format on this device: forward and backward on the inputs that it really gets.

A layer is timed inside a forward pass that happens anyway, on detached copies of its inputs, so that nothing has to be
kept. Layers that are alike (the same class and settings, weights and inputs of the same shapes) are timed once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfwise.core.layer_timing import LayerTimes, time_formats
from halfwise.core.timing import TimingTable
from halfwise.torch.nested import floating_tensors, map_tensors
from halfwise.torch.profile import is_whole, profiled_layers
from halfwise.torch.region import COMPUTE_DTYPES, region
from halfwise.torch.snapshot import BufferCopies, RandomState, devices_of

__all__ = ["LayerTimer", "half_formats", "now", "timed_layers"]

_LOG = logging.getLogger("halfwise")

_CAST_ROUNDS = 3
_PART = 8
_HOPELESS = 8.0  # times the float32 time: other layers of the class will not be quicker than float32 either
_OVERRUN = 1.25  # how far the fewest measurements of each layer may go beyond the allowance before layers are left out


def half_formats(device_type: str) -> tuple[str, ...]:
    """The half-precision formats that `device_type` can run at all."""
    if device_type == "cuda" and not torch.cuda.is_bf16_supported():
        return ("float16",)
    return ("bfloat16", "float16")


class LayerTimer:
    """Times the layers of a model that have weights; see the text of this file.

    Args:
        model: the module.
        device_type: of the device that holds it.
        formats: besides float32.

    Attributes:
        spent: seconds that measuring took so far.
    """

    def __init__(self, model: nn.Module, device_type: str, formats: Sequence[str]) -> None:
        self.spent = 0.0
        self._device_type = device_type
        self._formats = tuple(formats)
        self._layers = timed_layers(model)
        self._allowed = float("inf")
        self._visited: set[str] = set()  # a layer that is called again, or calls itself, is timed once
        self._alike: dict[Any, tuple[LayerTimes, float]] = {}
        self._hopeless: set[tuple[type, str]] = set()
        self._times: dict[str, LayerTimes] = {}
        self._casts: dict[str, float] = {}
        self._saved: dict[str, int] = {}

    @property
    def table(self) -> TimingTable:
        """What was measured so far."""
        return TimingTable(
            {path: dict(found.seconds) for path, found in self._times.items()},
            frozenset((path, name) for path, found in self._times.items() for name in found.cut_short),
            casts=self._casts,
            spread={path: found.spread for path, found in self._times.items()},
            saved=self._saved,
        )

    @contextmanager
    def timing(self, allowed: float = float("inf")) -> Iterator[None]:
        """Within the block, each layer is timed when it is called for the first time.

        Args:
            allowed: seconds that it may take. When they are spent each layer is measured as few times as will do; a
                good deal later, layers unlike those before are left out.
        """
        self._allowed = allowed
        with ExitStack() as stack:
            for path, module in self._layers.items():
                handle = module.register_forward_pre_hook(partial(self._before_forward, path), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _before_forward(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path in self._visited or not torch.is_grad_enabled():
            return
        self._visited.add(path)
        start = now(self._device_type)
        try:
            kind = _kind(module, args, kwargs)
            if kind not in self._alike:
                if self.spent > _OVERRUN * self._allowed:
                    return
                self._alike[kind] = self._measured(path, module, args, kwargs)
            self._times[path], self._casts[path] = self._alike[kind]
            self._saved[path] = sum(t.numel() for t in (*floating_tensors(args), *floating_tensors(kwargs)))
        except Exception as error:  # a probe must never end a training
            _LOG.info("layer %r could not be timed and keeps float32: %s", path, error)
        finally:
            self.spent += now(self._device_type) - start

    def _measured(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[LayerTimes, float]:
        start, allowed = time.perf_counter(), self._allowed - self.spent
        random_state = RandomState(devices_of(module))
        buffers = BufferCopies(module)
        buffers.save()
        try:
            # what the probes save for backward is no affair of checkpointing or offloading around the real pass
            with torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
                probe = partial(_forward_and_backward, module, args, kwargs, self._device_type)
                formats = [name for name in self._formats if (type(module), name) not in self._hopeless]
                found = time_formats(path, formats, probe, go_on=lambda: time.perf_counter() - start < allowed)
                found = self._with_hopeless(found, type(module))
        finally:
            buffers.restore()
            random_state.restore()
        quick = [name for name in found.seconds if name != "float32" and name not in found.cut_short]
        cast = _cast_seconds((args, kwargs), quick[0], self._device_type) if quick else 0.0
        return found, min(cast, *(found.seconds[name] for name in quick)) if quick else 0.0

    def _with_hopeless(self, found: LayerTimes, kind: type) -> LayerTimes:
        """With the formats that were not tried, because they took so much longer in a layer of the same class."""
        full = found.seconds["float32"]
        self._hopeless |= {(kind, name) for name in found.cut_short if found.seconds[name] > _HOPELESS * full}
        untried = {name: _HOPELESS * full for k, name in self._hopeless if k is kind and name not in found.seconds}
        return replace(found, seconds=found.seconds | untried, cut_short=found.cut_short | untried.keys())


def timed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of `model` by path that have weights and contain no other such layer, so that none counts twice."""
    return {path: module for path, module in profiled_layers(model).items() if _is_timed(module)}


def _is_timed(module: nn.Module) -> bool:
    has_weights = next(module.parameters(), None) is not None
    return has_weights and (is_whole(module) or not any(True for _ in module.children()))


def _kind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Equal for layers that take the same time."""

    def described(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.requires_grad}"
        return repr(value)

    weights = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    leaves = [*map(described, args), *(f"{name}={described(value)}" for name, value in kwargs.items())]
    return type(module), repr(module), module.training, repr(weights), tuple(leaves)


def _forward_and_backward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str, name: str, limit: float
) -> float:
    """Seconds of one forward and backward; of the forward alone where that already exceeds `limit`.

    Where there is a limit a few rows go first, so that a format that is slow by far is found out at little cost.
    """
    if limit < float("inf") and (few := _few_rows_seconds(module, args, kwargs, device_type, name)) > limit:
        return few
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


def _few_rows_seconds(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str, name: str
) -> float:
    """Seconds of a forward pass of an eighth of the rows; 0 where the inputs cannot be cut."""
    inputs = list(floating_tensors((args, kwargs)))
    rows = min((tensor.shape[0] for tensor in inputs if tensor.dim() > 1), default=0)
    if rows < 2 * _PART or any(tensor.dim() < 2 or tensor.shape[0] != rows for tensor in inputs):
        return 0.0

    def cut(tensor: Tensor) -> Tensor:
        whole = tensor.dim() > 0 and tensor.shape[0] == rows
        return (tensor[: rows // _PART] if whole else tensor).detach().clone()

    args, kwargs = map_tensors(args, cut), map_tensors(kwargs, cut)
    start = now(device_type)
    try:
        with torch.no_grad(), region(device_type, name, cache=False):
            type(module).forward(module, *args, **kwargs)
    except Exception:  # the layer wants all rows; whether it can run at all is seen next
        return 0.0
    return now(device_type) - start


def _cast_seconds(inputs: Any, name: str, device_type: str) -> float:
    """Seconds of casting what a layer gets to the format, and the gradients with respect to it back."""
    dtype = COMPUTE_DTYPES[name]
    full = [tensor.detach() for tensor in floating_tensors(inputs) if tensor.dtype is torch.float32]
    half = [tensor.to(dtype) for tensor in full]

    def once() -> float:
        start = now(device_type)
        for tensor, cast in zip(full, half, strict=True):
            tensor.to(dtype)
            cast.float()
        return now(device_type) - start

    return min(once() for _ in range(_CAST_ROUNDS))


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
