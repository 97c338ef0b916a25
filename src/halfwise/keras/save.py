"""Saving a model with its plan beside it, and reading both back.

A `.keras` file keeps the policies of most layers and loses those of attention's inner layers and of functional models.
The plan beside it says all.
"""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import Any

import keras

from halfwise.core.plan import Plan
from halfwise.errors import UsageError

__all__ = ["load_model", "plan_path", "save_model"]


def save_model(model: keras.Model, filepath: str | PathLike[str], **options: Any) -> None:
    """Saves `model` as a `.keras` file, and the plan in force on it beside that: `model.keras`, `model.plan.toml`.

    Args:
        model: any model; without a plan in force only the model is written.
        filepath: ends in `.keras`.
        options: those of `model.save`.

    Raises:
        UsageError: `filepath` does not end in `.keras`.

    Example:
        >>> import keras, tempfile, halfwise.keras as hw
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> handle = hw.apply(model, hw.Plan.manual(default="bfloat16", framework="keras"))
        >>> file = tempfile.mkdtemp() + "/model.keras"
        >>> hw.save_model(model, file)
        >>> hw.load_model(file).layers[0].compute_dtype
        'bfloat16'
    """
    _check(filepath)
    model.save(filepath, **options)  # writes the plan where one is in force
    if "save" not in model.__dict__:
        plan_path(filepath).unlink(missing_ok=True)  # that of an earlier model of the same name


def load_model(filepath: str | PathLike[str], **options: Any) -> keras.Model:
    """Reads a `.keras` file, and applies the plan that lies beside it, if any.

    Args:
        filepath: as for `save_model`.
        options: those of `keras.saving.load_model`. Nothing in the files is executed as long as `safe_mode` is left on.

    Raises:
        UsageError: the file is missing or does not end in `.keras`; PlanError: the plan does not fit the model.
    """
    _check(filepath)
    if not Path(filepath).is_file():
        raise UsageError(f"there is no model {fspath(filepath)!r}; give the file that save_model wrote")
    from halfwise.keras.apply import apply

    model = keras.saving.load_model(filepath, **options)
    if plan_path(filepath).is_file():
        apply(model, Plan.load(plan_path(filepath)))
    return model


def plan_path(filepath: str | PathLike[str]) -> Path:
    """Where the plan of a `.keras` file lies.

    >>> plan_path("runs/model.keras").name
    'model.plan.toml'
    """
    return Path(filepath).with_suffix(".plan.toml")


def _check(filepath: str | PathLike[str]) -> None:
    if not fspath(filepath).endswith(".keras"):
        raise UsageError(f"{fspath(filepath)!r} is no name for a model file; it must end in .keras")
