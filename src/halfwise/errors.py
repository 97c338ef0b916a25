"""Every error that halfwise raises on purpose, with one root.

HalfwiseError
├── UsageError            (also ValueError)    an argument, a file or a model that cannot be used as given
│   ├── PolicyError                            an unknown or unsupported policy, format or setting
│   ├── PlanError                              a plan that cannot be read, is ambiguous, or does not fit the model
│   └── DataError                              a data directory or file that is missing or malformed
├── MissingDependencyError (also ImportError)  an optional package is needed; the message is the exact pip command
└── TrainingStopped       (also RuntimeError)  the guard could not heal the run; carries the diagnosis

Messages follow one pattern: what was given, what is allowed, what to do next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfwise.core.diagnosis import Diagnosis

__all__ = [
    "DataError",
    "HalfwiseError",
    "MissingDependencyError",
    "PlanError",
    "PolicyError",
    "TrainingStopped",
    "UsageError",
]


class HalfwiseError(Exception):
    """The root of all errors that halfwise raises on purpose."""


class UsageError(HalfwiseError, ValueError):
    """An argument, a file or a model cannot be used as given."""


class PolicyError(UsageError):
    """A policy, format or setting is unknown, or cannot be executed here."""


class PlanError(UsageError):
    """A plan cannot be read, is ambiguous, or does not fit the model."""


class DataError(UsageError):
    """A data directory or file is missing or malformed."""


class MissingDependencyError(HalfwiseError, ImportError):
    """An optional package is needed and absent."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(f'{purpose} needs the package {package!r}: pip install "halfwise[{extra}]"')


class TrainingStopped(HalfwiseError, RuntimeError):
    """The guard stopped the run: changing precision cannot help. The weights are those of the last applied step.

    Attributes:
        diagnosis: what was found: verdict, module, operation, direction, source line, ranges.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis
        super().__init__(diagnosis.text())
