"""Shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _one_seed_and_one_wrapping() -> Iterator[None]:
    """Each test starts from the same generator state."""
    try:
        import torch
    except ModuleNotFoundError:
        yield
        return
    torch.manual_seed(0)
    yield
