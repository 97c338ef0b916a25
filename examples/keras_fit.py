"""Keras' own `fit` with halfwise: the global policy says what is wanted, the callback carries it out.

python examples/keras_fit.py    (KERAS_BACKEND=tensorflow, jax or torch chooses the backend)
"""

from __future__ import annotations

import keras

import halfwise.keras as hw
from halfwise.workloads.digits import load_digits

data = load_digits()
images, test_images = (array.transpose(0, 2, 3, 1) for array in (data.train_images, data.test_images))

keras.utils.set_random_seed(0)
hw.set_global_policy("auto")
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])

guard = hw.PrecisionGuard()
model.fit(images, data.train_labels, epochs=3, batch_size=64, callbacks=[guard], verbose=2)
accuracy = model.evaluate(test_images, data.test_labels, verbose=0, return_dict=True)["accuracy"]

print(f"test accuracy {accuracy:.3f}, {guard.skipped_steps} of {guard.steps} steps skipped")
assert guard.plan is not None
print(f"auto chose {guard.plan.default.compute}: {guard.plan.default.detail}")
