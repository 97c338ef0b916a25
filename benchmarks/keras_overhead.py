"""What the guard costs per training step of Keras' `fit`, against plain Keras under the same policy, on each backend.

Claim: at most 1.03 times plain Keras, on the classifier of Keras' tutorials at the size of MNIST and on a
4-layer transformer, one thread.
What is timed is the function that `fit` calls for each step, on the batches that `fit` would hand it, in bursts of
plain and guarded training in turn; beside them plain Keras against itself, which is what the machine's noise looks
like. The weights of both are compared at the end.

    python benchmarks/keras_overhead.py [--json] [--backend tensorflow|jax|torch] [--rounds 30] [--steps 10]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from _harness import emit, interleave, keep_freed_memory, medians, ratios, table

BACKENDS = ("tensorflow", "jax", "torch")
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
TOLERANCE = {"float32": 1e-4, "mixed_bfloat16": 2e-2, "mixed_float16": 1e-2}  # XLA fuses the two programs differently
HEADERS = ("backend", "model", "policy", "ms/step", "A/A", "guard")


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="steps of each training in each round")
    arguments = parser.parse_args()
    if arguments.backend is None:
        rows = [row for backend in BACKENDS for row in _in_a_process_of_its_own(backend, arguments)]
    else:
        rows = measured(arguments.backend, rounds=arguments.rounds, steps=arguments.steps)
    shown = [(*row[:3], f"{row[3]:.2f}", f"{row[4]:.3f}", f"{row[5]:.3f}") for row in rows]
    emit(table(HEADERS, shown), {"rows": rows}, as_json=arguments.json)


def _in_a_process_of_its_own(backend: str, arguments: argparse.Namespace) -> list[list[Any]]:
    """Keras' backend is fixed when it is imported."""
    command = [sys.executable, __file__, "--json", "--backend", backend]
    command += ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows: list[list[Any]] = json.loads(done.stdout)["rows"]
    return rows


def measured(backend: str, *, rounds: int, steps: int) -> list[list[Any]]:
    """A row for each model and policy."""
    _one_thread(backend)
    import keras

    import halfwise.keras as hw

    rows = []
    for name, make in (("convnet", convnet), ("transformer", transformer)):
        for policy in POLICIES:
            trainings = {}
            for kind in ("plain", "plain again", "guard"):
                hw.set_global_policy(policy)
                keras.utils.set_random_seed(0)
                model, x, y = make(keras)
                hw.set_global_policy("float32")
                guard = hw.PrecisionGuard(log=lambda _: None) if kind == "guard" else None
                trainings[kind] = Training(model, x, y, guard, steps)
            seconds = interleave(trainings, rounds, warmup=2)
            for training in trainings.values():
                training.end()
            _compare(trainings["plain"].model, trainings["guard"].model, TOLERANCE[policy])
            relative = ratios(seconds, "plain")
            row = [backend, name, policy, medians(seconds)["plain"] / steps * 1e3]
            rows.append([*row, relative["plain again"], relative["guard"]])
    return rows


class Training:
    """Steps of `fit`, a few at a time."""

    def __init__(self, model: Any, x: Any, y: Any, guard: Any, steps: int) -> None:
        import keras

        self.model, self.steps, self.guard = model, steps, guard
        self.backend = keras.backend.backend()
        model._symbolic_build(data_batch=(x, y))
        model.make_train_function()
        if guard is not None:
            guard.set_model(model)
            guard.on_train_begin()
        if self.backend == "tensorflow":
            import tensorflow as tf

            self.data = iter(tf.data.Dataset.from_tensors((x, y)).cache().repeat())
        self.batch = (keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y))
        self.state = self._state() if self.backend == "jax" else None
        if self.backend == "torch":
            import torch

            self.generator = torch.Generator().manual_seed(1).get_state()

    def _state(self) -> Any:
        everything = dict.fromkeys(
            ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables"), True
        )
        return self.model._get_jax_state(**everything)

    def __call__(self) -> None:
        if self.backend == "torch":  # dropout draws from the generator that all trainings share
            import torch

            torch.set_rng_state(self.generator)
        self._steps()
        if self.backend == "torch":
            self.generator = torch.get_rng_state()

    def _steps(self) -> None:
        model = self.model
        logs: Any = None
        for _ in range(self.steps):
            if self.backend == "jax":
                logs, self.state = model.train_function(self.state, iter([self.batch]))
            elif self.backend == "torch":
                logs = model.train_function([self.batch])
            else:
                logs = model.train_function(self.data)
        float(logs["loss"])  # an asynchronous backend is done now

    def end(self) -> None:
        """Brings the weights back into the model."""
        if self.state is not None:
            for variable, value in zip(self.model.trainable_variables, self.state[0], strict=True):
                variable.assign(value)


def convnet(keras: Any) -> tuple[Any, Any, Any]:
    """The classifier of Keras' tutorials at the size of MNIST, with its softmax in float32."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )
    return _compiled(keras, model), *_data((64, 28, 28, 1))


def transformer(keras: Any) -> tuple[Any, Any, Any]:
    """Four encoder layers of width 128 on 8 sequences of 64."""
    layers = keras.layers
    inputs = x = keras.Input((64, 128))
    for _ in range(4):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 32, dropout=0.1)(normal, normal)])
        x = layers.Add()([x, layers.Dense(128)(layers.Dense(512, activation="relu")(layers.LayerNormalization()(x)))])
    outputs = layers.Dense(10, activation="softmax", dtype="float32")(layers.Flatten()(x))
    return _compiled(keras, keras.Model(inputs, outputs)), *_data((8, 64, 128))


def _compiled(keras: Any, model: Any) -> Any:
    optimizer = keras.optimizers.Adam(1e-4)
    if model.layers[1].compute_dtype == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 128.0)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def _data(shape: tuple[int, ...]) -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    return random.normal(size=shape).astype("float32"), random.integers(0, 10, shape[0]).astype("int32")


def _compare(plain: Any, guarded: Any, tolerance: float) -> None:
    import numpy as np

    for mine, theirs in zip(guarded.trainable_variables, plain.trainable_variables, strict=True):
        error = float(np.linalg.norm(mine.numpy() - theirs.numpy())) / max(float(np.linalg.norm(theirs.numpy())), 1e-3)
        assert error < tolerance, f"{mine.path}: the guarded training does other work ({error:.2g})"


def _one_thread(backend: str) -> None:
    os.environ.update(KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3", OMP_NUM_THREADS="1")
    if backend == "jax":
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    elif backend == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    else:
        import torch

        torch.set_num_threads(1)


if __name__ == "__main__":
    main()
