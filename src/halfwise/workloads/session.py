"""A training run and its record in step with each other: what is written when, and how a killed run goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from halfwise.core.plan import Plan
from halfwise.core.profile import Profile
from halfwise.core.record import RunRecord
from halfwise.workloads.progress import Progress

if TYPE_CHECKING:
    from halfwise.workloads.training import Training

__all__ = ["Session"]

_SECONDS_BETWEEN_CHECKPOINTS = 60.0


class Session:
    """Keeps `record` up to date with the run, and tells the view.

    The order of the writes makes any kill harmless: lines, plan and profile first, then the checkpoint. So a checkpoint
    never knows a step whose line is missing, and what came after it is cut off when the run goes on.

    Args:
        record: the run's record.
        training: what runs.
    """

    def __init__(self, record: RunRecord, training: Training) -> None:
        self.record = record
        self.progress = Progress()
        self._training = training
        self._last_of_epoch: tuple[dict[str, Any], float] | None = None
        self._incidents_written = 0
        self._plan_written: Plan | None = None
        self._earlier_profile: Profile | None = None
        self._saved_at_step = -1
        self._saved_at = time.monotonic()

    def begin(self) -> Progress:
        """Goes on from the record's checkpoint; starts at the first step where there is none yet."""
        saved = self._training.load_checkpoint(self.record.checkpoint_path)
        if saved is not None:
            self.progress = Progress(**saved)
            self._saved_at_step = self.progress.step
            if self.record.profile_path.is_file():
                self._earlier_profile = Profile.load(self.record.profile_path)
        self.record.truncate_after(self.progress.step - 1)
        self._incidents_written = len(self.record.events())
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
        if at.position == self._training.steps_per_epoch:
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
        if self._training.precision.plan is not None:
            self.checkpoint()

    def note_incidents(self) -> None:
        """Records incidents that are not recorded yet."""
        incidents = self._training.precision.incidents
        for incident in incidents[self._incidents_written :]:
            self.record.append_event(incident)
        self._incidents_written = len(incidents)

    def checkpoint(self) -> None:
        """Saves everything that the next step depends on, unless that is done."""
        if self._saved_at_step == self.progress.step:
            return
        self._write_profile()
        self.record.sync()
        self._training.save_checkpoint(self.record.checkpoint_path, asdict(self.progress))
        self._saved_at_step, self._saved_at = self.progress.step, time.monotonic()

    def _write_step(self, row: Mapping[str, Any], accuracy: float) -> None:
        self.record.append_metrics(row)
        self.note_incidents()
        self._write_plan()
        # While "auto" gathers evidence there is no checkpoint: going on would gather it at other steps than before.
        if self._is_due() and self._training.precision.plan is not None:
            self.checkpoint()
        self._training.view.step(row, accuracy=accuracy, skipped=self._training.precision.skipped_steps)

    def _is_due(self) -> bool:
        if not self._training.checkpoint_within_epochs:
            return False
        if (every := self._training.settings.checkpoint_every) is not None:
            return self.progress.step - self._saved_at_step >= every
        return time.monotonic() - self._saved_at > _SECONDS_BETWEEN_CHECKPOINTS

    def _write_plan(self) -> None:
        plan = self._training.precision.plan
        if plan is not None and plan is not self._plan_written:
            plan.save(self.record.plan_path)
            self._plan_written = plan
            if (timing := self._training.precision.timing) is not None:
                self.progress.format_times = {
                    name: {
                        "ratio": timing.ratio(name),
                        "at_least": any(timing.is_lower_bound(path, name) for path in timing.seconds),
                    }
                    for name in timing.formats
                }

    def _write_profile(self) -> None:
        # A run that goes on does not remember the evidence of its first steps; its record does.
        now = self._training.precision.profile
        if now is not None:
            earlier = self._earlier_profile.histograms if self._earlier_profile is not None else {}
            Profile({**earlier, **now.histograms}).save(self.record.profile_path)
