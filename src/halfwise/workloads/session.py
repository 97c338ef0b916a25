"""A training run and its record in step with each other: what is written when, and how a killed run goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from halfwise.core.diagnosis import Incident
from halfwise.core.plan import Plan
from halfwise.core.profile import Profile
from halfwise.core.record import RunRecord
from halfwise.core.timing import TimingTable
from halfwise.workloads.progress import Progress

__all__ = ["Checkpoints", "Precision", "Session", "View"]

_SECONDS_BETWEEN_CHECKPOINTS = 60.0


class View(Protocol):
    """Who is told what happens while it happens."""

    def start(self, *, epochs: int, steps_per_epoch: int, step: int) -> None:
        """Training begins, or goes on, at `step`."""

    def step(self, row: Mapping[str, Any], *, accuracy: float, skipped: int) -> None:
        """A step is done. `row` is its line in `metrics.jsonl`, `accuracy` the epoch's so far, on training data."""

    def measuring(self) -> None:
        """Training is over, and the step time is measured."""

    def message(self, text: str) -> None:
        """The guard has something to say."""


class Precision(Protocol):
    """What halfwise knows of a training: a `MixedPrecision` of PyTorch or a `PrecisionGuard` of Keras."""

    @property
    def plan(self) -> Plan | None: ...
    @property
    def profile(self) -> Profile | None: ...
    @property
    def timing(self) -> TimingTable | None: ...
    @property
    def incidents(self) -> Sequence[Incident]: ...
    @property
    def loss_scale(self) -> float: ...
    @property
    def skipped_steps(self) -> int: ...


class Checkpoints(Protocol):
    """How a framework keeps everything that the next step depends on, in a directory."""

    def save_checkpoint(self, directory: Path, progress: Mapping[str, Any]) -> None:
        """Replaces the checkpoint. A kill at any moment leaves the old one or the new one, complete."""

    def load_checkpoint(self, directory: Path) -> dict[str, Any] | None:
        """Puts everything back, and returns the `progress`; None where there is no checkpoint."""


class Session:
    """Keeps `record` up to date with the run, and tells the view.

    The order of the writes makes any kill harmless: lines, plan and profile first, then the checkpoint. So a checkpoint
    never knows a step whose line is missing, and what came after it is cut off when the run goes on.

    Args:
        record: the run's record.
        precision: knows plan, profile and incidents.
        checkpoints: saves and loads.
        view: is told what happens.
        steps_per_epoch: batches in the training data.
        checkpoint_every: steps between checkpoints within an epoch; None for one a minute, infinity for none.
    """

    def __init__(
        self,
        record: RunRecord,
        *,
        precision: Precision,
        checkpoints: Checkpoints,
        view: View,
        steps_per_epoch: int,
        checkpoint_every: float | None,
    ) -> None:
        self.record = record
        self.progress = Progress()
        self._precision, self._checkpoints, self._view = precision, checkpoints, view
        self._steps_per_epoch, self._checkpoint_every = steps_per_epoch, checkpoint_every
        self._last_of_epoch: tuple[dict[str, Any], float] | None = None
        self._incidents_written = 0
        self._plan_written: Plan | None = None
        self._earlier_profile: Profile | None = None
        self._saved_at_step = -1
        self._saved_at = time.monotonic()

    def begin(self) -> Progress:
        """Goes on from the record's checkpoint; starts at the first step where there is none yet."""
        saved = self._checkpoints.load_checkpoint(self.record.checkpoint_path)
        if saved is not None:
            self.progress = Progress(**saved)
            self._saved_at_step = self.progress.step
            if self.record.profile_path.is_file():
                self._earlier_profile = Profile.load(self.record.profile_path)
        self.record.truncate_after(self.progress.step - 1)
        self._incidents_written = len(self._precision.incidents)
        self._write_plan()
        if saved is None:
            self.checkpoint()
        return self.progress

    def note_step(self, *, loss: float, loss_scale: float, applied: bool, seconds: float, accuracy: float) -> None:
        """A step is done. The line of an epoch's last step is written by `end_epoch`.

        Args:
            loss: the batch's, not scaled.
            loss_scale: that of this step.
            applied: False where it was skipped.
            seconds: how long it took.
            accuracy: the epoch's so far.
        """
        at = self.progress
        row = {"step": at.step, "epoch": at.epoch, "loss": loss, "loss_scale": loss_scale}
        row |= {"applied": applied, "seconds": round(seconds, 6)}
        at.step, at.position, at.seconds = at.step + 1, at.position + 1, at.seconds + seconds
        if at.position == self._steps_per_epoch:
            self._last_of_epoch = row, accuracy
        else:
            self._write_step(row, accuracy)

    def end_epoch(self, results: Mapping[str, float]) -> None:
        """The epoch is over and the model was tested on the test data.

        Args:
            results: `train_loss`, `train_accuracy`, `test_loss`, `test_accuracy`.
        """
        if self._last_of_epoch is not None:
            row, accuracy = self._last_of_epoch
            self._last_of_epoch = None
            self.progress.next_epoch()
            self._write_step({**row, **results}, accuracy)
        if self._precision.plan is not None:
            self.checkpoint()

    def note_incidents(self) -> None:
        """Records incidents that are not recorded yet."""
        incidents = self._precision.incidents
        for incident in incidents[self._incidents_written :]:
            self.record.append_event(incident)
        self._incidents_written = len(incidents)

    def checkpoint(self) -> None:
        """Saves everything that the next step depends on, unless that is done."""
        if self._saved_at_step == self.progress.step:
            return
        self._write_profile()
        self.record.sync()
        self._checkpoints.save_checkpoint(self.record.checkpoint_path, asdict(self.progress))
        self._saved_at_step, self._saved_at = self.progress.step, time.monotonic()

    def _write_step(self, row: Mapping[str, Any], accuracy: float) -> None:
        self.record.append_metrics(row)
        self.note_incidents()
        self._write_plan()
        if self._checkpoint_every is None:
            due = time.monotonic() - self._saved_at > _SECONDS_BETWEEN_CHECKPOINTS
        else:
            due = self.progress.step - self._saved_at_step >= self._checkpoint_every
        # While "auto" gathers evidence there is no checkpoint: going on would gather it at other steps than before.
        if due and self._precision.plan is not None:
            self.checkpoint()
        self._view.step(row, accuracy=accuracy, skipped=self._precision.skipped_steps)

    def _write_plan(self) -> None:
        plan = self._precision.plan
        if plan is not None and plan is not self._plan_written:
            plan.save(self.record.plan_path)
            self._plan_written = plan
            if (timing := self._precision.timing) is not None:
                self.progress.format_times = {
                    name: {
                        "ratio": timing.ratio(name),
                        "at_least": any(timing.is_lower_bound(path, name) for path in timing.seconds),
                    }
                    for name in timing.formats
                }

    def _write_profile(self) -> None:
        # A run that goes on does not remember the evidence of its first steps; its record does.
        now = self._precision.profile
        if now is not None:
            earlier = self._earlier_profile.histograms if self._earlier_profile is not None else {}
            Profile({**earlier, **now.histograms}).save(self.record.profile_path)
