"""Each test of the Keras adapter starts from the same seeds, names and policy."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


@pytest.fixture(autouse=True)
def _fresh_keras() -> Iterator[None]:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")
