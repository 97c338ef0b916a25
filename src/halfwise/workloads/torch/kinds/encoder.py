"""A transformer encoder that classifies digits from 16 patches: 23 layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, unfold

from halfwise.core.workload import Workload
from halfwise.workloads.batches import digit_batches
from halfwise.workloads.torch.kinds.data import tensors

__all__ = ["Encoder", "workload"]


class Encoder(nn.Module):
    """Patches of 2 x 2, learned positions, transformer layers, a last norm, mean over the patches, a linear head."""

    def __init__(self, width: int = 96, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.positions = nn.Parameter(torch.randn(16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, (batch, classes)."""
        patches = unfold(images, 2, stride=2).transpose(1, 2)
        logits: Tensor = self.head(self.layers(self.patches(patches) + self.positions).mean(1))
        return logits


def workload(seed: int = 0, batch_size: int = 32) -> Workload:
    """The network with digits."""
    torch.manual_seed(seed)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = tensors(digit_batches(seed, batch_size))
    return Workload(model=model, batches=batches, loss=_loss, optimizer=optimizer, name="encoder")


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)
