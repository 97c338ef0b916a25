"""Profiles: exponent histograms of what each layer reads and writes, forward and backward.

A layer is a module that has parameters of its own or no children; a module that uses its children's weights without
calling them (`MultiheadAttention`) is one layer as a whole. Under `activation` stand the floating tensors that the
layer gets as positional arguments and those that it returns, for both must fit the format that it computes in. Masks,
which legitimately hold -inf, usually come as keyword arguments and are left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfwise.core.profile import Profile, Role
from halfwise.core.step_histograms import StepHistograms
from halfwise.torch.closure import Closure, as_closures, split_loss
from halfwise.torch.histogram import exponent_histogram
from halfwise.torch.names import named_layers
from halfwise.torch.nested import floating_tensors
from halfwise.torch.snapshot import rehearsal
from halfwise.torch.validate import check_module

__all__ = ["Recorder", "eager", "is_whole", "profile", "profile_parameters", "profiled_layers"]


def profile(model: nn.Module, closure: Closure | Sequence[Closure]) -> Profile:
    """Exponent histograms of one forward and backward of each closure, per layer and role.

    Weights, gradients, buffers and random-number generators are as before afterwards.

    Args:
        model: the module whose layers are profiled.
        closure: returns the loss, or a tuple that begins with it; runs in whatever precision it asks for itself.
            Several are added up.

    Raises:
        UsageError: the closure does not return a loss that depends on a parameter.

    Example:
        >>> import torch, halfwise.torch as hw
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> found = hw.profile(model, lambda: model(torch.ones(8, 4)).square().mean())
        >>> found.get("0", "activation").total
        48
    """
    check_module(model)
    recorder = Recorder(model)
    for one in as_closures(closure):
        with rehearsal(model):
            with recorder.recording(), eager():
                loss, _ = split_loss(one())
                loss.backward()
            recorder.record_parameters()
        recorder.keep()
    return recorder.profile


def profile_parameters(model: nn.Module) -> Profile:
    """Exponent histograms of the weights and of their gradients as they are now."""
    recorder = Recorder(model)
    recorder.record_parameters()
    recorder.keep()
    return recorder.profile


@contextmanager
def eager() -> Iterator[None]:
    """Compiled code inside the block runs uncompiled, so that hooks see every module."""
    if not torch.compiler.is_compiling() and "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def profiled_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of `model` by path."""
    layers: dict[str, nn.Module] = {}
    inside_whole: set[int] = set()
    for path, module in named_layers(model):
        if id(module) in inside_whole or isinstance(module, torch.jit.ScriptModule):  # the latter takes no hooks
            continue
        if is_whole(module):
            inside_whole.update(id(child) for child in module.modules())
        own = next(module.parameters(recurse=False), None) is not None
        if own or not any(True for _ in module.children()) or is_whole(module):
            layers[path] = module
    return layers


def is_whole(module: nn.Module) -> bool:
    """True where the module uses its children's weights without calling them, so that it is one layer."""
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase)


class Recorder(StepHistograms):
    """Gathers histograms while its hooks are attached.

    Attributes:
        spent: seconds that counting took so far.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.spent = 0.0
        self._layers = profiled_layers(model)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block, what the layers read and write is recorded, and the gradients with respect to it."""
        with ExitStack() as stack:
            for path, module in self._layers.items():
                handle = module.register_forward_hook(partial(self._after_forward, path))
                stack.callback(handle.remove)
            yield

    def record_parameters(self) -> None:
        """Records the layers' weights and the weights' gradients as they are now."""
        for path, module in self._layers.items():
            for parameter in module.parameters(recurse=is_whole(module)):
                self._add(path, "weight", parameter)
                if parameter.grad is not None:
                    self._add(path, "weight_gradient", parameter.grad)

    def _after_forward(self, path: str, _module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in (*floating_tensors(args), *floating_tensors(output)):
            self._add(path, "activation", tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._add, path, "activation_gradient"))

    def _add(self, path: str, role: Role, tensor: Tensor) -> None:
        start = time.perf_counter()
        if _is_readable(tensor):
            self.add(path, role, exponent_histogram(tensor))
        self.spent += time.perf_counter() - start


def _is_readable(tensor: Tensor) -> bool:
    """False for what has no floating values of its own to count: quantised weights, meta and functorch tensors, ..."""
    return (
        (tensor.is_floating_point() or tensor.is_complex())
        and tensor.device.type != "meta"
        and not nn.parameter.is_lazy(tensor)
        and not tensor.is_nested
        and tensor.layout in (torch.strided, torch.sparse_coo)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
