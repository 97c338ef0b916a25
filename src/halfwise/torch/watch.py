"""`watch`: the read-only front door, for a training loop that exists.

Each step gets checks that cost next to nothing. After a failure the loop's own next step is recorded and the culprit
named. The loop's results stay as they were, bit by bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from halfwise.core.diagnosis import VERDICTS, Diagnosis
from halfwise.core.guard import GuardState, Observation, observe
from halfwise.torch.region import device_type_of
from halfwise.torch.tracing.armed import ArmedTrace
from halfwise.torch.watching.dead_updates import DeadUpdates
from halfwise.torch.watching.setup import check_arguments, half_weights_warning, parameter_names, to_stderr
from halfwise.torch.watching.vitals import highest, is_unsound, squared_norm
from halfwise.torch.watching.wiring import Wiring

__all__ = ["Watch", "watch"]

_SETTLED = GuardState(settled=True)
_TINY = 1.0  # a loss scale at which the gradients of half precision should not overflow any more
_TRIES = 2  # steps that are recorded after a failure before it is taken for a passing one
_SAMPLE_EVERY = 100  # applied steps between two looks for dead updates

_watches: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Watch]] = weakref.WeakKeyDictionary()


def watch(
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None = None,
    *,
    log: Callable[[str], None] | None = None,
) -> Watch:
    """Watches a training loop that uses `torch.autocast`, with or without a `GradScaler`, and changes nothing in it.

    When a step fails, the loop's next step is recorded and a diagnosis is printed, once for each distinct one: verdict,
    module, operation, line, range, and the smallest fix as lines to paste. Skips while the loss scale settles are
    healthy and not printed.

    Args:
        model: the module that the loop calls; compiled and wrapped ones too (a recorded step runs eagerly). A second
            watch of the same model replaces the first.
        optimizer: the optimizer that steps it.
        scaler: the loop's `torch.amp.GradScaler`, if it has one.
        log: called with each text; default prints to standard error.

    Returns:
        A `Watch`, also a context manager; `.close()` removes it without a trace.

    Raises:
        UsageError: an argument is of the wrong kind.

    Example:
        >>> import torch, halfwise.torch as hw
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        >>> with hw.watch(model, optimizer, scaler) as seen:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         with torch.autocast("cpu", dtype=torch.float16):
        ...             loss = model(torch.ones(2, 4)).float().mean()
        ...         scaler.scale(loss).backward()
        ...         scaler.step(optimizer)
        ...         scaler.update()
        >>> seen.applied_steps + seen.skipped_steps, seen.diagnoses
        (3, [])
    """
    return Watch(model, optimizer, scaler, log=log)


class Watch:
    """What `watch` returns: the records of a watched loop.

    Attributes:
        applied_steps, skipped_steps: how often the optimizer stepped, and how often the scaler skipped it.
        loss_scale_history: `(step, scale)` at the beginning and after each change; steps count from 0.
        diagnoses: all that were found, the latest last.
        nonfinite_steps: the steps in which the model's output or the loss was NaN or inf.
        dead_updates: share of elements per parameter whose last sampled update was lost to rounding though the gradient
            was not zero; sampled every 100 applied steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: GradScaler | None = None,
        *,
        log: Callable[[str], None] | None = None,
    ) -> None:
        check_arguments(model, optimizer, scaler)
        previous = _watches.get(model)
        if previous is not None and (old := previous()) is not None:
            old.close()
        self.applied_steps = 0
        self.skipped_steps = 0
        self.loss_scale_history: list[tuple[int, float]] = []
        self.diagnoses: list[Diagnosis] = []
        self.nonfinite_steps: list[int] = []
        self.dead_updates: dict[str, float] = {}
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._log = log or to_stderr
        self._device = device_type_of(model)
        self._names = parameter_names(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._dead = DeadUpdates(self._names)
        self._sampling = False
        self._scale = self._scaler.get_scale() if self._scaler else 1.0
        self._guard = GuardState()
        self._applied_in_a_row = 0
        self._stepped = False
        self._found_inf: Tensor | None = None
        self._fresh: list[Tensor] = []
        self._unread: list[Tensor] = []
        self._tries = 0
        self._rest_until = 0
        self._rest = 10
        self._bad_gradients = ""
        self._armed: ArmedTrace | None = None
        self._in_forward = False
        self._saw_forward = False
        self._said: set[Any] = set()
        self._wiring = Wiring(model, optimizer, self._scaler, self)
        _watches[model] = weakref.ref(self)
        if self._scaler:
            self.loss_scale_history.append((0, self._scale))
        if warning := half_weights_warning(self._names, self._parameters):
            self._say(warning, "half weights")

    @property
    def steps(self) -> int:
        """Steps so far, applied or skipped."""
        return self.applied_steps + self.skipped_steps

    def close(self) -> None:
        """Removes every hook and wrapper. Doing so twice is harmless."""
        self._abandon()
        self._wiring.remove()
        registered = _watches.get(self._model)
        if registered is not None and registered() is self:
            del _watches[self._model]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def summary(self) -> str:
        """What was seen so far, in a few lines of text."""
        lines = [f"{self.steps} steps: {self.applied_steps} applied, {self.skipped_steps} skipped"]
        if self._scaler:
            lines.append(f"loss scale {self._scale:g}, changed {len(self.loss_scale_history) - 1} times")
        if self.nonfinite_steps:
            shown = ", ".join(map(str, self.nonfinite_steps[:5])) + (", ..." if len(self.nonfinite_steps) > 5 else "")
            lines.append(f"NaN or inf in the model's output or the loss in {_count(self.nonfinite_steps)}: {shown}")
        if self.skipped_steps:
            settling = not self.diagnoses and not self.nonfinite_steps
            verdict = f": {VERDICTS['loss_scale_settling']}" if settling else ""
            lines.append(f"skipped steps{verdict}; a scheduler that steps anyway is {self.skipped_steps} ahead")
        worst = sorted(self.dead_updates.items(), key=lambda item: -item[1])[:3]
        if worst and worst[0][1] > 0.01:
            lines.append("updates lost to rounding: " + ", ".join(f"{name} {share:.0%}" for name, share in worst))
        lines += [
            f"{VERDICTS[d.verdict]}: {d.module or 'loss'} {d.operation} {d.source}".rstrip() for d in self.diagnoses
        ]
        return "halfwise.watch: " + "\n  ".join(lines)

    # What the wiring calls

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is about to run with gradients enabled, on these arguments."""
        if _in_backward():
            return  # checkpointing recomputes, and may break that off
        if self._in_forward:
            self.forward_broken_off()
        self._in_forward = self._saw_forward = True
        self._record()
        if self._armed is not None:
            self._armed.entered(args, kwargs)

    def before_inference(self) -> None:
        """The model is about to run without gradients: the step that is recorded may have been given up, by Ctrl-C.

        A second recording goes on, for the sake of loops in which this belongs to the step.
        """
        if self._in_forward or self._tries == _TRIES:
            self.forward_broken_off()

    def forward_broken_off(self) -> None:
        """The model's forward pass raised an exception: the step that it belonged to will not be ended."""
        if _in_backward():
            return  # so ends a recomputation of checkpointing, which goes on
        self._in_forward = False
        if self._armed is not None:
            self._abandon()
            self._tries -= 1

    def after_forward(self, output: Any, *, training: bool) -> None:
        """The model ran with gradients enabled and gave `output`. Out of training mode it may be an evaluation."""
        self._in_forward = False
        if self._armed is not None:
            self._armed.saw(output)
        if training:
            self._look_at(highest(output))

    def after_scaling(self, loss: Any) -> None:
        """The scaler was given `loss`, before scaling."""
        if self._armed is not None:
            self._armed.saw(loss)
        self._look_at(highest(loss))

    def before_scaler_step(self) -> None:
        """The scaler is about to check the gradients, and to step or skip."""
        self._conclude()
        self._resolve()
        self._stepped = False

    def after_scaler_step(self) -> None:
        """The scaler stepped or skipped."""
        if self._found_inf is not None and self._device != "cpu":
            return  # a fused optimizer decides on the device: `_resolve` reads it at the next step
        skipped = not self._stepped if self._found_inf is None else bool(self._found_inf.item())
        self._found_inf = None
        self._count(skipped)
        self._end_step()

    def after_scaler_update(self) -> None:
        """The scaler moved its scale, or did not. It is read only where it must have moved: reading waits for the
        device.
        """
        assert self._scaler is not None
        interval = max(1, self._scaler.get_growth_interval())
        if self._applied_in_a_row % interval == 0 or self._device == "cpu":
            scale = self._scaler.get_scale()
            if scale != self._scale:
                self._scale = scale
                self.loss_scale_history.append((self.steps, scale))

    def before_optimizer_step(self) -> None:
        """The optimizer is about to step: always without a scaler, only on a sound step with one."""
        self._stepped = True
        if self._scaler is None:
            self._conclude()
            self._resolve()
            self._count(skipped=False)
            norm = squared_norm(self._parameters)
            if isinstance(norm, Tensor):
                self._fresh.append(norm)
            elif is_unsound(norm):
                self._note_bad_gradients()
                self._arm()
        else:
            found = getattr(self._optimizer, "found_inf", None)
            self._found_inf = found if isinstance(found, Tensor) else None
        self._sampling = (self.applied_steps - (self._scaler is None)) % _SAMPLE_EVERY == 0
        if self._sampling:
            self._dead.before(self._optimizer)

    def after_optimizer_step(self) -> None:
        """The optimizer stepped."""
        if self._sampling:
            self._sampling = False
            self.dead_updates = self._dead.after() or self.dead_updates
        if self._scaler is None:
            self._end_step()

    def failed(self, error: Exception) -> None:
        """The watch itself failed: it ends, and the loop goes on as without it."""
        self.close()
        self._log(f"halfwise.watch ended, the loop goes on without it: {type(error).__name__}: {error}")

    # Decisions

    def _look_at(self, values: list[Tensor]) -> None:
        for value in values:
            if value.device.type != "cpu":
                self._fresh.append(value)
            elif is_unsound(value):
                self._note_bad_value(self.steps)

    def _resolve(self) -> None:
        """Reads what the step before left on an accelerator; what this step leaves is read after the next."""
        if self._found_inf is not None:
            skipped, self._found_inf = bool(self._found_inf.item()), None
            self._count(skipped)
        unread, self._unread, self._fresh = self._unread, self._fresh, []
        if any(is_unsound(value) for value in unread):
            self._note_bad_value(self.steps - 1)

    def _count(self, skipped: bool) -> None:
        """Counts a step, and by the guard's own rule decides whether skips are still normal."""
        self.skipped_steps += skipped
        self.applied_steps += not skipped
        self._applied_in_a_row = 0 if skipped else self._applied_in_a_row + 1
        if not skipped:
            self._guard = _SETTLED
            return
        seen = Observation(
            loss_finite=True,  # a loss that is not finite was seen before, and has armed the trace
            gradients_sound=False,
            scaled=self._scaler is not None,
            at_floor=self._scale <= _TINY,
        )
        self._guard, action = observe(self._guard, seen)
        if action == "localise":
            self._arm()

    def _note_bad_value(self, step: int) -> None:
        """An output, the loss or (without a scaler) a gradient is NaN or inf: that is not the loss scale's doing."""
        if not self.nonfinite_steps or self.nonfinite_steps[-1] != step:
            self.nonfinite_steps.append(step)
        self._arm()

    def _arm(self) -> None:
        """Has the following steps recorded, unless this failure was diagnosed a moment ago."""
        if self.steps < self._rest_until or self._tries or self._armed is not None:
            return
        self._tries = _TRIES

    def _end_step(self) -> None:
        """Between two steps: where the forward pass cannot be seen, recording begins here."""
        if not self._saw_forward:
            self._record()
        self._saw_forward = False

    def _record(self) -> None:
        if self._tries > 0 and self._armed is None and ArmedTrace.possible():
            self._armed = ArmedTrace(self._model)

    def _conclude(self) -> None:
        """Ends a recording, with a diagnosis if the step failed."""
        armed, self._armed = self._armed, None
        if armed is None:
            return
        self._tries -= 1
        diagnosis = armed.finish(self._parameters, loss_scale=self._scale, device=self._device)
        if diagnosis is None:
            if self._tries == 0 and self.nonfinite_steps:
                self._say(
                    f"halfwise: step {self.nonfinite_steps[-1]} computed NaN or inf, and the steps after it are sound: "
                    "look at that step's batch.\nhw.diagnose(model, closure) on it names the operation.",
                    "one bad step",
                )
            return
        self._tries = 0
        self._rest_until = self.steps + self._rest
        self._rest *= 10
        if diagnosis.verdict == "nonfinite_parameters" and self._bad_gradients:
            diagnosis = _with_history(diagnosis, self._bad_gradients)
        self.diagnoses.append(diagnosis)
        self._say(diagnosis.text(), (diagnosis.verdict, diagnosis.module, diagnosis.operation, diagnosis.source))

    def _abandon(self) -> None:
        if self._armed is not None:
            self._armed.abandon()
            self._armed = None

    def _note_bad_gradients(self) -> None:
        if self._bad_gradients:
            return
        bad = [
            self._names.get(id(p), "?")
            for p in self._parameters
            if p.grad is not None and is_unsound(squared_norm([p]))
        ]
        names = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        self._bad_gradients = f"step {self.steps - 1} was the first with bad gradients ({names})"

    def _say(self, text: str, about: object) -> None:
        if about not in self._said:
            self._said.add(about)
            self._log(text)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _count(steps: list[int]) -> str:
    return "1 step" if len(steps) == 1 else f"{len(steps)} steps"


def _with_history(diagnosis: Diagnosis, history: str) -> Diagnosis:
    return Diagnosis(
        diagnosis.verdict,
        suspects=diagnosis.suspects,
        detail=f"{diagnosis.detail}; {history}, which the optimizer wrote into the weights",
        fix=(*diagnosis.fix, "# hw.MixedPrecision(model, optimizer, policy=...) skips such steps in every precision"),
        evidence=diagnosis.evidence,
    )
