"""The state of a guarded training besides the model: plain values for a JSON file.

Weights, optimizer and loss scale are in the `.keras` file, where Keras keeps the optimizer's variables. The seeds of
dropout are not, so they are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import keras

from halfwise.core.diagnosis import Incident
from halfwise.core.guard import GuardState
from halfwise.core.plan import Plan
from halfwise.core.plan_file import dumps, loads
from halfwise.core.policy import disabled
from halfwise.errors import UsageError
from halfwise.keras.apply import applied_plan
from halfwise.keras.engine import Engine

__all__ = ["Before", "load_state_dict", "put_generator", "state_dict"]

_VERSION = 1
_KEYS = ("plan", "guard", "incidents", "steps", "skipped_steps", "loss_scale", "seeds", "generator")


def state_dict(engine: Engine | None) -> dict[str, Any]:
    """See `PrecisionGuard.state_dict`.

    Raises:
        UsageError: training has not begun.
    """
    if engine is None:
        raise UsageError("the guard has no state before training; call state_dict() during fit or after it")
    return {
        "version": _VERSION,
        "plan": None if engine.plan is None else dumps(engine.plan),
        "guard": asdict(engine.guard_state),
        "incidents": [incident.as_dict() for incident in engine.incidents],
        "steps": engine.steps,
        "skipped_steps": engine.skipped_steps,
        "loss_scale": engine.loss_scale,
        "seeds": engine.seeds(),
        "generator": _generator(),
    }


@dataclass(frozen=True)
class Before:
    """What a saved state tells before the training that goes on from it has begun."""

    plan: Plan | None = None
    incidents: tuple[Incident, ...] = ()
    loss_scale: float = 1.0
    steps: int = 0
    skipped_steps: int = 0

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """From what `state_dict` gave.

        Raises:
            UsageError: it is no such state.
        """
        if not isinstance(saved, Mapping):
            raise UsageError(f"the state is {type(saved).__name__}; give what guard.state_dict() gave")
        if saved.get("version") != _VERSION:
            raise UsageError(f"the state has version {saved.get('version')!r}; this halfwise reads version {_VERSION}")
        if missing := [key for key in _KEYS if key not in saved]:
            raise UsageError(f"the state lacks {', '.join(missing)}; give what guard.state_dict() gave, whole")
        return cls(
            plan=None if saved["plan"] is None else loads(saved["plan"], source="the saved state"),
            incidents=tuple(Incident.from_dict(fields) for fields in saved["incidents"]),
            loss_scale=saved["loss_scale"],
            steps=saved["steps"],
            skipped_steps=saved["skipped_steps"],
        )


def load_state_dict(engine: Engine, saved: Mapping[str, Any], *, generator: bool = True) -> None:
    """See `PrecisionGuard.load_state_dict`; `generator` is False where `put_generator` was called before."""
    before = Before.of(saved)
    if not disabled() and before.plan is not None:
        if applied_plan(engine.model) != before.plan:
            engine.use_plan(before.plan)
        else:
            engine.end_evidence(before.plan)
    engine.guard_state = GuardState(**saved["guard"])
    engine.incidents = list(before.incidents)
    engine.steps, engine.skipped_steps = before.steps, before.skipped_steps
    engine.put_seeds(saved["seeds"])
    if generator:
        put_generator(saved)


def _generator() -> str | None:
    """torch's generator, which Keras' dropout draws from on that backend, in hexadecimal; None on the others."""
    if keras.backend.backend() != "torch":
        return None
    import torch

    return torch.get_rng_state().numpy().tobytes().hex()


def put_generator(saved: Mapping[str, Any]) -> None:
    """Sets torch's generator as it was. In `fit` that is to be done before the epoch's iterator draws from it too."""
    if saved["generator"] is None or keras.backend.backend() != "torch":
        return
    import torch

    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(saved["generator"]), dtype=torch.uint8))
