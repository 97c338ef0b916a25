"""Every `>>>` example of the Keras adapter runs, on every backend."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import halfwise.keras

MODULES = [
    module.name
    for module in pkgutil.walk_packages(halfwise.keras.__path__, "halfwise.keras.")
    if ".backends." not in module.name
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) > 15
