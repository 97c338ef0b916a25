"""halfwise: mixed-precision training that decides from evidence, survives numerical accidents and explains itself.

`import halfwise.torch as hw` is the PyTorch front door. This module holds what is common to all frameworks; its names
are loaded when they are first used, so that importing it costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfwise.core.diagnosis import Diagnosis, Incident
    from halfwise.core.formats import FORMATS, Format
    from halfwise.core.histogram import ExponentHistogram
    from halfwise.core.loss_scale import LossScaleSettings
    from halfwise.core.plan import Plan, Rule
    from halfwise.core.profile import Profile
    from halfwise.core.timing import TimingTable
    from halfwise.core.workload import Workload
    from halfwise.errors import HalfwiseError, TrainingStopped, UsageError

__version__ = "0.1.0.dev0"

_HOMES = {
    "Diagnosis": "halfwise.core.diagnosis",
    "ExponentHistogram": "halfwise.core.histogram",
    "FORMATS": "halfwise.core.formats",
    "Format": "halfwise.core.formats",
    "HalfwiseError": "halfwise.errors",
    "Incident": "halfwise.core.diagnosis",
    "LossScaleSettings": "halfwise.core.loss_scale",
    "Plan": "halfwise.core.plan",
    "Profile": "halfwise.core.profile",
    "Rule": "halfwise.core.plan",
    "TimingTable": "halfwise.core.timing",
    "TrainingStopped": "halfwise.errors",
    "UsageError": "halfwise.errors",
    "Workload": "halfwise.core.workload",
}

__all__ = [
    "FORMATS",
    "Diagnosis",
    "ExponentHistogram",
    "Format",
    "HalfwiseError",
    "Incident",
    "LossScaleSettings",
    "Plan",
    "Profile",
    "Rule",
    "TimingTable",
    "TrainingStopped",
    "UsageError",
    "Workload",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'halfwise' has no attribute {name!r}; it has: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
