"""Each training starts from the same seeds, names and policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import keras
import pytest

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


@pytest.fixture(autouse=True)
def _fresh_keras_in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    keras.utils.clear_session(free_memory=False)
    keras.config.set_dtype_policy("float32")
    yield
    assert keras.config.dtype_policy().name == "float32"  # a training leaves the global policy as it was
