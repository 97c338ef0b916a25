"""A decoder with a causal mask that foretells the next word of State of the Union passages: 22 layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from halfwise.core.workload import Workload
from halfwise.workloads.batches import passage_batches, vocabulary
from halfwise.workloads.torch.kinds.data import tensors

__all__ = ["Block", "Decoder", "workload"]

_WORDS = 24


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a layer norm, with residual connections."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, words, width) to the same."""
        batch, words, width = x.shape
        q, k, v = (
            part.view(batch, words, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        later = torch.ones(words, words, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, words, width))
        result: Tensor = x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))
        return result


class Decoder(nn.Module):
    """Embeddings of words and positions, blocks, a last norm, a head over the vocabulary."""

    def __init__(self, words: int, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Embedding(_WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Logits of the next word, (batch, words, vocabulary)."""
        x = self.embedding(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def workload(seed: int = 0, batch_size: int = 8) -> Workload:
    """The network with passages."""
    torch.manual_seed(seed)
    model = Decoder(vocabulary())
    batches = tensors(passage_batches(seed, batch_size, _WORDS + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model=model, batches=batches, loss=_loss, optimizer=optimizer, name="decoder")


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    words, _ = batch
    logits: Tensor = model(words[:, :-1])
    return cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten(), ignore_index=0)
