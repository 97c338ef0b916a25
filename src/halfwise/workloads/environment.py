"""What surrounds a training run and can change the last bits of its result."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

import halfwise

__all__ = ["describe_environment", "environment_changes"]


def describe_environment(*packages: ModuleType) -> dict[str, Any]:
    """The versions of Python, halfwise, numpy and `packages`, and the hardware."""
    return {
        "versions": {
            "python": platform.python_version(),
            **{package.__name__: str(package.__version__) for package in (halfwise, np, *packages)},
        },
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }


def environment_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two environments that can change the last bits of a result, in words."""
    old, new = _facts(before), _facts(now)
    return [f"{name}: {old.get(name)} before, {value} now" for name, value in new.items() if old.get(name) != value]


def _facts(environment: Mapping[str, Any]) -> dict[str, Any]:
    versions = environment.get("versions")
    facts = {name: environment.get(name) for name in ("device", "threads", "machine")}
    return {**facts, **(versions if isinstance(versions, Mapping) else {})}
