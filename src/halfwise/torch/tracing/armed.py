"""A trace that is switched on in the middle of someone else's loop and off again, and what its records mean.

No replay: the loop's own next step is recorded, from the model's forward pass to the optimizer's step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from halfwise.core.diagnosis import Diagnosis
from halfwise.core.guard import LARGEST_NORM
from halfwise.torch.localise import precision_verdict, range_of
from halfwise.torch.nested import floating_tensors
from halfwise.torch.tracing import fixes
from halfwise.torch.tracing.operations import CONTRACTIONS
from halfwise.torch.tracing.outside import from_outside
from halfwise.torch.tracing.records import Record
from halfwise.torch.tracing.replay import largest_gradients, name_inputs, nonfinite_gradients, uncompiled
from halfwise.torch.tracing.slicing import Origins, origins, suspects
from halfwise.torch.tracing.trace import Trace

__all__ = ["ArmedTrace"]

_HALF = ("float16", "bfloat16")
_MOST_RECORDS = 100_000  # far more than one step; about 100 MB


class ArmedTrace:
    """Records from construction to `finish` or `abandon`, or until it is dropped.

    Args:
        model: names modules, parameters and inputs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.trace = Trace(model, most_records=_MOST_RECORDS)
        self.trace.declare_gradients(model.parameters())
        self._results: list[int] = []
        self._stack = ExitStack()
        self._stack.enter_context(uncompiled())
        self._stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        self._stack.enter_context(self.trace)

    @staticmethod
    def possible() -> bool:
        """False inside another dispatch mode: whoever entered it before us would leave ours in its place."""
        return not torch._C._len_torch_dispatch_stack()

    def entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes what the model is called with."""
        name_inputs(self.trace, self._model, args, kwargs)

    def saw(self, result: Any) -> None:
        """Notes a model's output or a loss, so that the walk can start there if it is bad."""
        self._results += [self.trace.producer(tensor) for tensor in floating_tensors(result)]

    def abandon(self) -> None:
        """Stops recording. Doing so twice is harmless."""
        self._stack.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.abandon()

    def finish(self, parameters: Sequence[Tensor], *, loss_scale: float, device: str) -> Diagnosis | None:
        """Stops recording and says what was wrong with the step; None if nothing was, or if the
        recording got too long to be that of a step.
        """
        self.abandon()
        if len(self.trace.records) >= _MOST_RECORDS:
            return None
        trace, records = self.trace, self.trace.settle()
        bad = [i for i in self._results if i >= 0 and not records[i].finite and not records[i].intended]
        what = "the model's output or the loss is not finite" if bad else "gradients are not finite"
        bad += nonfinite_gradients(trace, parameters)
        if bad:
            return _verdict(trace, origins(trace, bad), what, loss_scale, device)
        large, limit = largest_gradients(trace, parameters)
        if any(records[i].largest > LARGEST_NORM * loss_scale for i in large):
            what = "gradients are too large to square in float32"
            return _verdict(trace, origins(trace, large, limit=limit), what, loss_scale, device)
        return None


def _verdict(trace: Trace, found: Origins, what: str, loss_scale: float, device: str) -> Diagnosis | None:
    if found.outside:
        return from_outside(trace, found)
    if not found.operations:
        return None
    record = found.operations[0]
    named = suspects(trace, found)
    half = record.dtype if record.dtype in _HALF else "float16"
    if _is_half_to_blame(trace, record):
        if record.direction == "backward" and loss_scale > 1.0 and not fixes.divides(record):
            return Diagnosis(
                "loss_scale_too_high",
                suspects=named,
                detail=f"{what} at loss scale {loss_scale:g}; {range_of(record, named[0])}",
                fix=tuple(fixes.fixes_for_scale(max(1.0, loss_scale / 16.0), device)),
                evidence={"loss_scale": loss_scale, "largest_input": named[0].largest_input},
            )
        return precision_verdict(trace, found, what, half, device, loss_scale)
    return Diagnosis(
        "not_a_precision_problem",
        suspects=named,
        detail=f"{what}; {range_of(record, named[0])}, which float32 would not change",
        fix=(
            *fixes.fixes_for_float32(found),
            "# to be sure, replay one batch in float32 as well: print(hw.diagnose(model, closure).text())",
        ),
        evidence={"loss_scale": loss_scale, "largest_input": named[0].largest_input},
    )


def _is_half_to_blame(trace: Trace, record: Record) -> bool:
    """Whether the operation failed for want of precision, judged without a replay in float32.

    A NaN from sound inputs (an empty softmax, the logarithm of a negative number) is the same in every precision,
    unless it is the inf - inf of a sum that overflowed on the way. A zero in half is more likely an underflow than a
    zero.
    """
    if fixes.is_for_want_of_precision(trace, record):
        return True
    return record.dtype in _HALF and (record.found != "nan" or record.short in CONTRACTIONS)
