"""A step of a generative adversarial network on digits, both losses in one closure: 12 layers."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, leaky_relu

from halfwise.core.workload import Workload
from halfwise.workloads.batches import digit_batches
from halfwise.workloads.torch.kinds.data import tensors

__all__ = ["Discriminator", "Gan", "Generator", "workload"]

Batch = tuple[Tensor, Tensor]


class Generator(nn.Module):
    """Noise to images: a dense layer and three transposed convolutions with batch norms."""

    def __init__(self, noise: int = 32, width: int = 64) -> None:
        super().__init__()
        self.dense = nn.Linear(noise, width * 4)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width // 2)
        self.conv1 = nn.ConvTranspose2d(width, width // 2, 4, stride=2, padding=1)
        self.conv2 = nn.ConvTranspose2d(width // 2, width // 2, 4, stride=2, padding=1)
        self.last = nn.Conv2d(width // 2, 1, 3, padding=1)

    def forward(self, noise: Tensor) -> Tensor:
        """(batch, noise) to (batch, 1, 8, 8) in (0, 1)."""
        x = self.norm1(self.dense(noise).view(len(noise), -1, 2, 2)).relu()
        x = self.norm2(self.conv1(x)).relu()
        images: Tensor = self.last(self.conv2(x).relu()).sigmoid()
        return images


class Discriminator(nn.Module):
    """Images to the logit of "real": four convolutions and two dense layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        channels = (1, width, width, 2 * width, 2 * width)
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=1 + index % 2, padding=1)
            for index, (before, after) in enumerate(itertools.pairwise(channels))
        )
        self.hidden, self.head = nn.Linear(2 * width * 4, 64), nn.Linear(64, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) to (batch,)."""
        x = images
        for conv in self.convs:
            x = leaky_relu(conv(x), 0.2)
        logits: Tensor = self.head(leaky_relu(self.hidden(x.flatten(1)), 0.2))[:, 0]
        return logits


class Gan(nn.Module):
    """Both networks; called with noise it generates."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Generator(), Discriminator()

    def forward(self, noise: Tensor) -> Tensor:
        """Images."""
        images: Tensor = self.generator(noise)
        return images


def workload(seed: int = 0, batch_size: int = 32) -> Workload:
    """Both networks with digits."""
    torch.manual_seed(seed)
    model = Gan()
    generator = torch.Generator().manual_seed(seed)
    batches = [
        (images, torch.randn(batch_size, 32, generator=generator))
        for images, _ in tensors(digit_batches(seed, batch_size))
    ]
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))
    return Workload(model=model, batches=batches, loss=_loss, optimizer=optimizer, name="gan")


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    """The discriminator's loss and the generator's: each reaches the weights of its own network only."""
    assert isinstance(model, Gan)
    images, noise = batch
    fake = model(noise)
    real_logits, fake_logits = model.discriminator(images), model.discriminator(fake.detach())
    fixed = {name: weight.detach() for name, weight in model.discriminator.named_parameters()}
    judged = functional_call(model.discriminator, fixed, (fake,))
    ones, zeros = torch.ones_like(real_logits), torch.zeros_like(fake_logits)
    return (
        binary_cross_entropy_with_logits(real_logits, ones)
        + binary_cross_entropy_with_logits(fake_logits, zeros)
        + binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
    )
