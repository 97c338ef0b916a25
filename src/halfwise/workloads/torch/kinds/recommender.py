"""A two-tower recommender whose weights are nearly all embeddings: 14 layers. The interactions are synthetic."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from halfwise.core.workload import Workload
from halfwise.workloads.batches import interaction_batches
from halfwise.workloads.torch.kinds.data import tensors

__all__ = ["TwoTowers", "workload"]

Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class Tower(nn.Module):
    """Embeddings of an identity and of a category, dense layers, a layer norm."""

    def __init__(self, identities: int, categories: int, width: int) -> None:
        super().__init__()
        self.identity = nn.Embedding(identities, width)
        self.category = nn.Embedding(categories, width)
        self.dense = nn.ModuleList([nn.Linear(2 * width, width), nn.Linear(width, width)])
        self.norm = nn.LayerNorm(width)

    def forward(self, identity: Tensor, category: Tensor) -> Tensor:
        """(batch,) twice to (batch, width)."""
        x = torch.cat([self.identity(identity), self.category(category)], 1)
        for dense in self.dense:
            x = dense(x).relu()
        result: Tensor = self.norm(x)
        return result


class TwoTowers(nn.Module):
    """A tower for users, one for items, and dense layers on their product."""

    def __init__(self, users: int = 20_000, items: int = 20_000, categories: int = 200, width: int = 32) -> None:
        super().__init__()
        self.user, self.item = Tower(users, categories, width), Tower(items, categories, width)
        self.dense = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.head = nn.Linear(width, 1)

    def forward(self, user: Tensor, item: Tensor, category: Tensor) -> Tensor:
        """Logits of "the user takes the item", (batch,)."""
        x = self.user(user, category) * self.item(item, category)
        for dense in self.dense:
            x = x + dense(x).relu()
        logits: Tensor = self.head(x)[:, 0]
        return logits


def workload(seed: int = 0, batch_size: int = 512) -> Workload:
    """The network with interactions."""
    torch.manual_seed(seed)
    model = TwoTowers()
    batches = tensors(interaction_batches(seed, batch_size))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model=model, batches=batches, loss=_loss, optimizer=optimizer, name="recommender")


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    user, item, category, taken = batch
    return binary_cross_entropy_with_logits(model(user, item, category), taken)
