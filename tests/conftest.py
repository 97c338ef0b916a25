"""Shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Keras fixes its backend when it is imported, so its tests run in a process for each backend: see the Makefile.
collect_ignore = [] if "KERAS_BACKEND" in os.environ else ["keras"]


@pytest.fixture(autouse=True)
def _one_seed_and_one_thread() -> Iterator[None]:
    """Each test starts from the same generator state, with one thread."""
    try:
        import torch
    except ModuleNotFoundError:
        yield
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the tests' tensors are tiny: threads would only wait for each other
    yield
