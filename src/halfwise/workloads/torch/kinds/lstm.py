"""Stacked LSTMs that tell whether a president spoke before 1920 or since: 14 layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from halfwise.core.workload import Workload
from halfwise.workloads.batches import passage_batches, vocabulary
from halfwise.workloads.torch.kinds.data import tensors

__all__ = ["StackedLSTM", "workload"]

_WORDS = 32


class StackedLSTM(nn.Module):
    """An embedding, LSTMs with layer norms and dense layers between, the last state, a linear head."""

    def __init__(self, words: int, classes: int, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstms = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.dense = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        """Logits, (batch, classes)."""
        x = self.embedding(words)
        for lstm, norm, dense in zip(self.lstms, self.norms, self.dense, strict=True):
            x = x + dense(norm(lstm(x)[0])).tanh()
        logits: Tensor = self.head(x[:, -1])
        return logits


def workload(seed: int = 0, batch_size: int = 16) -> Workload:
    """The network with passages."""
    torch.manual_seed(seed)
    batches = tensors(passage_batches(seed, batch_size, _WORDS))
    model = StackedLSTM(vocabulary(), classes=1 + max(int(labels.max()) for _, labels in batches))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model=model, batches=batches, loss=_loss, optimizer=optimizer, name="lstm")


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    words, labels = batch
    return cross_entropy(model(words), labels)
