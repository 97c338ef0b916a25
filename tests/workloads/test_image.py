from __future__ import annotations

import pytest
import torch
from torch import nn

from halfwise.errors import UsageError
from halfwise.workloads.image import NETWORKS, build_network


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 8, 8), (3, 5, 9), (1, 4, 4)], ids=str)
def test_networks_give_logits_for_every_size(name: str, shape: tuple[int, int, int]) -> None:
    network = build_network(name, shape, 7)
    logits = network(torch.rand(5, *shape))
    assert logits.shape == (5, 7)
    assert torch.isfinite(logits).all()


def test_the_networks_are_the_ones_that_are_promised() -> None:
    shapes = {name: [tuple(p.shape) for p in build_network(name, (1, 28, 28), 10).parameters()] for name in NETWORKS}
    assert shapes["convnet"] == [(32, 1, 3, 3), (32,), (128, 32 * 13 * 13), (128,), (10, 128), (10,)]
    assert shapes["small"] == [(32, 1, 3, 3), (32,), (10, 32 * 26 * 26), (10,)]
    assert any(isinstance(module, nn.MaxPool2d) for module in build_network("convnet", (1, 8, 8), 10).modules())


def test_unknown_networks_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown network 'vgg'; choose one of 'convnet', 'small'"):
        build_network("vgg", (1, 8, 8), 10)
