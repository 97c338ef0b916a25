"""Closures: what counts as one, and whether it gave the same loss twice."""

from __future__ import annotations

import math

import pytest
import torch

from halfwise.errors import UsageError
from halfwise.torch.closure import as_closures, check_replayed, split_loss

LOSS = torch.ones((), requires_grad=True)


def test_one_or_several() -> None:
    assert as_closures(list) == (list,)
    assert as_closures([list, dict]) == (list, dict)


def test_the_loss_and_the_rest() -> None:
    assert split_loss(LOSS) == (LOSS, None)
    assert split_loss((LOSS, "a")) == (LOSS, "a")
    assert split_loss((LOSS, "a", "b")) == (LOSS, ("a", "b"))
    assert split_loss((LOSS,))[0] is LOSS


@pytest.mark.parametrize(("first", "second"), [(1.0, 1.0), (1.0, 1.0005), (math.nan, 1.0), (1.0, math.inf), (0.0, 0.0)])
def test_the_same_loss(first: float, second: float) -> None:
    check_replayed(first, second)


@pytest.mark.parametrize(("first", "second"), [(1.0, 1.01), (0.0, 1e-6), (-1.0, 1.0)])
def test_another_loss(first: float, second: float) -> None:
    with pytest.raises(UsageError, match="called twice"):
        check_replayed(first, second)
