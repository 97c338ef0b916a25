"""Workloads by name: built in, or what a function in a file or a module returns."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from halfwise.core.workload import Workload
from halfwise.errors import HalfwiseError, UsageError
from halfwise.workloads.frameworks import use_backend

__all__ = ["BUILT_IN", "load_workload", "told"]

BUILT_IN = ("image", "text", "convnet", "encoder", "decoder", "lstm", "recommender", "unet", "gan")
"""The workloads that come with halfwise: those of `halfwise train`, and seven kinds of model."""

_FORM = "give a built-in name, path/to/file.py:function, or package.module:function"


def load_workload(
    name: str, *, framework: str | None = None, backend: str | None = None, seed: int | None = None
) -> Workload:
    """The workload called `name`.

    Args:
        name: one of `BUILT_IN`; or `path/to/file.py:function` or `package.module:function`, a function without required
            arguments that returns a `Workload`. The file is run once, as a module; its folder, or the working directory
            for a module, can be imported from meanwhile.
        framework: `"torch"` or `"keras"`, for a built-in workload; default `"torch"`.
        backend: Keras' backend: `"tensorflow"`, `"jax"` or `"torch"`. It is set before anything imports Keras. Default:
            that of `KERAS_BACKEND`, else the first one that is installed.
        seed: of a built-in workload's weights and choice of data; default 0.

    Raises:
        UsageError: there is no such workload, or the function returns something else.
        HalfwiseError: the file or the function raises; the cause is kept.
        MissingDependencyError: a package is not installed.

    Example:
        >>> load_workload("image").framework
        'torch'
    """
    where, colon, function = name.rpartition(":")
    if not colon:
        return _built_in(name, framework or "torch", backend, seed or 0)
    if framework is not None:
        raise UsageError(
            f"--framework {framework!r} goes with built-in workloads; {name!r} brings its model, which tells"
        )
    if seed is not None:
        raise UsageError(f"--seed {seed} goes with built-in workloads; set one in {name!r} itself")
    if backend is not None:
        use_backend(backend)
    with _loaded(where, name) as module:
        made = _called(_function(module, function, name), name)
    if not isinstance(made, Workload):
        raise UsageError(
            f"{name!r} returned {type(made).__name__}; it must return a halfwise.Workload: "
            "return halfwise.Workload(model=model, batches=batches, loss=loss)"
        )
    return made


def _built_in(name: str, framework: str, backend: str | None, seed: int) -> Workload:
    if name not in BUILT_IN:
        raise UsageError(f"no workload {name!r}; built in are {', '.join(BUILT_IN)}; or {_FORM}")
    if framework not in ("torch", "keras"):
        raise UsageError(f"--framework {framework!r} cannot be used; allowed: 'torch', 'keras'.")
    if framework == "keras":
        use_backend(backend)
    elif backend is not None:
        raise UsageError(f"--backend {backend!r} belongs to Keras. Add --framework keras, or leave --backend out.")
    home = f"halfwise.workloads.{framework}.kinds"
    module = importlib.import_module(f"{home}.trained" if name in ("image", "text") else f"{home}.{name}")
    made: Workload = module.workload(name, seed) if name in ("image", "text") else module.workload(seed)
    return made


@contextmanager
def _loaded(where: str, name: str) -> Iterator[ModuleType]:
    """The module of a file or an import path. What the search path was before it is afterwards."""
    is_file = where.endswith(".py") or os.sep in where
    path = Path(where).resolve()
    if is_file and not path.is_file():
        raise UsageError(f"{name!r}: there is no file {where!r}; {_FORM}")
    before = list(sys.path)
    sys.path.insert(0, str(path.parent if is_file else Path.cwd()))
    try:
        yield _of_file(path, name) if is_file else _of_module(where, name)
    finally:
        sys.path[:] = before


def _of_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_halfwise_workload_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{name!r}: {path} is no Python file; {_FORM}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look there
    with told(name):
        spec.loader.exec_module(module)
    return module


def _of_module(where: str, name: str) -> ModuleType:
    try:
        found = importlib.util.find_spec(where)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UsageError(f"{name!r}: there is no module {where!r}; {_FORM}")
    with told(name):
        return importlib.import_module(where)


def _function(module: ModuleType, function: str, name: str) -> Callable[[], Any]:
    found = getattr(module, function, None)
    if not callable(found):
        mine = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        ]
        has = f"it has {', '.join(mine)}" if mine else "it has no functions"
        raise UsageError(f"{name!r}: there is no function {function!r}; {has}")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UsageError(
            f"{name!r}: the function needs arguments ({error}); give one that takes none, or has defaults for all"
        ) from error
    made: Callable[[], Any] = found
    return made


def _called(function: Callable[[], Any], name: str) -> Any:
    with told(name):
        return function()


@contextmanager
def told(name: str) -> Iterator[None]:
    """What the user's code raises within the block becomes one message with its place: a `HalfwiseError`."""
    try:
        yield
    except HalfwiseError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise HalfwiseError(
            f"{name!r} raised {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        ) from error
