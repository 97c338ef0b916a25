"""A convolutional classifier with batch norms, on digits: 13 layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from halfwise.core.workload import Workload
from halfwise.workloads.batches import digit_batches
from halfwise.workloads.torch.kinds.data import tensors

__all__ = ["ConvNet", "workload"]


class ConvNet(nn.Module):
    """Six convolutions, each with a batch norm, mean over the positions, a linear head."""

    def __init__(self, widths: tuple[int, ...] = (32, 32, 64, 64, 128, 128), classes: int = 10) -> None:
        super().__init__()
        channels = (1, *widths[:-1])
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1, bias=False) for before, after in zip(channels, widths, strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, (batch, classes)."""
        x = images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def workload(seed: int = 0, batch_size: int = 32) -> Workload:
    """The network with digits."""
    torch.manual_seed(seed)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = tensors(digit_batches(seed, batch_size))
    return Workload(model=model, batches=batches, loss=_loss, optimizer=optimizer, name="convnet")


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)
