"""How sensitive each layer is to rounding, found while a closure runs forward and backward in float32.

When the gradient of a layer's output arrives, the layer is run again on the inputs that it had: as it is, and with its
inputs, weights and output rounded to each format. The change of the output times that gradient is the change of the
loss, to first order; running both backward by themselves gives the error of the weight gradients. What is measured is
in `halfwise.core.sensitivity`. Layers that are more than one product are also run as the format would compute inside
them (`inside.py`), and the larger change counts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from halfwise.core.sensitivity import Sensitivity, SensitivityRecord
from halfwise.torch.inside import Pass, has_an_inside, passes_inside
from halfwise.torch.measure import timed_layers
from halfwise.torch.nested import floating_tensors, map_tensors
from halfwise.torch.profile import is_whole
from halfwise.torch.region import region
from halfwise.torch.rounding import rounded
from halfwise.torch.snapshot import RandomState, devices_of

__all__ = ["SensitivityProbe"]

_LOG = logging.getLogger("halfwise")

_ORTHOGONAL = 1e-3  # relative: what sums up to this little is zero but for the rounding of float32
_SAMPLE = 65536  # values of a weight's gradient


@dataclass(frozen=True)
class _Rounding:
    """What computing in a format rounds: the format's name for inputs and weights, for outputs, and for gradients."""

    operands: str
    output: str
    gradient: str


_ROUNDINGS = {
    "bfloat16": _Rounding("bfloat16", "bfloat16", "bfloat16"),
    "float16": _Rounding("float16", "float16", "float16"),
    "tensorfloat32": _Rounding("tensorfloat32", "float32", "tensorfloat32"),
    "float8_e4m3fn": _Rounding("float8_e4m3fn", "bfloat16", "float8_e5m2"),
}


