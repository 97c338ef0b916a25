"""The flow of the guide on real digits; under "auto" exactly the layers that fit go to half.

The timing table says that half precision is twice as fast. What fits is worked out here by hand, in numpy, with none of
halfwise's statistics and none of Keras.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import keras
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from tests.keras.models import Array

import halfwise.keras as hw
from halfwise.core.planner import EVIDENCE_STEPS
from halfwise.core.ranges import HEADROOM, LARGEST_UNDERFLOW
from halfwise.workloads.digits import load_digits

DATA = load_digits()
IMAGES, LABELS = DATA.train_images.transpose(0, 2, 3, 1).copy(), DATA.train_labels
TEST_IMAGES, TEST_LABELS = DATA.test_images.transpose(0, 2, 3, 1).copy(), DATA.test_labels
LAYERS = ("conv2d", "dense", "dense_1")
NEXT = {"conv2d": "dense", "dense": "dense_1"}
BATCH = 64


def network(*, head: str | None = "softmax", blow_up: str | None = None, optimizer: Any = "adam") -> keras.Model:
    """The classifier of Keras' tutorials; `blow_up` names a layer whose output leaves float16's range."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation=head),
        ]
    )
    if blow_up is not None:
        for name, factor in ((blow_up, 1e5), (NEXT[blow_up], 1e-5)):
            kernel, bias = model.get_layer(name).get_weights()
            model.get_layer(name).set_weights([kernel * np.float32(factor), bias])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=head is None)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def values_by_hand(model: keras.Model) -> dict[str, dict[str, list[Array]]]:
    """What each layer with weights reads and writes, and the gradients of that, over the evidence batches."""
    (kernel, bias), (hidden, hidden_bias), (head, head_bias) = (model.get_layer(n).get_weights() for n in LAYERS)
    seen: dict[str, dict[str, list[Array]]] = {name: defaultdict(list) for name in LAYERS}
    for step in range(EVIDENCE_STEPS):
        rows = slice(BATCH * step, BATCH * step + BATCH)
        x, y = IMAGES[rows], LABELS[rows]
        patches = sliding_window_view(x, (3, 3), axis=(1, 2)).transpose(0, 1, 2, 4, 5, 3)  # n, 6, 6, 3, 3, 1
        convolved = np.maximum(np.tensordot(patches, kernel, axes=3) + bias, 0)
        blocks = convolved.reshape(len(x), 3, 2, 3, 2, 32)
        flat = blocks.max(axis=(2, 4)).reshape(len(x), -1)
        activated = np.maximum(flat @ hidden + hidden_bias, 0)
        logits = activated @ head + head_bias
        shifted = np.exp(logits - logits.max(1, keepdims=True))
        d_logits = (shifted / shifted.sum(1, keepdims=True) - np.eye(10)[y]).astype(np.float32) / len(x)
        d_activated = d_logits @ head.T
        d_hidden = d_activated * (activated > 0)
        d_flat = d_hidden @ hidden.T
        is_largest = blocks == blocks.max(axis=(2, 4), keepdims=True)
        first = np.cumsum(np.cumsum(is_largest, axis=2), axis=4) == 1
        d_convolved = (d_flat.reshape(len(x), 3, 1, 3, 1, 32) * (is_largest & first)).reshape(convolved.shape)
        d_before = d_convolved * (convolved > 0)
        seen["conv2d"]["forward"] += [x, convolved, kernel, bias]
        seen["conv2d"]["activation_gradient"] += [d_convolved]
        seen["conv2d"]["weight_gradient"] += [
            np.tensordot(patches, d_before, ([0, 1, 2], [0, 1, 2])),
            d_before.sum((0, 1, 2)),
        ]
        seen["dense"]["forward"] += [flat, activated, hidden, hidden_bias]
        seen["dense"]["activation_gradient"] += [d_activated, d_flat]
        seen["dense"]["weight_gradient"] += [flat.T @ d_hidden, d_hidden.sum(0)]
        seen["dense_1"]["forward"] += [activated, logits, head, head_bias]
        seen["dense_1"]["activation_gradient"] += [d_logits, d_activated]
        seen["dense_1"]["weight_gradient"] += [activated.T @ d_logits, d_logits.sum(0)]
    return seen


