"""Batches that cannot be used as given get one clear error, wherever a batch is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.keras.models import batch, classifier

import halfwise.keras as hw
from halfwise.errors import UsageError

FUNCTIONS: dict[str, Callable[..., Any]] = {"step": hw.step, "diagnose": hw.diagnose, "plan": hw.plan}


@pytest.fixture(params=FUNCTIONS)
def function(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return FUNCTIONS[request.param]


def test_numbers_in_lists_are_no_batch(function: Callable[..., Any]) -> None:
    _, y = batch(2)
    with pytest.raises(UsageError, match=r"\(x=...\) holds 0.0; give arrays .*np.asarray\(x\)"):
        function(classifier(), [[0.0] * 8] * 2, y)


def test_an_empty_batch(function: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"\(x=...\) is empty \(shape \(0, 8\)\)"):
        function(classifier(), np.ones((0, 8), "float32"), np.ones(0, "int32"))


def test_rows_that_do_not_fit_together(function: Callable[..., Any]) -> None:
    x, y = batch(8)
    with pytest.raises(UsageError, match="x has 8, y has 7"):
        function(classifier(), x, y[:7])


def test_structures_of_arrays_are_batches() -> None:
    x, y = batch(8)
    assert hw.step(classifier(), x, y, np.ones(8, "float32")).applied
