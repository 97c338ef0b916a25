"""What a training run of a built-in workload is started with, and kept in its `environment.json`."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

import torch
from torch import nn

from halfwise.errors import DataError
from halfwise.torch.names import named_layers

__all__ = ["ImageSettings", "describe_environment", "environment_changes"]

_EPOCHS_OF_LARGE_DATA = 5
_PACKAGES = ("halfwise", "torch", "numpy")


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """The settings of an image training run. Together with versions and threads they decide every bit of its result.

    Attributes:
        policy: `"auto"`, `"float32"`, `"mixed_float16"`, `"mixed_bfloat16"`, or the path of a plan.
        data: a built-in name, or a directory.
        network: a key of `NETWORKS`.
        epochs: passes over the data.
        batch_size: images per step.
        learning_rate: Adam's.
        seed: decides the initial weights and, with the epoch's number, the order of the data.
        limit: at most so many images for training and for testing; None for all.
        checkpoint_every: steps between checkpoints within an epoch; None for one a minute. Each epoch ends with one.
    """

    policy: str = "auto"
    data: str = "digits"
    network: str = "convnet"
    epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 1e-3
    seed: int = 0
    limit: int | None = None
    checkpoint_every: int | None = None

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Settings with what is given, and defaults for the rest; data other than the digits get fewer epochs."""
        if given.get("data", cls.data) != "digits":
            given.setdefault("epochs", _EPOCHS_OF_LARGE_DATA)
        return cls(**given)

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """The inverse of `as_dict`.

        Raises:
            DataError: `values` are no such settings.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != names:
            raise DataError(
                "the run's environment.json holds no settings of an image training run; it may come from another "
                "version. Start a new run."
            )
        return cls(**values)


def describe_environment(
    settings: ImageSettings, *, model: nn.Module, device: torch.device, data: Mapping[str, Any]
) -> dict[str, Any]:
    """What a run record keeps beside the results: settings, modules, versions, hardware, threads."""
    return {
        "workload": "image",
        "framework": "torch",
        "settings": settings.as_dict(),
        "data": dict(data),
        "modules": {path: type(module).__name__ for path, module in named_layers(model)},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "system": platform.platform(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def environment_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two environments that can change the last bits of a result, in words."""
    old, new = _facts(before), _facts(now)
    return [f"{name}: {old.get(name)} before, {value} now" for name, value in new.items() if old.get(name) != value]


def _facts(environment: Mapping[str, Any]) -> dict[str, Any]:
    versions = environment.get("versions")
    facts = {name: environment.get(name) for name in ("device", "threads", "machine")}
    return {**facts, **(versions if isinstance(versions, Mapping) else {})}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
