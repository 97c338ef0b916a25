"""A training run and its record in step with each other: what is written when, and how a killed run goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

import halfwise.torch as hw
from halfwise.core.profile import Profile
from halfwise.core.record import RunRecord
from halfwise.torch.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint, tidy_checkpoint

__all__ = ["Progress", "Session"]

_SECONDS_BETWEEN_CHECKPOINTS = 60.0


@dataclass
class Progress:
    """Where training stands: the next step to take, and the sums behind the running epoch's training numbers.

    Attributes:
        epoch: the running epoch, from 0.
        position: batches of it that are done.
        step: steps of the run that are done.
        loss_sum, correct, seen: over the epoch's applied steps: loss times images, right answers, images.
        seconds: spent in steps since the run began.
        format_times: where `"auto"` measured: by format the time of all layers relative to float32 (`"ratio"`), and
            whether that is a lower bound (`"at_least"`).
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    seen: int = 0
    seconds: float = 0.0
    format_times: dict[str, dict[str, Any]] = field(default_factory=dict)

    def next_epoch(self) -> None:
        """Moves to the beginning of the next epoch."""
        self.epoch += 1
        self.position, self.loss_sum, self.correct, self.seen = 0, 0.0, 0, 0


class Session:
    """Keeps `record` up to date with the run.

    The order of the writes makes any kill harmless: lines, plan and profile first, then the checkpoint. So a checkpoint
    never knows a step whose line is missing, and what came after it is cut off when the run goes on.
    """

    def __init__(
        self,
        record: RunRecord,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        mp: hw.MixedPrecision,
        checkpoint_every: int | None,
    ) -> None:
        self.record = record
        self.progress = Progress()
        self._model, self._optimizer, self._mp = model, optimizer, mp
        self._checkpoint_every = checkpoint_every
        self._incidents_written = 0
        self._plan_written: hw.Plan | None = None
        self._earlier_profile: Profile | None = None
        self._saved_at_step = -1
        self._saved_at = time.monotonic()

    def begin(self) -> Progress:
        """Goes on from the record's checkpoint; starts at the first step where there is none yet."""
        path = self.record.checkpoint_path
        tidy_checkpoint(path)
        if find_checkpoint(path) is not None:
            saved = load_checkpoint(path, model=self._model, optimizer=self._optimizer, mp=self._mp)
            self.progress = Progress(**saved)
            self._saved_at_step = self.progress.step
            if self.record.profile_path.is_file():
                self._earlier_profile = Profile.load(self.record.profile_path)
        self.record.truncate_after(self.progress.step - 1)
        self._incidents_written = len(self._mp.incidents)
        self._write_plan()
        if self._saved_at_step < 0:
            self.checkpoint()
        return self.progress

    def note_step(self, row: Mapping[str, Any]) -> None:
        """Records a step that is done: its line, new incidents, a changed plan; and now and then a checkpoint."""
        self.record.append_metrics(row)
        self.note_incidents()
        self._write_plan()
        if self._checkpoint_every is None:
            due = time.monotonic() - self._saved_at > _SECONDS_BETWEEN_CHECKPOINTS
        else:
            due = self.progress.step - self._saved_at_step >= self._checkpoint_every
        # While "auto" gathers evidence there is no checkpoint: going on would gather it at other steps than before.
        if due and self._mp.plan is not None:
            self.checkpoint()

    def note_incidents(self) -> None:
        """Records incidents that are not recorded yet."""
        for incident in self._mp.incidents[self._incidents_written :]:
            self.record.append_event(incident)
        self._incidents_written = len(self._mp.incidents)

    def checkpoint(self) -> None:
        """Saves everything that the next step depends on, unless that is done."""
        if self._saved_at_step == self.progress.step and find_checkpoint(self.record.checkpoint_path) is not None:
            return
        self._write_profile()
        self.record.sync()
        save_checkpoint(
            self.record.checkpoint_path,
            model=self._model,
            optimizer=self._optimizer,
            mp=self._mp,
            progress=asdict(self.progress),
        )
        self._saved_at_step, self._saved_at = self.progress.step, time.monotonic()

    def _write_plan(self) -> None:
        plan = self._mp.plan
        if plan is not None and plan is not self._plan_written:
            plan.save(self.record.plan_path)
            self._plan_written = plan
            if (timing := self._mp.timing) is not None:
                self.progress.format_times = {
                    name: {
                        "ratio": timing.ratio(name),
                        "at_least": any(timing.is_lower_bound(path, name) for path in timing.seconds),
                    }
                    for name in timing.formats
                }

    def _write_profile(self) -> None:
        # A run that goes on does not remember the evidence of its first steps; its record does.
        now = self._mp.profile
        if now is not None:
            earlier = self._earlier_profile.histograms if self._earlier_profile is not None else {}
            Profile({**earlier, **now.histograms}).save(self.record.profile_path)
