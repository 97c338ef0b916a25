"""What a step changes besides weights, kept so that it can be put back: random-number generators, buffers, gradients.

Whether a buffer changed cannot be told from its `_version`: a batch norm in training writes its running statistics
without bumping it. So all buffers are copied, the non-persistent ones too, into memory that is allocated once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["BufferCopies", "RandomState", "devices_of", "gradients_set_aside", "rehearsal"]


class BufferCopies:
    """Copies of all buffers of `model`, refreshed by `save()` and put back by `restore()`.

    Buffers that were replaced by another tensor object in between are put back as objects, then as values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._slots: list[tuple[nn.Module, str]] | None = None
        self._originals: list[Tensor] = []
        self._copies: list[Tensor] = []

    def save(self) -> None:
        """Copies the present values."""
        if self._slots is None or any(
            module._buffers.get(name) is not buffer
            for (module, name), buffer in zip(self._slots, self._originals, strict=True)
        ):
            self._slots, self._originals = _buffers(self._model)
            self._copies = [torch.empty_like(buffer) for buffer in self._originals]
        if self._originals:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._originals)

    def restore(self) -> None:
        """Puts back the values of the last `save()`."""
        for (module, name), buffer in zip(self._slots or (), self._originals, strict=True):
            module._buffers[name] = buffer
        if self._originals:
            with torch.no_grad():
                torch._foreach_copy_(self._originals, self._copies)


def _buffers(model: nn.Module) -> tuple[list[tuple[nn.Module, str]], list[Tensor]]:
    slots: list[tuple[nn.Module, str]] = []
    buffers: list[Tensor] = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                slots.append((module, name))
                buffers.append(buffer)
    return slots, buffers


class RandomState:
    """The state of torch's generators: the CPU's, and those of the given CUDA devices."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = {str(d): torch.cuda.get_rng_state(d) for d in devices if d.type == "cuda"}

    def restore(self) -> None:
        """Rewinds the generators to where they were."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)

    def state_dict(self) -> dict[str, Tensor]:
        """The states by device, uint8 tensors on the CPU."""
        return {"cpu": self._cpu, **self._cuda}

    @classmethod
    def from_state_dict(cls, states: Mapping[str, Tensor]) -> RandomState:
        """The inverse of `state_dict`."""
        random_state = cls(())
        random_state._cpu = states["cpu"]
        random_state._cuda = {device: state for device, state in states.items() if device != "cpu"}
        return random_state


def devices_of(model: nn.Module) -> frozenset[torch.device]:
    """The devices that hold parameters or buffers of `model`."""
    return frozenset(t.device for t in [*model.parameters(), *model.buffers()])


@contextmanager
def gradients_set_aside(model: nn.Module) -> Iterator[None]:
    """Within the block all `.grad` are None; afterwards they are the tensors they were before."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def rehearsal(model: nn.Module) -> Iterator[None]:
    """A block that may run forward and backward of `model` and leaves no trace.

    Generators, buffers and gradients are put back.
    """
    random_state = RandomState(devices_of(model))
    buffers = BufferCopies(model)
    buffers.save()
    with gradients_set_aside(model):
        try:
            yield
        finally:
            buffers.restore()
            random_state.restore()
