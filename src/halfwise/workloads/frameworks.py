"""Which framework, backend and loop a run uses: chosen and checked before anything heavy is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from halfwise.core.plan import Plan
from halfwise.errors import MissingDependencyError, UsageError
from halfwise.workloads.datasets import Dataset
from halfwise.workloads.settings import Settings
from halfwise.workloads.training import Training, View

__all__ = ["BACKENDS", "FRAMEWORKS", "LOOPS", "choose_backend", "make_training", "use_backend"]

FRAMEWORKS = ("torch", "keras")
BACKENDS = ("tensorflow", "jax", "torch")
"""Keras' backends; where nobody says which, the first one that is installed."""
LOOPS = ("fit", "custom")


def choose_backend(settings: Settings) -> Settings:
    """`settings` with backend and loop filled in, and this process made ready for them.

    The backend is the one that is given, else that of the environment variable `KERAS_BACKEND`, else the first one that
    is installed. The variable is set, because Keras reads it when it is imported.

    Raises:
        UsageError: an unknown framework, backend or loop, one that does not go with the others, or Keras is imported
            already with another backend.
        MissingDependencyError: a package is not installed.
    """
    _check("--framework", settings.framework, FRAMEWORKS)
    if settings.framework == "torch":
        for option, value in (("--backend", settings.backend), ("--loop", settings.loop)):
            if value is not None:
                raise UsageError(
                    f"{option} {value!r} cannot be used with --framework 'torch': it belongs to Keras. "
                    f"Add --framework keras, or leave {option} out."
                )
        _require("torch", "torch", "halfwise train")
        return settings
    loop = settings.loop or LOOPS[0]
    _check("--loop", loop, LOOPS)
    if loop == "fit" and settings.checkpoint_every is not None:
        raise UsageError(
            "--checkpoint-every cannot be used with --loop 'fit', which keeps a checkpoint after each epoch. "
            "Add --loop custom, or leave it out."
        )
    return replace(settings, backend=use_backend(settings.backend), loop=loop)


def use_backend(backend: str | None) -> str:
    """Makes this process ready for Keras with `backend`; returns which it is where None is given.

    Raises:
        UsageError: an unknown backend, or Keras is imported already with another one.
        MissingDependencyError: Keras or the backend is not installed.
    """
    backend = backend or os.environ.get("KERAS_BACKEND") or _installed_backend()
    _check("--backend", backend, BACKENDS)
    purpose = f"Keras with --backend {backend}"
    _require("keras", "keras" if backend == "torch" else backend, purpose)
    _require(backend, backend, purpose)
    keras = sys.modules.get("keras")
    if keras is not None and (running := keras.backend.backend()) != backend:
        raise UsageError(
            f"--backend {backend!r} cannot be used: Keras runs with {running!r} in this process already, and its "
            "backend is fixed when it is imported. Start a new process."
        )
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's greetings would stand between our lines
    return backend


def make_training(settings: Settings, data: Dataset, *, plan: Plan | None, view: View) -> Training:
    """The training that `settings`, with backend and loop filled in, ask for.

    Args:
        settings: what `choose_backend` returned.
        data: what to train on.
        plan: the plan to train under; None where `settings.policy` names a policy.
        view: is told what happens.

    Raises:
        PolicyError, PlanError: the policy is unknown, or the plan does not fit the network.
    """
    if settings.framework == "torch":
        from halfwise.workloads.torch.training import TorchTraining

        return TorchTraining(settings, data, plan=plan, view=view)
    if settings.loop == "fit":
        from halfwise.workloads.keras.fit import FitTraining

        return FitTraining(settings, data, plan=plan, view=view)
    from halfwise.workloads.keras.custom_loop import CustomLoopTraining

    return CustomLoopTraining(settings, data, plan=plan, view=view)


def _check(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{option} {value!r} cannot be used; allowed: {', '.join(map(repr, allowed))}.")


def _installed_backend() -> str:
    return next((backend for backend in BACKENDS if _is_installed(backend)), BACKENDS[0])


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _require(package: str, extra: str, purpose: str) -> None:
    if not _is_installed(package):
        raise MissingDependencyError(package, extra, purpose)
