from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from halfwise.workloads.image_data import ImageData
from halfwise.workloads.settings import NETWORKS
from halfwise.workloads.text_data import TextData
from halfwise.workloads.torch.networks import build_network


def images(shape: tuple[int, int, int], classes: int) -> ImageData:
    inputs, labels = np.zeros((1, *shape), np.float32), np.zeros(1, np.int64)
    return ImageData("none", inputs, labels, inputs, labels, classes)


def texts(vocabulary: int, classes: int) -> TextData:
    words, labels = np.ones((1, 60), np.int32), np.zeros(1, np.int64)
    names = tuple(str(number) for number in range(vocabulary))
    return TextData("none", words, labels, words, labels, names, names[:classes])


@pytest.mark.parametrize("name", NETWORKS["image"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 8, 8), (3, 5, 9), (1, 4, 4)], ids=str)
def test_image_networks_give_logits_for_every_size(name: str, shape: tuple[int, int, int]) -> None:
    network = build_network(name, images(shape, 7))
    logits = network(torch.rand(5, *shape))
    assert logits.shape == (5, 7)
    assert torch.isfinite(logits).all()


def test_the_networks_are_the_ones_that_are_promised() -> None:
    data = images((1, 28, 28), 10)
    shapes = {name: [tuple(p.shape) for p in build_network(name, data).parameters()] for name in NETWORKS["image"]}
    assert shapes["convnet"] == [(32, 1, 3, 3), (32,), (128, 32 * 13 * 13), (128,), (10, 128), (10,)]
    assert shapes["small"] == [(32, 1, 3, 3), (32,), (10, 32 * 26 * 26), (10,)]
    small = build_network("convnet", images((1, 8, 8), 10))
    assert any(isinstance(module, nn.MaxPool2d) for module in small.modules())
    text = build_network("embedding_bag", texts(98, 3))
    assert [tuple(p.shape) for p in text.parameters()] == [(100, 64), (3, 64), (3,)]


def test_the_embedding_bag_is_the_mean_over_words_that_are_no_padding() -> None:
    network = build_network("embedding_bag", texts(10, 2))
    weight, head = network.get_parameter("embedding.weight"), network.get_submodule("head")
    words = torch.tensor([[3, 5, 5, 0], [7, 0, 0, 0]], dtype=torch.int32)
    means = torch.stack([(weight[3] + 2 * weight[5]) / 3, weight[7]])
    assert torch.allclose(network(words), head(means), atol=1e-6)
    longer = torch.nn.functional.pad(words, (0, 30))
    assert torch.allclose(network(longer), network(words), atol=1e-6)


def test_a_network_for_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match="no network 'convnet' for TextData"):
        build_network("convnet", texts(10, 2))