@dataclass(frozen=True)
class _Call:
    """A layer's inputs in one call, and what it draws from and writes to."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: tuple[int, ...]
    random_state: RandomState | None


class SensitivityProbe:
    """Gathers sensitivities of the layers that have weights.

    Args:
        model: the module; gradients are those of its own parameters.
        device_type: of the device that holds it.
        rules: the device type whose rules for mixed precision hold; None means `device_type`.

    Attributes:
        spent: seconds that looking took so far.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1))
        >>> probe = SensitivityProbe(model, "cpu")
        >>> with probe.watching(["bfloat16"]):
        ...     loss = model(torch.full((8, 4), 1.001)).square().mean()
        ...     loss.backward()
        >>> probe.record_gradients()
        >>> probe.keep(loss.item())
        >>> probe.sensitivity.get("0", "bfloat16").score > 0.0
        True
    """

    def __init__(self, model: nn.Module, device_type: str, *, rules: str | None = None) -> None:
        self.spent = 0.0
        self._rules = rules or device_type
        self._layers = timed_layers(model)
        self._device_type = device_type
        self._formats: tuple[str, ...] = ()
        self._record = SensitivityRecord()
        self._sums: dict[str, list[Tensor]] = {}
        self._pending: dict[str, list[Tensor]] = {}
        self._inside = False

    @property
    def batches(self) -> int:
        """How many batches were kept."""
        return self._record.batches

    @property
    def sensitivity(self) -> Sensitivity:
        """What was gathered and kept so far."""
        count = max(1, self._record.batches)
        means = {path: _norm(sums) / count for path, sums in self._sums.items()}
        return self._record.sensitivity(means)

    @contextmanager
    def watching(self, formats: Sequence[str]) -> Iterator[None]:
        """Around the forward and backward pass of one batch.

        Args:
            formats: bfloat16, float16, tensorfloat32, float8_e4m3fn, or some of them; none looks at nothing.
        """
        self._formats = tuple(name for name in formats if name in _ROUNDINGS)
        if not self._formats:
            yield
            return
        with ExitStack() as stack:
            for path, module in self._layers.items():
                calls: list[_Call] = []  # a stack: a layer may call itself
                before, after = partial(self._before_forward, calls), partial(self._after_forward, path, calls)
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after).remove)
            yield

    def record_gradients(self) -> None:
        """Takes the weight gradients as they are now into the batch: they show how much batches differ.

        Of a large gradient every so many values are taken, so that little has to be kept.
        """
        start = time.perf_counter()
        for path, module in self._layers.items():
            gradients = [_sample(p.grad) for p in module.parameters() if p.grad is not None and _is_dense(p.grad)]
            if gradients:
                self._record.add_gradient(path, norm=_norm(gradients))
                self._pending[path] = gradients
        self.spent += time.perf_counter() - start

    def keep(self, loss: float) -> None:
        """Ends a batch."""
        self._record.end_batch(loss)
        for path, gradients in self._pending.items():
            sums = self._sums.get(path)
            if sums is None:
                self._sums[path] = gradients
            elif [s.shape for s in sums] == [g.shape for g in gradients]:
                torch._foreach_add_(sums, gradients)
        self._pending = {}

    def drop(self) -> None:
        """Ends a batch that is no evidence."""
        self._record.drop_batch()
        self._pending = {}

    def _before_forward(self, calls: list[_Call], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._inside or not torch.is_grad_enabled():
            return
        inputs = (*floating_tensors(args), *floating_tensors(kwargs))
        may_draw = module.training and (is_whole(module) or has_an_inside(module))
        draws = RandomState(devices_of(module)) if may_draw else None
        calls.append(_Call(args, kwargs, tuple(tensor._version for tensor in inputs), draws))

    def _after_forward(self, path: str, calls: list[_Call], module: nn.Module, _args: Any, output: Any) -> None:
        if self._inside or not calls:
            return
        call = calls.pop()
        outputs = list(floating_tensors(output))
        places = [place for place, tensor in enumerate(outputs) if tensor.requires_grad]

        def on_gradients(found: Sequence[Tensor | None]) -> None:
            by_place = dict(zip(places, found, strict=True))
            self._on_gradients(path, module, call, [by_place.get(place) for place in range(len(outputs))])

        if places:
            register_multi_grad_hook([outputs[place] for place in places], on_gradients)

    def _on_gradients(self, path: str, module: nn.Module, call: _Call, gradients: Sequence[Tensor | None]) -> None:
        inputs = (*floating_tensors(call.args), *floating_tensors(call.kwargs))
        if tuple(tensor._version for tensor in inputs) != call.versions:
            return  # written over since: what the layer had is gone
        start, now = time.perf_counter(), RandomState(devices_of(module)) if call.random_state is not None else None
        self._inside = True
        try:
            # what is saved for backward here is no affair of checkpointing or offloading around the real pass
            with saved_tensors_hooks(_unchanged, _unchanged), torch.enable_grad(), region(self._device_type, "float32"):
                exact = self._run(module, call, gradients, None)
                for name in self._formats:
                    found = self._run(module, call, gradients, _ROUNDINGS[name])
                    score = _score(exact.outputs, found.outputs, gradients)
                    error = _relative_error(exact.weight_gradients, found.weight_gradients)
                    if has_an_inside(module):
                        inside = self._look_inside(module, call, name, gradients)
                        score, error = max(score, inside[0]), max(error, inside[1])
                    self._record.add_score(path, name, score)
                    if exact.weight_gradients:
                        self._record.add_gradient_error(path, name, error)
        except Exception as error:  # a measurement must never end a training
            _LOG.info("the sensitivity of layer %r is unknown: %s", path, error)
        finally:
            self._inside = False
            if now is not None:
                now.restore()
            self.spent += time.perf_counter() - start

    def _look_inside(
        self, module: nn.Module, call: _Call, name: str, gradients: Sequence[Tensor | None]
    ) -> tuple[float, float]:
        """Score and gradient error where the operations inside run in the format; 0 where they cannot be."""
        if call.random_state is not None:
            call.random_state.restore()
        try:
            found = passes_inside(module, call.args, call.kwargs, gradients, name, self._rules)
        except Exception as error:  # an operation that the format lacks: mixed precision runs it in float32
            _LOG.info("%r cannot run by itself in %s: %s", type(module).__name__, name, error)
            return 0.0, 0.0
        if found is None:
            return 0.0, 0.0
        exact, lowered = found
        score = _score(exact.outputs, lowered.outputs, gradients)
        return score, _relative_error(exact.weight_gradients, lowered.weight_gradients)

    def _run(
        self,
        module: nn.Module,
        call: _Call,
        gradients: Sequence[Tensor | None],
        rounding: _Rounding | None,
    ) -> Pass:
        """Forward and backward of the layer by itself: plainly, or as computing in a format would round it."""
        operands = "float32" if rounding is None else rounding.operands
        scaled = operands.startswith("float8")

        def given(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor.detach().clone() if rounding is None else rounded(tensor, operands, scaled=scaled)

        args, kwargs = map_tensors(call.args, given), map_tensors(call.kwargs, given)
        weights = {
            name: given(parameter).requires_grad_(parameter.requires_grad)
            for name, parameter in module.named_parameters()
            if parameter.is_floating_point()
        }
        if call.random_state is not None:
            call.random_state.restore()
        # the real pass holds on to the buffers (a batch norm's statistics), so that not even putting them back would do
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with torch.nn.utils.stateless._reparametrize_module(module, {**weights, **buffers}):
            output = type(module).forward(module, *args, **kwargs)
        outputs = list(floating_tensors(output))
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=False) if g is not None and o.requires_grad]
        trained = [weight for weight in weights.values() if weight.requires_grad]
        found: Sequence[Tensor | None] = ()
        if pairs and trained:
            incoming = [g if rounding is None else _rounded_gradient(g, rounding.gradient) for _, g in pairs]
            found = torch.autograd.grad([o for o, _ in pairs], trained, incoming, allow_unused=True)
        results = [tensor.detach() for tensor in outputs]
        if rounding is None:
            return Pass(results, [None if g is None else g.to_dense() for g in found])
        results = [rounded(tensor, rounding.output) for tensor in results]
        return Pass(results, [None if g is None else _rounded_gradient(g.to_dense(), rounding.output) for g in found])


def _rounded_gradient(gradient: Tensor, name: str) -> Tensor:
    """Scaled where the format needs it, as a loss scale does: how much underflows is judged by the range gate."""
    return rounded(gradient, name, scaled=name in ("float16", "float8_e5m2"))


def _score(exact: list[Tensor], found: list[Tensor], gradients: Sequence[Tensor | None]) -> float:
    """The sum over samples (the first axis) of the squared change of the loss."""
    changes: dict[int, Tensor] = {}
    for before, after, gradient in zip(exact, found, gradients, strict=False):
        if gradient is None:
            continue
        products = _seen_by_the_loss(after - before, before, gradient) * gradient
        per_sample = products.flatten(1).sum(1) if products.dim() > 1 else products.reshape(-1)
        known = changes.get(per_sample.numel())
        changes[per_sample.numel()] = per_sample if known is None else known + per_sample
    total = math.fsum(float(change.double().square().sum()) for change in changes.values())
    return total if math.isfinite(total) else math.inf


def _seen_by_the_loss(change: Tensor, output: Tensor, gradient: Tensor) -> Tensor:
    """`change` without what a batch norm behind the layer takes out: a shift, or a stretch, of a whole channel.

    Such a norm makes the loss's gradient orthogonal to both. The loss as a whole does not change with them then, but
    what single samples seem to add does.
    """
    if output.dim() < 2 or output.shape[0] < 2:
        return change
    dims = [0, *range(2, output.dim())]
    centred = output - output.mean(dims, keepdim=True)
    for direction in (torch.ones_like(output), centred):
        across = (gradient * direction).sum(dims, keepdim=True)
        size = (gradient * direction).abs().sum(dims, keepdim=True)
        along = (change * direction).sum(dims, keepdim=True) / direction.square().sum(dims, keepdim=True).clamp_min(
            1e-30
        )
        change = change - torch.where(across.abs() <= _ORTHOGONAL * size, along, 0.0) * direction
    return change


def _relative_error(exact: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float:
    """The 2-norm of the difference over that of the exact gradients."""
    pairs = [(a, b) for a, b in zip(exact, found, strict=True) if a is not None and b is not None]
    size = _norm([a for a, _ in pairs])
    error = _norm([b - a for a, b in pairs])
    if not math.isfinite(error) or not math.isfinite(size):
        return math.inf
    return error / size if size > 0.0 else 0.0


def _norm(tensors: Sequence[Tensor]) -> float:
    """The 2-norm over all of them."""
    if not tensors:
        return 0.0
    return math.sqrt(math.fsum(float(n) ** 2 for n in torch._foreach_norm([t.float() for t in tensors])))


def _sample(gradient: Tensor) -> Tensor:
    return gradient.detach().reshape(-1)[:: 1 + gradient.numel() // _SAMPLE].float().clone()


def _is_dense(gradient: Tensor) -> bool:
    return gradient.layout == torch.strided and gradient.is_floating_point()


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
