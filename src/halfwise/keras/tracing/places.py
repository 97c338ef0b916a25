"""Where in the user's code something runs: the innermost line that belongs neither to Keras nor to what lies below."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import keras
import numpy as np

__all__ = ["NOWHERE", "Place", "line_here"]


class Place(NamedTuple):
    """Module path, module class (`""`, `""` outside all layers) and `"file.py:line"`."""

    module: str
    module_class: str
    source: str


NOWHERE = Place("", "", "")


def line_here(boundary: CodeType) -> str:
    """`"file.py:line"` of the innermost frame of the user's, `""` where there is none inside the call of `boundary`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not boundary:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@functools.cache
def _is_users(filename: str) -> bool:
    return not filename.startswith((*_packages(), "<frozen")) and filename not in _NEITHER


@functools.cache
def _packages() -> tuple[str, ...]:
    """The folders of the frameworks, and of this adapter: the built-in workloads are a user of it like any other."""
    specs = (importlib.util.find_spec(name) for name in ("tensorflow", "jax", "torch", "optree"))
    folders = [str(Path(spec.origin).parent) for spec in specs if spec is not None and spec.origin]
    own = [str(Path(str(module.__file__)).parent) for module in (keras, np)]
    return tuple(f"{folder}{os.sep}" for folder in (*folders, *own, str(Path(__file__).parents[1])))


_NEITHER = frozenset({contextlib.__file__, functools.__file__})
