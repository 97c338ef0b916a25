"""Runs a step's closures once more, traced or not, and leaves nothing behind."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfwise.core.guard import LARGEST_NORM
from halfwise.torch.closure import Closure, Region, split_loss
from halfwise.torch.gradients import Gradients
from halfwise.torch.names import unwrap
from halfwise.torch.region import device_type_of
from halfwise.torch.region import region as region_of
from halfwise.torch.snapshot import rehearsal
from halfwise.torch.tracing.records import Record
from halfwise.torch.tracing.trace import Trace

__all__ = ["Replay", "largest_gradients", "name_inputs", "nonfinite_gradients", "replay", "uncompiled"]


@dataclass(frozen=True)
class Replay:
    """What one more run of the step showed.

    Attributes:
        loss_finite: every closure's loss was finite.
        gradients_sound: the squared norm of the unscaled gradients is finite in float32; True where backward was not
            reached.
        trace: the record of operations, if it was traced.
        bad: in the trace, the records that end in the bad loss or gradients.
        seeds: in the trace, the records of the gradients that backward started from.
        limit: magnitudes above this count as bad: inf unless all gradients are finite and too large to square.
    """

    loss_finite: bool
    gradients_sound: bool
    trace: Trace | None
    bad: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    limit: float = math.inf

    @property
    def sound(self) -> bool:
        """The step would be applied."""
        return self.loss_finite and self.gradients_sound

    @property
    def what(self) -> str:
        """What is wrong, in words."""
        if not self.loss_finite:
            return "the loss is not finite"
        if self.limit < math.inf:
            return "the squared norm of the gradients is not finite in float32"
        return "gradients are not finite"


def replay(
    model: nn.Module,
    closures: Sequence[Closure],
    region: Region,
    scale: float,
    *,
    traced: bool,
    make_trace: Callable[[nn.Module], Trace] = Trace,
) -> Replay:
    """Runs forward and backward of `closures` in `region` at loss scale `scale`; stops where a loss is not finite.

    Gradients, buffers and random generators are put back afterwards.
    """
    trace = make_trace(model) if traced else None
    if traced:
        torch.clear_autocast_cache()  # a cast made before the trace would hide the weight that it was made from
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        stack.enter_context(rehearsal(model))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(region_of(device_type_of(model), "float32"))  # the caller may stand in a region of its own
        if trace is not None:
            stack.enter_context(_naming_inputs(model, trace))
        leaves: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        seeds: list[int] = []
        for closure in closures:
            with trace or nullcontext():
                with region():
                    loss, _ = split_loss(closure())
                if not math.isfinite(loss.detach()):
                    return Replay(False, True, trace, (trace.producer(loss),) if trace else ())
                leaves += stack.enter_context(_foreign_leaves(loss, leaves))
                seeds += _backward(loss, scale / len(closures), trace)
        sound = _sound(leaves, scale)
        bad, limit = nonfinite_gradients(trace, leaves) if trace and not sound else (), math.inf
        if trace and not sound and not bad:
            bad, limit = largest_gradients(trace, leaves)
        return Replay(True, sound, trace, bad, tuple(seeds), limit)


def _backward(loss: Tensor, factor: float, trace: Trace | None) -> list[int]:
    """Goes backward from `factor` times the loss; returns the records of the gradient that it starts from.

    The scaling is done as a loss scaler does it: in float32, also for a loss in half.
    """
    if trace is None:
        (loss.float() * factor).backward()
        return []
    index = trace.producer(loss)
    with trace.attributed_to(trace.records[index].place) if index >= 0 else nullcontext():
        scaled = loss.float() * factor
        seed = torch.ones_like(scaled)
    scaled.backward(seed)
    return [trace.producer(seed)]


def _sound(leaves: Sequence[Tensor], scale: float) -> bool:
    with torch.no_grad():
        gradients = Gradients(leaves)
        if scale != 1.0:
            for group in gradients.groups:
                torch._foreach_mul_(group, 1.0 / scale)
        return math.isfinite(float(gradients.norm().square()))


def nonfinite_gradients(trace: Trace, leaves: Sequence[Tensor]) -> tuple[int, ...]:
    """The records behind the gradients that hold NaN or inf."""
    return tuple(record.index for record in _behind_gradients(trace, leaves) if not record.finite)


def largest_gradients(trace: Trace, leaves: Sequence[Tensor]) -> tuple[tuple[int, ...], float]:
    """The records behind the largest gradients where all are finite, and the magnitude above which one counts as large.

    Half the largest, or half of what float32 can square if that is less: several gradients just below it overflow
        together.
    """
    made = _behind_gradients(trace, leaves)
    limit = min(LARGEST_NORM, max((record.largest for record in made), default=0.0)) / 2
    return tuple(record.index for record in made if record.largest > limit), limit


def _behind_gradients(trace: Trace, leaves: Sequence[Tensor]) -> list[Record]:
    records = trace.settle()
    indices = [trace.producer(leaf.grad) for leaf in leaves if leaf.grad is not None]
    return [records[index] for index in indices if index >= 0]


@contextmanager
def _foreign_leaves(loss: Tensor, known: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Leaves of the loss's graph that are not in `known`, such as a criterion's own parameters; their gradients are put
    back.
    """
    ids = {id(tensor) for tensor in known}
    leaves: list[Tensor] = []
    pending: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = node.next_functions
        if not following:  # AccumulateGrad, the only kind without any, holds the leaf
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor) and id(leaf) not in ids:
                ids.add(id(leaf))
                leaves.append(leaf)
        pending += [next_node for next_node, _ in following]
    kept = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield leaves
    finally:
        for leaf, gradient in zip(leaves, kept, strict=True):
            leaf.grad = gradient


def uncompiled() -> AbstractContextManager[object]:
    """A context in which compiled code runs eagerly, so that it can be traced."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def name_inputs(trace: Trace, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tells the trace the names of what `model` is about to be called with: those of its `forward`, else positions."""
    root = unwrap(model)
    try:
        given = inspect.signature(type(root).forward).bind(root, *args, **kwargs).arguments
    except (TypeError, ValueError):
        given = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    for name, value in given.items():
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                trace.declare_input(name, tensor)


@contextmanager
def _naming_inputs(model: nn.Module, trace: Trace) -> Iterator[None]:
    """Within the block the trace learns the names of what the model is called with."""
    handle = unwrap(model).register_forward_pre_hook(
        lambda _, args, kwargs: name_inputs(trace, model, args, kwargs), with_kwargs=True
    )
    try:
        yield
    finally:
        handle.remove()
