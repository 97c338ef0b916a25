"""The state of a training under `MixedPrecision` as nested dicts, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from halfwise.core.diagnosis import Incident
from halfwise.core.guard import GuardState
from halfwise.core.plan_file import dumps, loads
from halfwise.core.policy import disabled
from halfwise.errors import UsageError
from halfwise.torch.snapshot import RandomState

if TYPE_CHECKING:
    from halfwise.torch.engine import Engine

__all__ = ["load_state_dict", "state_dict"]

_VERSION = 1
_KEYS = ("scale", "policy", "plan", "guard", "incidents", "steps", "skipped_steps", "random")


def state_dict(engine: Engine, policy: str) -> dict[str, Any]:
    """See `MixedPrecision.state_dict`."""
    return {
        **engine.scale.state_dict(),
        "version": _VERSION,
        "policy": policy,
        "plan": None if engine.plan is None else dumps(engine.plan),
        "guard": asdict(engine.guard_state),
        "incidents": [incident.as_dict() for incident in engine.incidents],
        "steps": engine.steps,
        "skipped_steps": engine.skipped_steps,
        "random": RandomState(engine.devices).state_dict(),
    }


def load_state_dict(engine: Engine, saved: Mapping[str, Any]) -> str | None:
    """See `MixedPrecision.load_state_dict`. Returns the policy that is in force now, None where it did not change."""
    if not isinstance(saved, Mapping):
        raise UsageError(
            f"the state is {type(saved).__name__}; give what mp.state_dict() or GradScaler's state_dict() gave"
        )
    if "version" not in saved:  # a GradScaler's
        engine.scale.load_state_dict(saved)
        if saved and not engine.scaled:
            engine.log("the GradScaler's state was read and is not used: nothing computes in float16 under this policy")
        return None
    if saved["version"] != _VERSION:
        raise UsageError(f"the state has version {saved['version']!r}; this halfwise reads version {_VERSION}")
    missing = [key for key in _KEYS if key not in saved]
    if missing:
        raise UsageError(f"the state lacks {', '.join(missing)}; give what mp.state_dict() gave, whole")
    policy = None
    if not disabled():  # then everything stays plain float32, whatever the run was before
        if saved["plan"] is not None:
            engine.use_plan(loads(saved["plan"], source="the saved state"))
            policy = str(saved["policy"])
        engine.scale.load_state_dict(saved)
    engine.guard_state = GuardState(**saved["guard"])
    engine.incidents = [Incident.from_dict(fields) for fields in saved["incidents"]]
    engine.steps = saved["steps"]
    engine.skipped_steps = saved["skipped_steps"]
    RandomState.from_state_dict(saved["random"]).restore()
    return policy
