"""What healing needs besides the core's rules: a trace where a batch cannot be run again, and lines to paste."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfwise.core import healing
from halfwise.core.diagnosis import Diagnosis, Incident

if TYPE_CHECKING:
    from halfwise.torch.engine import Engine

__all__ = ["fix_lines", "heal_later_steps"]


def heal_later_steps(engine: Engine, diagnosis: Diagnosis | None) -> Incident | None:
    """After a failed step without a closure, which cannot be tried again: changes precision for the steps to come.

    Without a `diagnosis`, that is after the first failure, the next step is traced to get one. Where that was asked for
    and could not be done (another dispatch mode is active), the failure counts as one that cannot be healed.

    Raises:
        TrainingStopped: as `halfwise.core.healing.heal` does.
    """
    if diagnosis is None and not engine.armed:
        engine.armed = True
        return None
    if diagnosis is None:
        detail = "the step could not be traced, because another dispatch mode (a profiler, a FLOP counter) is active"
        diagnosis = Diagnosis("not_reproducible", detail=detail)
    return healing.heal_later_steps(engine, diagnosis)


def fix_lines(modules: Sequence[str], *, compute: str, done: bool) -> tuple[str, ...]:
    """How to train under `MixedPrecision` with `modules` in float32 and the rest in `compute`."""
    if done:
        return ("done. To begin like this next time:", 'mp.plan.save("plan.toml"), then policy="plan.toml"')
    rules = ", ".join(f'"{module}": "float32"' for module in modules)
    return (f'policy=hw.Plan.manual({{{rules}}}, default="{compute}")',)
