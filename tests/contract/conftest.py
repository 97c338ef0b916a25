"""The adapter under test: Keras on the backend that `KERAS_BACKEND` names, PyTorch where it names none."""

from __future__ import annotations

import os

import pytest
from tests.contract.adapter import Adapter


@pytest.fixture(scope="session")
def adapter() -> Adapter:
    """The adapter of this process."""
    if "KERAS_BACKEND" in os.environ:
        from tests.contract.keras_adapter import KerasAdapter

        return KerasAdapter()
    from tests.contract.torch_adapter import TorchAdapter

    return TorchAdapter()
