"""A U-Net block of a diffusion model, which foretells the noise in noisy digits: 18 layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate, mse_loss, silu

from halfwise.core.workload import Workload
from halfwise.workloads.batches import noisy_batches
from halfwise.workloads.torch.kinds.data import tensors

__all__ = ["UNet", "workload"]

Batch = tuple[Tensor, Tensor, Tensor]


class Residual(nn.Module):
    """Two convolutions behind group norms, with the time added between, and a residual connection."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, before), nn.GroupNorm(8, after)
        self.conv1, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """(batch, before, height, width) to (batch, after, height, width)."""
        hidden = self.conv1(silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        result: Tensor = self.conv2(silu(self.norm2(hidden))) + self.skip(x)
        return result


class UNet(nn.Module):
    """Down once, attention at the bottom, up again beside what came down."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = Residual(width, 2 * width, 2 * width)
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.up = Residual(3 * width, width, 2 * width)
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        """The noise, in the images' shape; `time` is (batch,) in [0, 1)."""
        frequencies = torch.exp(torch.linspace(0.0, math.log(1000.0), self.width // 2, device=time.device))
        angles = time[:, None] * frequencies
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        first = self.first(images)
        x = self.down(avg_pool2d(first, 2), embedded)
        places = x.flatten(2).transpose(1, 2)
        x = x + self.attention(places, places, places, need_weights=False)[0].transpose(1, 2).view_as(x)
        x = self.up(torch.cat([interpolate(x, scale_factor=2.0), first], 1), embedded)
        noise: Tensor = self.last(silu(self.norm(x)))
        return noise


def workload(seed: int = 0, batch_size: int = 16) -> Workload:
    """The network with digits to which noise was added."""
    torch.manual_seed(seed)
    model = UNet()
    batches = tensors(noisy_batches(seed, batch_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model=model, batches=batches, loss=_loss, optimizer=optimizer, name="unet")


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    images, time, noise = batch
    return mse_loss(model(images, time), noise)
