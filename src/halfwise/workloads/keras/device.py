"""The device and the threads that Keras' backend computes with."""

from __future__ import annotations

from typing import Any

import keras

__all__ = ["describe_device", "use_one_thread"]


def describe_device() -> dict[str, Any]:
    """The device's name, and the number of threads; 0 where TensorFlow chooses it, None where JAX does."""
    match keras.backend.backend():
        case "tensorflow":
            import tensorflow as tf

            gpus = tf.config.list_physical_devices("GPU")
            name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "gpu") if gpus else "cpu"
            return {"device": name, "threads": tf.config.threading.get_intra_op_parallelism_threads()}
        case "jax":
            import jax

            return {"device": jax.devices()[0].device_kind, "threads": None}
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": name, "threads": torch.get_num_threads()}


def use_one_thread() -> None:
    """Has the backend use one thread for each operation, where it can still be told."""
    match keras.backend.backend():
        case "tensorflow":
            import tensorflow as tf

            try:
                tf.config.threading.set_intra_op_parallelism_threads(1)
            except RuntimeError:  # it has started already
                return
        case "torch":
            import torch

            torch.set_num_threads(1)
