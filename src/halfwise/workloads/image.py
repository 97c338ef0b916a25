"""The two convolutional image classifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from halfwise.errors import UsageError

__all__ = ["NETWORKS", "ConvNet", "SmallConvNet", "build_network"]


class ConvNet(nn.Module):
    """Convolution (32 channels, 3 x 3), relu, max-pooling 2 x 2, dense 128, relu, dense to the classes.

    Images have shape (batch, channels, height, width); the logits have shape (batch, classes).
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv = nn.Conv2d(channels, 32, 3)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(32 * ((height - 2) // 2) * ((width - 2) // 2), 128)
        self.head = nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        features: Tensor = self.pool(self.conv(images).relu())
        logits: Tensor = self.head(self.hidden(features.flatten(1)).relu())
        return logits


class SmallConvNet(nn.Module):
    """Convolution (32 channels, 3 x 3), relu, dense to the classes. Shapes as in `ConvNet`."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv = nn.Conv2d(channels, 32, 3)
        self.head = nn.Linear(32 * (height - 2) * (width - 2), classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        features: Tensor = self.conv(images).relu()
        logits: Tensor = self.head(features.flatten(1))
        return logits


NETWORKS: Mapping[str, Callable[[tuple[int, int, int], int], nn.Module]] = {"convnet": ConvNet, "small": SmallConvNet}
"""The classifiers by name: `"convnet"` is the usual one for digits, `"small"` the smallest that still learns."""


def build_network(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A fresh network, initialised from torch's global generator.

    Raises:
        UsageError: the name is unknown.
    """
    if name not in NETWORKS:
        raise UsageError(f"unknown network {name!r}; choose one of {', '.join(map(repr, NETWORKS))}.")
    return NETWORKS[name](shape, classes)
