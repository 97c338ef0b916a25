"""Paths of layers: canonical names, whatever Keras' counters say."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from halfwise.keras.names import children, named_layers, own_code, own_names, routes, whole

L = keras.layers


def stack(*layers: Any) -> keras.Sequential:
    return keras.Sequential([keras.Input((4,)), *layers])


class Residual(keras.layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = L.Dense(4)

    def call(self, x: Any) -> Any:
        return x + self.inner(x)


def test_names_that_keras_made_up_are_numbered_within_their_parent() -> None:
    L.Dense(1), L.Dense(1)  # as if other models had been built before
    model = stack(L.Dense(2), L.Dense(2), L.Dense(2, name="head"))
    assert [layer.name for layer in model.layers] == ["dense_2", "dense_3", "head"]
    assert list(named_layers(model)) == ["", "dense", "dense_1", "head"]
    assert own_names(model) == {"": "", "dense_2": "dense", "dense_3": "dense_1", "head": "head"}


def test_a_name_that_somebody_gave_is_kept_even_if_keras_could_have_made_it() -> None:
    model = stack(L.Dense(2, name="dense_1"), L.ReLU(name="dense"))
    paths = named_layers(model)
    assert list(paths) == ["", "dense_1", "dense"]
    assert isinstance(paths["dense"], L.ReLU)


def test_nested_models_attention_and_recurrent_layers() -> None:
    inside = keras.Sequential([L.Dense(4)])

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = L.Embedding(10, 4)
            self.blocks = [L.MultiHeadAttention(2, 2), L.Bidirectional(L.LSTM(2))]
            self.inside = inside

        def call(self, ids: Any) -> Any:
            x = self.embedding(ids)
            return self.inside(self.blocks[1](self.blocks[0](x, x)))

    model = Model()
    model(keras.ops.zeros((1, 3), "int32"))
    paths = named_layers(model)
    for path in ("embedding", "multi_head_attention.query", "bidirectional.forward_lstm", "sequential.dense"):
        assert path in paths, path
    assert whole(paths["multi_head_attention"])
    assert whole(paths["bidirectional"])
    assert not whole(paths["sequential"])
    assert own_code(model)


def test_each_layer_comes_once() -> None:
    shared = L.Dense(4, name="shared")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, shared(shared(inputs)))
    assert list(named_layers(model)) == ["", "shared"]


def test_what_only_routes() -> None:
    inputs = keras.Input((4,))
    functional = keras.Model(inputs, L.Dense(2)(inputs))

    class Own(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    class OwnSequential(keras.Sequential):
        def call(self, x: Any, training: bool | None = None, mask: Any = None) -> Any:
            return 2 * super().call(x)

    assert routes(stack(L.Dense(2)))
    assert routes(functional)
    assert not routes(Own())
    assert not routes(OwnSequential([L.Dense(2)]))
    assert not routes(L.Dense(2))


def test_own_code_is_that_of_layers_with_layers_inside() -> None:
    block = Residual()
    block(keras.ops.ones((1, 4)))
    assert own_code(block)
    assert children(block) == [block.inner]
    assert not own_code(block.inner)


@pytest.mark.parametrize("count", [1, 3])
def test_names_survive_saving(tmp_path: Any, count: int) -> None:
    model = stack(*(L.Dense(4) for _ in range(count)))
    model.save(tmp_path / "model.keras")
    L.Dense(1)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert list(named_layers(loaded)) == list(named_layers(model))