def fits_float16(seen: dict[str, list[Array]], loss_scale: float) -> bool:
    if max(float(np.abs(array).max()) for array in seen["forward"]) * HEADROOM > 65504:
        return False
    for role in ("activation_gradient", "weight_gradient"):
        values = np.concatenate([array.ravel() for array in seen[role]]).astype(np.float32) * np.float32(loss_scale)
        values = values[values != 0]
        lost = float((values.astype(np.float16) == 0).mean())
        if float(np.abs(values).max()) * HEADROOM > 65504 or lost > LARGEST_UNDERFLOW:
            return False
    return True


def noted(model: keras.Model) -> dict[str, str]:
    """Fills with the dtype that each layer's `call` returned last, while Keras traces it or runs it."""
    ran: dict[str, str] = {}
    for layer in model.layers:

        def call(*args: Any, _inner: Any = layer.call, _name: str = layer.name, **kwargs: Any) -> Any:
            result = _inner(*args, **kwargs)
            ran[_name] = keras.backend.standardize_dtype(result.dtype)
            return result

        layer.__dict__["call"] = call
    return ran


@pytest.mark.parametrize(
    ("head", "blow_up", "expected"),
    [
        (None, None, {"conv2d", "dense", "dense_1"}),
        (None, "conv2d", {"dense_1"}),
        (None, "dense", {"conv2d"}),
        ("softmax", None, {"conv2d", "dense"}),
    ],
)
def test_exactly_the_layers_that_fit_go_to_float16(head: str | None, blow_up: str | None, expected: set[str]) -> None:
    hw.set_global_policy("auto")
    model = network(head=head, blow_up=blow_up, optimizer=keras.optimizers.SGD(1e-9))
    seen, ran = values_by_hand(model), noted(model)
    guard = hw.PrecisionGuard(timing=hw.TimingTable.uniform(LAYERS, relative={"float16": 0.5}), log=lambda _: None)
    rows = BATCH * (EVIDENCE_STEPS + 1)
    model.fit(IMAGES[:rows], LABELS[:rows], batch_size=BATCH, shuffle=False, callbacks=[guard], verbose=0)
    plan = guard.plan
    assert plan is not None
    scale = plan.loss_scale.initial if plan.loss_scale is not None else 1.0
    by_hand = {name for name in LAYERS if fits_float16(seen[name], scale)} - ({"dense_1"} if head else set())
    planned = {name for name in LAYERS if plan.compute(name) == "float16"}
    assert planned == by_hand == expected
    assert {name: ran[name] for name in LAYERS} == {n: "float16" if n in planned else "float32" for n in LAYERS}
    for name in set(LAYERS) - planned:
        assert plan.rule_for(name).reason == ("hazard" if head and name == "dense_1" else "range")
    assert guard.skipped_steps == 0


@pytest.mark.parametrize("policy", ["auto", "mixed_float16", "mixed_bfloat16"])
def test_the_flow_of_the_guide(policy: str) -> None:
    hw.set_global_policy(policy)
    model = network()
    guard = hw.PrecisionGuard(log=lambda _: None)
    history = model.fit(
        IMAGES,
        LABELS,
        epochs=8,
        batch_size=64,
        validation_data=(TEST_IMAGES, TEST_LABELS),
        callbacks=[guard],
        verbose=0,
    )
    accuracy = model.evaluate(TEST_IMAGES, TEST_LABELS, verbose=0)[1]
    assert accuracy > 0.92
    assert history.history["val_accuracy"][-1] == pytest.approx(accuracy)
    assert guard.plan is not None
    ran = noted(model)
    model.train_function = None
    model.train_on_batch(IMAGES[:64], LABELS[:64])
    assert ran == {layer.name: guard.plan.compute(layer.name) for layer in model.layers}
    half = "bfloat16" if "bfloat16" in policy else "float16"
    assert policy == "auto" or set(ran.values()) == {half}
