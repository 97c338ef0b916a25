from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from halfwise.workloads.image_data import ImageData
from halfwise.workloads.keras.networks import build_network
from halfwise.workloads.settings import NETWORKS
from halfwise.workloads.text_data import TextData


def images(shape: tuple[int, int, int], classes: int) -> ImageData:
    inputs, labels = np.zeros((1, *shape), np.float32), np.zeros(1, np.int64)
    return ImageData("none", inputs, labels, inputs, labels, classes)


def texts(vocabulary: int, classes: int) -> TextData:
    words, labels = np.ones((1, 60), np.int32), np.zeros(1, np.int64)
    names = tuple(str(number) for number in range(vocabulary))
    return TextData("none", words, labels, words, labels, names, names[:classes])


@pytest.mark.parametrize("name", NETWORKS["image"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 5, 9), (1, 4, 4)], ids=str)
def test_image_networks_give_probabilities_for_every_size(name: str, shape: tuple[int, int, int]) -> None:
    channels, height, width = shape
    network = build_network(name, images(shape, 7))
    found = network.predict(np.random.RandomState(0).rand(5, height, width, channels), verbose=0)
    assert found.shape == (5, 7)
    assert found.sum(1) == pytest.approx(np.ones(5), rel=1e-5)


def test_the_networks_are_the_ones_that_are_promised() -> None:
    data = images((1, 28, 28), 10)
    shapes = {name: [tuple(v.shape) for v in build_network(name, data).weights] for name in NETWORKS["image"]}
    assert shapes["convnet"] == [(3, 3, 1, 32), (32,), (32 * 13 * 13, 128), (128,), (128, 10), (10,)]
    assert shapes["small"] == [(3, 3, 1, 32), (32,), (32 * 26 * 26, 10), (10,)]
    text = build_network("embedding_bag", texts(98, 3))
    assert [tuple(v.shape) for v in text.weights] == [(100, 64), (64, 3), (3,)]
    with pytest.raises(ValueError, match="no network 'convnet' for TextData"):
        build_network("convnet", texts(10, 2))


def test_the_embedding_bag_is_the_mean_over_words_that_are_no_padding(tmp_path: Path) -> None:
    network = build_network("embedding_bag", texts(10, 2))
    table, kernel, bias = network.get_weights()
    words = np.array([[3, 5, 5, 0], [7, 0, 0, 0]], np.int32)
    means = np.stack([(table[3] + 2 * table[5]) / 3, table[7]])
    logits = means @ kernel + bias
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert network.predict(words, verbose=0) == pytest.approx(expected, rel=1e-5)
    longer = np.pad(words, ((0, 0), (0, 30)))
    assert network.predict(longer, verbose=0) == pytest.approx(expected, rel=1e-5)
    network.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.predict(words, verbose=0) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("name", "data"), [("convnet", images((1, 8, 8), 3)), ("embedding_bag", texts(10, 3))])
def test_probabilities_are_made_in_float32(name: str, data: ImageData | TextData) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        network = build_network(name, data)
    finally:
        keras.config.set_dtype_policy("float32")
    computed = {layer.name: layer.compute_dtype for layer in network.layers}
    assert computed.pop("head") == "float32"
    assert set(computed.values()) == {"float16"}
