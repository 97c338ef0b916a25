"""What a training run of a built-in workload is started with, and kept in its `environment.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from halfwise.errors import DataError, UsageError

__all__ = ["NETWORKS", "WORKLOADS", "Settings"]

WORKLOADS = ("image", "text")

NETWORKS: Mapping[str, tuple[str, ...]] = {"image": ("convnet", "small"), "text": ("embedding_bag",)}
"""The networks of each workload by name, the default first."""

_BUILT_IN = {"image": "digits", "text": "sotu"}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "image": {"epochs": 20, "learning_rate": 1e-3},
    "text": {"epochs": 10, "learning_rate": 3e-3},
}
_EPOCHS_OF_OTHER_DATA = 5


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a training run. Together with versions and threads they decide every bit of its result.

    Attributes:
        workload: `"image"` or `"text"`.
        framework: `"torch"` or `"keras"`.
        backend: Keras' backend: `"tensorflow"`, `"jax"` or `"torch"`; None with the framework torch.
        loop: `"fit"` or `"custom"` with Keras; None with torch, whose loop is always written by hand.
        policy: `"auto"`, `"float32"`, `"mixed_float16"`, `"mixed_bfloat16"`, or the path of a plan.
        data: a built-in name, or a path.
        network: one of `NETWORKS[workload]`.
        epochs: passes over the data.
        batch_size: inputs per step.
        learning_rate: Adam's.
        seed: decides the initial weights and, with the epoch's number, the order of the data.
        limit: at most so many inputs for training and for testing; None for all.
        checkpoint_every: steps between checkpoints within an epoch; None for one a minute. Each epoch ends with one.
    """

    workload: str
    framework: str = "torch"
    backend: str | None = None
    loop: str | None = None
    policy: str = "auto"
    data: str
    network: str
    epochs: int
    batch_size: int = 64
    learning_rate: float
    seed: int = 0
    limit: int | None = None
    checkpoint_every: int | None = None

    @classmethod
    def of(cls, workload: str, **given: Any) -> Self:
        """Settings with what is given, and the workload's defaults for the rest; data of one's own get fewer epochs.

        Raises:
            UsageError: the workload has no such network.

        >>> Settings.of("image").epochs, Settings.of("image", data="photos").epochs
        (20, 5)
        """
        defaults = {"data": _BUILT_IN[workload], "network": NETWORKS[workload][0], **_DEFAULTS[workload]}
        if given.get("data", defaults["data"]) != defaults["data"]:
            defaults["epochs"] = _EPOCHS_OF_OTHER_DATA
        settings = cls(workload=workload, **{**defaults, **given})
        if settings.network not in NETWORKS[workload]:
            choice = ", ".join(map(repr, NETWORKS[workload]))
            raise UsageError(f"unknown network {settings.network!r}; choose one of {choice}.")
        return settings

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
                "the run's environment.json holds no settings of a training run; it may come from another version. "
                "Start a new run."
            )
        return cls(**values)
