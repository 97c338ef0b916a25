"""Checkpoints of a training in Keras: a directory with `model.keras` (and the plan beside it) and `state.json`.

As a directory cannot be replaced in one step, the new one is written as `checkpoint.new`, `checkpoint` is renamed to
`checkpoint.old`, `checkpoint.new` to `checkpoint`, and `checkpoint.old` removed. Whenever the process dies,
`checkpoint` is complete if it exists, and `checkpoint.old` is if it does not.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

import halfwise.keras as hw
from halfwise.core.files import sync_directory, write_file
from halfwise.core.record import json_ready
from halfwise.errors import DataError, HalfwiseError

__all__ = ["load_checkpoint", "save_checkpoint"]

_VERSION = 1


def save_checkpoint(
    directory: Path, *, model: keras.Model, guard: hw.PrecisionGuard, progress: Mapping[str, Any]
) -> None:
    """Replaces the checkpoint. A kill at any moment leaves the old one or the new one, complete.

    Args:
        directory: its neighbours `.new` and `.old` are used too.
        model: compiled; saved with its optimizer and the plan in force.
        guard: its guard.
        progress: JSON-ready values that say where training stands.
    """
    new, old = _neighbours(directory)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    hw.save_model(model, new / "model.keras")
    with (new / "model.keras").open("rb+") as file:
        os.fsync(file.fileno())
    state = {"version": _VERSION, "guard": guard.state_dict(), "progress": dict(progress)}
    write_file(new / "state.json", json.dumps(json_ready(state), allow_nan=False, separators=(",", ":")))
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    new.rename(directory)
    sync_directory(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(directory: Path) -> tuple[keras.Model, dict[str, Any], dict[str, Any]] | None:
    """The model, the guard's state and the progress; None where there is no checkpoint.

    What a kill left half done is finished: afterwards nothing lies beside the checkpoint.

    Raises:
        DataError: the checkpoint is damaged.
    """
    new, old = _neighbours(directory)
    if not directory.exists() and (old / "state.json").is_file():
        old.rename(directory)
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    if not directory.exists():
        return None
    state = _read_state(directory / "state.json")
    path = directory / "model.keras"
    try:
        model = hw.load_model(path)
    except HalfwiseError as error:
        raise DataError(f"{error}; use another checkpoint.") from error
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(f"{str(path)!r} is damaged ({error}); use another checkpoint.") from error
    return model, state["guard"], state["progress"]


def _neighbours(directory: Path) -> tuple[Path, Path]:
    return directory.with_name(f"{directory.name}.new"), directory.with_name(f"{directory.name}.old")


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{str(path)!r} is missing or damaged ({error}); use another checkpoint.") from error
    if not isinstance(state, dict) or state.get("version") != _VERSION or not {"guard", "progress"} <= state.keys():
        raise DataError(f"{str(path)!r} is no state that this version of halfwise reads; use another checkpoint.")
    return state
