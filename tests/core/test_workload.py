"""What a workload must have, and which framework it belongs to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfwise.core.workload import Workload
from halfwise.errors import UsageError


def loss(model: Any, batch: Any) -> Any:
    return model(batch).sum()


def test_a_workload_of_pytorch() -> None:
    assert Workload(model=torch.nn.Linear(2, 1), batches=[torch.ones(1, 2)], loss=loss).framework == "torch"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": []}, "at least one batch"),
        ({"batches": "digits"}, "at least one batch"),
        ({"batches": iter([torch.ones(1, 2)])}, "at least one batch"),
        ({"loss": None}, "give a function that returns a batch's loss"),
        ({"model": object()}, "give a torch.nn.Module or a keras.Model"),
    ],
)
def test_what_is_missing_is_told(changes: dict[str, Any], message: str) -> None:
    arguments = {"model": torch.nn.Linear(2, 1), "batches": [torch.ones(1, 2)], "loss": loss, **changes}
    with pytest.raises(UsageError, match=message):
        Workload(**arguments)
