"""What a step changes besides weights, kept so that it can be put back: random-number generators, buffers, gradients.

Whether a buffer changed cannot be told from its `_version`: a batch norm in training writes its running statistics
without bumping it. So all buffers are copied, the non-persistent ones too, into memory that is allocated once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from halfwise.torch.generators import RandomState
from halfwise.torch.names import is_compiled

__all__ = ["BufferCopies", "RandomState", "devices_of", "gradients_set_aside", "modes_kept", "rehearsal"]

_LARGE = 1024  # elements from which on a copy costs more than finding out that none is needed


class BufferCopies:
    """Copies of all buffers of `model`, refreshed by `save()` and put back by `restore()`.

    Buffers that were replaced by another tensor object in between are put back as objects, then as values; those that
    were None become None again, and those that are new go. A buffer that cannot be written in place (an inference
    tensor, a sparse one, a tensor subclass) is replaced by its copy.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._slots: list[tuple[nn.Module, str, Tensor | None]] | None = None
        self._modules: list[nn.Module] = []
        self._tables: list[MutableMapping[str, Any]] = []
        self._size = 0
        self._lazy: list[tuple[nn.Module, Tensor]] = []
        self._originals: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._masks: list[_Mask] = []
        self._apart: list[tuple[nn.Module, str, Tensor]] = []
        self._replacements: list[Tensor] = []

    def save(self) -> None:
        """Copies the present values."""
        if self._slots is None or not self._as_before(self._slots):
            self._take_stock()
        with torch.no_grad():
            if self._originals:
                torch._foreach_copy_(self._copies, self._originals)
            for mask in self._masks:
                mask.save()
            self._replacements = [buffer.detach().clone() for _, _, buffer in self._apart]

    def restore(self) -> None:
        """Puts back the values of the last `save()`."""
        if self._slots is None:
            return
        if not self._as_before(self._slots):
            self._restore_objects(self._slots)
        with torch.no_grad():
            if self._originals:
                torch._foreach_copy_(self._originals, self._copies)
            for mask in self._masks:
                mask.restore()
            for (module, name, _), copy in zip(self._apart, self._replacements, strict=True):
                module._buffers[name] = copy

    def _as_before(self, slots: list[tuple[nn.Module, str, Tensor | None]]) -> bool:
        """True where each slot holds the very tensor that it held, and no buffer or submodule was added."""
        try:
            return (
                sum(map(len, self._tables)) == self._size
                and all(module._buffers[name] is buffer for module, name, buffer in slots)
                and all(is_lazy(buffer) for _, buffer in self._lazy)
            )
        except KeyError:
            return False

    def _take_stock(self) -> None:
        self._modules = list(self._model.modules())
        self._tables = [table for module in self._modules for table in (module._buffers, module._modules)]
        self._size = sum(map(len, self._tables))
        self._slots = [(module, name, buffer) for module in self._modules for name, buffer in module._buffers.items()]
        self._lazy, self._originals, self._masks, self._apart = [], [], [], []
        with torch.no_grad():
            for module, name, buffer in self._slots:
                if buffer is None:
                    continue
                if is_lazy(buffer):
                    self._lazy.append((module, buffer))
                elif not _can_be_written(buffer):
                    self._apart.append((module, name, buffer))
                elif not (buffer.is_floating_point() or buffer.is_complex()) and buffer.numel() > _LARGE:
                    self._masks.append(_Mask(_distinct(buffer)))
                else:
                    self._originals.append(_distinct(buffer))
            self._copies = [torch.empty_like(buffer) for buffer in self._originals]

    def _restore_objects(self, slots: list[tuple[nn.Module, str, Tensor | None]]) -> None:
        known = {(module, name) for module, name, _ in slots}
        for module in self._modules:
            for name in [name for name, _ in module._buffers.items() if (module, name) not in known]:
                del module._buffers[name]
                module._non_persistent_buffers_set.discard(name)
        for module, name, buffer in slots:
            module._buffers[name] = buffer
        for module, buffer in self._lazy:
            if not is_lazy(buffer) and isinstance(module, _NormBase):
                module.reset_running_stats()  # as its first forward found them


class _Mask:
    """A copy of a large buffer of integers or bools: an attention mask, a table of positions.

    Those are written by operations that bump `_version`, so they are copied only when it moved. (Writes through `.data`
    or numpy are not seen.)
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.copy = torch.empty_like(buffer)
        self.version = -1

    def save(self) -> None:
        if self.buffer._version != self.version:
            self.copy.copy_(self.buffer)
            self.version = self.buffer._version

    def restore(self) -> None:
        if self.buffer._version != self.version:
            self.buffer.copy_(self.copy)
            self.version = self.buffer._version


def _can_be_written(buffer: Tensor) -> bool:
    plain = type(buffer) in (Tensor, nn.Parameter) and buffer.layout == torch.strided
    return plain and not (buffer.is_nested or buffer.is_quantized or buffer.is_inference())


def _distinct(buffer: Tensor) -> Tensor:
    """`buffer`, or where it was expanded, a view of one copy of its elements: torch writes into no others in place."""
    repeated = [stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)]
    return buffer[tuple(slice(0, 1) if r else slice(None) for r in repeated)] if any(repeated) else buffer


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
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Puts every module back into training or evaluation mode, should the closure change it."""
    kept = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in kept:
            module.training = training


@contextmanager
def rehearsal(model: nn.Module) -> Iterator[None]:
    """A block that may run forward and backward of `model` and leaves no trace.

    Generators, buffers and gradients are put back; buffers and gradients also of other modules that are called in the
    block, such as a criterion with parameters or the other half of a GAN. (Those are not looked for where `model` is
    compiled: it would be compiled once with the hook that finds them, and once more without.)
    """
    with ExitStack() as stack:
        stack.callback(RandomState(devices_of(model)).restore)
        known: set[int] = set()

        def keep(module: nn.Module) -> None:
            known.update(id(part) for part in module.modules())
            buffers = BufferCopies(module)
            buffers.save()
            stack.callback(buffers.restore)
            stack.enter_context(gradients_set_aside(module))

        def before_forward(module: nn.Module, _args: object) -> None:
            if not torch.compiler.is_compiling() and id(module) not in known:
                with _disable_current_modes():  # these copies are no part of what is being traced
                    keep(module)

        keep(model)
        with nullcontext() if is_compiled(model) else _before_each_forward(before_forward):
            yield


@contextmanager
def _before_each_forward(hook: Callable[[nn.Module, object], None]) -> Iterator[None]:
    """Within the block `hook` is called before the forward of each module that there is."""
    with warnings.catch_warnings():
        # A compiled module warns that such hooks see it twice; this one does not mind.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        handle = register_module_forward_pre_hook(hook)
        try:
            yield
        finally:
            handle.remove()
