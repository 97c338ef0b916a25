"""The workloads of `halfwise train`, untrained: networks, data and optimizer as there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from halfwise.core.workload import Workload
from halfwise.workloads.batches import digit_batches, passage_batches
from halfwise.workloads.datasets import load_data
from halfwise.workloads.settings import Settings
from halfwise.workloads.torch.kinds.data import tensors
from halfwise.workloads.torch.networks import build_network

__all__ = ["workload"]


def workload(name: str, seed: int = 0) -> Workload:
    """`"image"` or `"text"`."""
    torch.manual_seed(seed)
    settings = Settings.of(name)
    data = load_data(name, settings.data)
    model = build_network(settings.network, data)
    size = settings.batch_size
    arrays: Any = digit_batches(seed, size) if name == "image" else passage_batches(seed, size, data.train[0].shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    return Workload(model=model, batches=tensors(arrays), loss=_loss, optimizer=optimizer, name=name)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)
