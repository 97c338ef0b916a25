"""Which layers are softmax heads."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from halfwise.keras.heads import heads

L = keras.layers


def sequential(*layers: Any) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), *layers])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([L.Dense(3, activation="softmax", name="a")], ("a",)),
        ([L.Dense(3, name="a"), L.Softmax(name="b")], ("b",)),
        ([L.Dense(3, name="a"), L.Activation("log_softmax", name="b")], ("b",)),
        ([L.Dense(1, activation="sigmoid", name="a")], ("a",)),
        ([L.Dense(3, activation="softmax", name="gate"), L.Dense(1, name="a")], ()),
        ([L.Dense(3, activation="sigmoid", name="gate"), L.Dense(1, name="a")], ()),
        ([L.Dense(3, name="a")], ()),
        ([keras.Sequential([L.Dense(3, activation="softmax", name="b")], name="inside")], ("inside.b",)),
    ],
)
def test_sequential(layers: list[Any], expected: tuple[str, ...]) -> None:
    model = sequential(*layers)
    assert heads(model) == expected


def test_functional_models_with_several_outputs() -> None:
    inputs = keras.Input((4,))
    gate = L.Dense(4, activation="softmax", name="gate")(inputs)
    outputs = [L.Dense(3, activation="softmax", name="a")(gate), L.Dense(1, activation="sigmoid", name="b")(gate)]
    assert heads(keras.Model(inputs, outputs)) == ("a", "b")


def test_attention_has_a_softmax_and_is_no_head() -> None:
    inputs = keras.Input((3, 4))
    x = L.MultiHeadAttention(2, 2)(inputs, inputs)
    assert heads(keras.Model(inputs, L.Dense(2, name="a")(x))) == ()


class InCode(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.gate = L.Dense(4, activation="sigmoid", name="gate")
        self.head = L.Dense(2, activation="softmax", name="head")

    def call(self, x: Any) -> Any:
        return self.head(x * self.gate(x))


def test_a_model_written_in_code() -> None:
    assert heads(InCode()) == ("head",)
