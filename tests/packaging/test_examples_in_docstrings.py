"""The examples in docstrings and guides run as they stand."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import halfwise

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(halfwise.__path__, "halfwise.")
    if not module.name.endswith("__main__") and ".keras" not in module.name  # tests/keras runs those on each backend
)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    results = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert results.failed == 0


def test_the_public_functions_have_examples() -> None:
    from halfwise import torch as hw

    without = [
        name
        for name in (
            "MixedPrecision",
            "apply",
            "conversion_account",
            "diagnose",
            "plan",
            "preflight",
            "profile",
            "to_precision",
            "watch",
        )
        if ">>>" not in (getattr(hw, name).__doc__ or "")
    ]
    assert without == []
