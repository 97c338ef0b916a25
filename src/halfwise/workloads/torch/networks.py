"""The classifiers in PyTorch. They return logits of shape (batch, classes)."""

from __future__ import annotations

from torch import Tensor, nn

from halfwise.workloads.datasets import Dataset
from halfwise.workloads.image_data import ImageData
from halfwise.workloads.text_data import PADDING, TextData

__all__ = ["ConvNet", "EmbeddingBag", "SmallConvNet", "build_network"]


class ConvNet(nn.Module):
    """Convolution (32 channels, 3 x 3), relu, max-pooling 2 x 2, dense 128, relu, dense to the classes.

    Images have shape (batch, channels, height, width).
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
    """Convolution (32 channels, 3 x 3), relu, dense to the classes. Images as in `ConvNet`."""

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


class EmbeddingBag(nn.Module):
    """Embedding of width 64, mean over the words that are no padding, dense to the classes.

    Words are integers in [0, word_numbers), shape (batch, words), 0 for padding.
    """

    def __init__(self, word_numbers: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(word_numbers, 64, padding_idx=PADDING)
        self.head = nn.Linear(64, classes)

    def forward(self, words: Tensor) -> Tensor:
        """The logits."""
        present = (words != PADDING).unsqueeze(-1)
        mean: Tensor = (self.embedding(words) * present).sum(1) / present.sum(1)
        logits: Tensor = self.head(mean)
        return logits


def build_network(name: str, data: Dataset) -> nn.Module:
    """A fresh network for `data`, initialised from torch's global generator.

    Args:
        name: one of `halfwise.workloads.settings.NETWORKS`.
        data: gives the inputs' shape and the number of classes.
    """
    match name, data:
        case "convnet", ImageData():
            return ConvNet(data.shape, data.classes)
        case "small", ImageData():
            return SmallConvNet(data.shape, data.classes)
        case "embedding_bag", TextData():
            return EmbeddingBag(data.word_numbers, data.classes)
    raise ValueError(f"no network {name!r} for {type(data).__name__}")
