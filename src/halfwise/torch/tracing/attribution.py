"""Which module and which line of the user's code an operation belongs to.

Forward, both are read from the Python stack: the innermost call of an `nn.Module` that the model knows (or of its
`forward` alone: code does call that directly), and the innermost frame outside torch and halfwise.torch. No hooks are
installed, so nothing has to be removed, compiled models give no warning, and a module whose instance `forward` was
replaced is still found. Backward there is no stack; there autograd's sequence numbers lead from a node to the forward
operation that made it.

`setdefault` matters: operations without a gradient do not advance the sequence number and would claim their
predecessor's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from halfwise.core.diagnosis import Direction
from halfwise.torch.names import named_layers

__all__ = ["NOWHERE", "Attribution", "Place", "is_users"]


class Place(NamedTuple):
    """Module path, module class (`""`, `""` outside all modules) and `"file.py:line"`."""

    module: str
    module_class: str
    source: str


NOWHERE = Place("", "", "")

_MODULE_CALL = nn.Module.__call__.__code__
_ENGINE: CodeType | None = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
"""The last Python frame before the autograd engine: what lies beyond it called `backward()` and computed nothing."""

_next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]

# The adapter alone: the built-in workloads are a user of it like any other.
_NOT_THE_USERS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
_NEITHER = frozenset({contextlib.__file__, functools.__file__})
_IS_USERS: dict[str, bool] = {}


class Attribution:
    """Places of operations of one model, forward and backward. Used by one `Trace`."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module): (path, type(module).__name__) for path, module in named_layers(model)}
        forwards = (getattr(type(module).forward, "__code__", None) for module in model.modules())
        self._forwards = {id(code) for code in forwards if code is not None}
        self._nodes: dict[int, tuple[Place, str]] = {}
        self._fixed: Place | None = None

    @contextmanager
    def fixed(self, place: Place) -> Iterator[None]:
        """Within the block every operation belongs to `place`: for halfwise's own operations, such as scaling the
        loss.
        """
        self._fixed = place
        try:
            yield
        finally:
            self._fixed = None

    def here(self, operation: str) -> tuple[Direction, Place, str]:
        """Direction, place, and (backward) the forward operation that is being differentiated, for the running
        operation.
        """
        node: Any = torch._C._current_autograd_node()
        if node is None:
            place = self._fixed or self._from_stack() or NOWHERE
            self._nodes.setdefault(_next_sequence_number() - 1, (place, operation))
            return "forward", place, ""
        known, of = self._nodes.get(node._sequence_nr(), (NOWHERE, ""))
        recomputed = torch.is_grad_enabled()  # checkpointing runs forward operations while going backward
        if recomputed or isinstance(node, torch.autograd.function.BackwardCFunction):
            found = self._from_stack()
            if found is not None:
                module = found if found.module_class else known
                known = Place(module.module, module.module_class, found.source or known.source)
                of = "" if found.source else of  # the code of a custom backward speaks for itself
        if recomputed:
            self._nodes.setdefault(_next_sequence_number() - 1, (known, operation))
            return "forward", known, ""
        return "backward", known, of

    def _from_stack(self) -> Place | None:
        owner: tuple[str, str] | None = None
        source = ""
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code is _ENGINE:
                break
            if not source and is_users(code.co_filename):
                source = f"{code.co_filename}:{frame.f_lineno}"
                if owner is not None:
                    break
            if owner is None and (code is _MODULE_CALL or id(code) in self._forwards):
                owner = self._modules.get(id(frame.f_locals.get(code.co_varnames[0])) if code.co_varnames else 0)
                if owner is not None and source:
                    break
            frame = frame.f_back  # type: ignore[assignment]
        if owner is None and not source:
            return None
        path, name = owner or ("", "")
        return Place(path, name, source.rpartition(os.sep)[2])


def is_users(filename: str) -> bool:
    """Whether code in this file is the user's: neither torch's nor the adapter's nor Python's own."""
    known = _IS_USERS.get(filename)
    if known is None:
        known = not (filename.startswith(_NOT_THE_USERS) or filename in _NEITHER or filename.startswith("<frozen"))
        _IS_USERS[filename] = known
    return known
