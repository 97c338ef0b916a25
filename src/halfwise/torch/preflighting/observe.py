"""One run of one closure, watched: its trace, its weight gradients, and what each layer read and wrote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import _disable_current_modes

from halfwise.errors import HalfwiseError
from halfwise.torch.closure import Closure, Region, split_loss
from halfwise.torch.nested import floating_tensors
from halfwise.torch.preflighting.randomness import SameRandomNumbers
from halfwise.torch.preflighting.samples import SampledTrace
from halfwise.torch.profile import is_whole
from halfwise.torch.tracing.replay import Replay, replay

__all__ = ["LayerWatch", "Run", "observe", "parameters_of"]


@dataclass(frozen=True)
class Run:
    """What one run of a closure showed.

    Attributes:
        loss: its loss; NaN where it was not reached.
        replay: what `replay` said; None where something raised.
        trace: the record of operations, where it was traced.
        error: what was raised.
        gradients: by id of the parameter, its gradient in float32, not scaled.
        layers: what the layers read and wrote.
        made: index of the record in the trace that made the loss; -1 where there is none.
    """

    loss: float
    replay: Replay | None
    trace: SampledTrace | None
    error: Exception | None
    gradients: Mapping[int, Tensor]
    layers: LayerWatch
    made: int = -1

    @property
    def sound(self) -> bool:
        """It ran to the end, and a training step would be applied."""
        return self.replay is not None and self.replay.sound


def observe(
    model: nn.Module,
    closure: Closure,
    region: Region,
    scale: float,
    layers: Mapping[str, nn.Module],
    *,
    traced: bool,
    around: AbstractContextManager[object] | None = None,
    emulated: bool = False,
) -> Run:
    """Runs forward and backward of `closure` in `region` at loss scale `scale`.

    What the run raises is caught, unless it says that halfwise is used wrongly.

    Args:
        model: what the closure runs; left as it was.
        closure: returns the loss.
        region: makes the precision that it runs in.
        scale: the loss scale.
        layers: those to watch, by path.
        traced: whether operations are recorded.
        around: a context for the whole run, backward included.
        emulated: whether `region` emulates another device.
    """
    watch, gradients = LayerWatch(layers), _GradientKeeper(model, scale)
    traces: list[SampledTrace] = []
    value, made = math.nan, -1

    def noted() -> Any:
        nonlocal value, made
        returned = closure()
        loss = split_loss(returned)[0]
        made = traces[0].producer(loss) if traces else -1
        value = float(loss.detach())
        return returned

    def make_trace(of: nn.Module) -> SampledTrace:
        traces.append(SampledTrace(of, emulated=emulated))
        return traces[0]

    found, error = None, None
    with ExitStack() as stack:
        if around is not None:
            stack.enter_context(around)
        stack.enter_context(SameRandomNumbers())  # type: ignore[no-untyped-call]
        stack.enter_context(watch.watching())
        stack.enter_context(gradients.keeping())
        try:
            found = replay(model, [noted], region, scale, traced=traced, make_trace=make_trace)
        except HalfwiseError:
            raise
        except Exception as raised:  # of any kind: what code does in half precision that it does not do in float32
            error = raised
    return Run(value, found, traces[0] if traces else None, error, gradients.found, watch, made)


@dataclass
class LayerWatch:
    """Hooks on layers.

    Attributes:
        dtypes: by path, how often its outputs had which dtype.
        inputs: by path, the sum of squares of what it read.
        gradients: by path, the sum of squares of its outputs' gradients, at the loss scale of the run.
        rows: by path, how many vectors of features those gradients are.
    """

    layers: Mapping[str, nn.Module]
    dtypes: dict[str, Counter[str]] = field(default_factory=dict)
    inputs: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    def noise(self, path: str) -> float:
        """Size (2-norm) that the layer's weight gradient would have if what it sums up had random signs.

        That is about how much it differs from one batch to another, and what the rounding of its summands is relative
        to. In a layer that multiplies, each summand is an input times a gradient; else (norms, embeddings) a gradient.
        """
        gradients, inputs = self.gradients.get(path, 0.0), self.inputs.get(path, 0.0)
        multiplies = any(p.dim() > 1 for p in parameters_of(self.layers[path])) and inputs > 0.0
        return math.sqrt(gradients * inputs / max(1, self.rows.get(path, 1)) if multiplies else gradients)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block the layers are watched."""
        with ExitStack() as stack:
            for path, module in self.layers.items():
                stack.callback(module.register_forward_hook(partial(self._after_forward, path)).remove)
            yield

    def _after_forward(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in floating_tensors(args):
            self.inputs[path] = self.inputs.get(path, 0.0) + _square(tensor)
        counted = self.dtypes.setdefault(path, Counter())
        features = 1 if isinstance(module, _ConvNd) else -1
        for tensor in floating_tensors(output):
            counted[str(tensor.dtype).removeprefix("torch.")] += 1
            if tensor.requires_grad:
                tensor.register_hook(partial(self._arrived, path, features))

    def _arrived(self, path: str, features: int, gradient: Tensor) -> None:
        self.gradients[path] = self.gradients.get(path, 0.0) + _square(gradient)
        width = gradient.shape[features] if gradient.dim() else 1
        self.rows[path] = self.rows.get(path, 0) + gradient.numel() // max(1, width)


class _GradientKeeper:
    """Copies of the parameters' gradients as backward leaves them, in float32 and without the loss scale."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._scale = scale
        self.found: dict[int, Tensor] = {}

    @contextmanager
    def keeping(self) -> Iterator[None]:
        with ExitStack() as stack:
            for parameter in self._parameters:
                stack.callback(parameter.register_post_accumulate_grad_hook(self._keep).remove)
            yield

    def _keep(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        with _disable_current_modes():
            dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
            self.found[id(parameter)] = dense.detach().to(torch.float32, copy=True) / self._scale


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """A layer's own trainable parameters: all of them where it uses its children's without calling them."""
    return [p for p in module.parameters(recurse=is_whole(module)) if p.requires_grad]


def _square(tensor: Tensor) -> float:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_complex():
        return 0.0
    with _disable_current_modes():  # this is no part of what is being traced
        return float(tensor.detach().double().square().sum())
