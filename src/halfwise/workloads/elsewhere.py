"""What a model would get on hardware that is not at hand, as a run's summary keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfwise.core.plan import Plan
from halfwise.core.preflight import Preflight

__all__ = ["PREFLIGHTS", "describe_elsewhere"]

PREFLIGHTS = ("mixed_float16", "mixed_bfloat16")
"""The policies that are looked at."""


def describe_elsewhere(target: str, plan: Plan, preflights: Mapping[str, Preflight]) -> dict[str, Any]:
    """JSON-ready: the plan's main format and estimated time relative to float32, and what each preflight found.

    Args:
        target: the hardware.
        plan: what `"auto"` would choose there.
        preflights: policy -> what was found.
    """
    return {
        "target": target,
        "compute": plan.default.compute,
        "relative_time": plan.default.evidence.get("relative_time", 1.0),
        "preflight": {
            policy: {"verdict": found.verdict, "sentence": found.sentence} for policy, found in preflights.items()
        },
    }
