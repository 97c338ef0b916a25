"""Models that a preflight must judge: those that would fail on a GPU, with what is wrong with them, and sound ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["HAZARDOUS", "SOUND", "Case"]

Closure = Callable[[], Any]
Made = tuple[nn.Module, Closure]


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: for people.
        make: gives the model and a closure.
        kind: the hazard that it has; `""` where it is sound.
        module: the module that has it.
        policy: what it is to be trained in.
        target: the hardware that it is to be trained on.
    """

    name: str
    make: Callable[[], Made]
    kind: str = ""
    module: str = ""
    policy: str = "mixed_float16"
    target: str = "cuda:ampere"


class Stack(nn.Module):
    """Three layers; what is in the middle may be anything."""

    def __init__(self, middle: nn.Module, width: int = 16, outputs: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.middle = middle
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.middle(torch.tanh(self.stem(x))))
        return y


def _classify(model: nn.Module, *shape: int, classes: int = 4) -> Made:
    x, y = torch.randn(*shape), torch.randint(0, classes, shape[:1])
    return model, lambda: functional.cross_entropy(model(x), y)


# --- hazards --------------------------------------------------------------------------------------------------------


class Saturated(nn.Module):
    """A linear layer whose inputs are all about 60 and whose weights are about 20."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(64, 16)
        nn.init.normal_(self.projection.weight, mean=20.0)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.projection(60 + x.repeat(1, 4)))
        return y


class HandWrittenVariance(nn.Module):
    """Appends the spread of features in the hundreds, from squares, which autocast leaves in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        centred = 600 * (x - x.mean(-1, keepdim=True))
        return x + torch.sqrt((centred * centred).mean(-1, keepdim=True)) / 600


class HandWrittenNorm(nn.Module):
    """An RMS norm without the cast to float32: at 300 its output is 0."""

    def forward(self, x: Tensor) -> Tensor:
        x = 300 + 0.1 * x
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-3) * (1 + x / 300)


class LostEpsilon(nn.Module):
    """Entropy of gates that are protected by an epsilon which float16 does not have."""

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(12 * x)
        return x + gate * torch.log(gate + 1e-8)


class Attention(nn.Module):
    """One head; how hidden positions are masked is the question."""

    def __init__(self, width: int, fill: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.fill = fill

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / math.sqrt(x.shape[-1])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y: Tensor = torch.softmax(self.fill(scores, hidden), -1) @ self.value(x)
        return y


class SequenceModel(nn.Module):
    """Something between an embedding of numbers and a mean over positions."""

    def __init__(self, mixer: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.mixer = mixer
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        y: Tensor = self.head((h + self.mixer(h)).mean(1))
        return y


class HiddenRows(Attention):
    """The first row sees nothing but itself, and itself is hidden too: uniform in float32, NaN where -1e6 is -inf."""

    def __init__(self, width: int) -> None:
        super().__init__(width, lambda scores, hidden: scores + _hide_a_row(hidden).to(scores) * -1e6)


def _hide_a_row(hidden: Tensor) -> Tensor:
    return hidden | (hidden.sum(-1, keepdim=True) == hidden.shape[-1] - 1)


class Rotary(nn.Module):
    """Angles of positions in a long document, multiplied out by a matmul, which autocast does in half."""

    frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 0.3 ** torch.arange(width // 2, dtype=torch.float32))
        self.start = 40_000

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(self.start, self.start + x.shape[1], dtype=torch.float32)
        angles = positions[:, None] @ self.frequencies[None, :]
        return x * torch.cat([torch.sin(angles), torch.cos(angles)], -1)


class RotaryAttention(nn.Module):
    """Attention over rotated queries and keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rotary = Rotary(width)
        self.attention = Attention(width, lambda scores, hidden: scores.masked_fill(hidden, -math.inf))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(self.rotary(x))
        return y


class _Scale(torch.autograd.Function):
    """y = x w with a gradient of its own, written for float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class CustomLayer(nn.Module):
    """Calls a custom function."""

    def __init__(self, function: Any, width: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(width, width) / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function.apply(x, self.weight)
        return y


class Whitening(nn.Module):
    """Solves a linear system, for which there is no kernel in half."""

    def forward(self, x: Tensor) -> Tensor:
        covariance = x.t() @ x / len(x) + torch.eye(x.shape[1], dtype=x.dtype)
        y: Tensor = torch.linalg.solve(covariance, x.t()).t()
        return y


class Tiny(nn.Module):
    """Features brought to the size of 1e-9 and back: float16 has no such gradients, nor such values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x) * 1e-12
        return y


def _overflow() -> Made:
    return _classify(Stack(Saturated()), 32, 8)


def _penalty() -> Made:
    model = Stack(nn.Tanh())
    nn.init.constant_(model.head.bias, 300.0)
    x = torch.randn(32, 8)

    def closure() -> Tensor:
        y: Tensor = model(x)
        return (y * y).mean() * 1e-4

    return model, closure


def _bce() -> Made:
    model = Stack(nn.Tanh(), outputs=1)
    x, y = torch.randn(32, 8), torch.rand(32, 1)
    return model, lambda: functional.binary_cross_entropy(torch.sigmoid(model(x)), y)


def _half_weights() -> Made:
    model = Stack(nn.Linear(16, 16))
    model.middle.bfloat16()
    return _classify(model, 32, 8)


def _mask_that_does_not_fit() -> Made:
    return _classify(SequenceModel(Attention(16, lambda s, hidden: s.masked_fill(hidden, -1e9))), 8, 6, 4)


def _vanishing() -> Made:
    model = Stack(Tiny(16))
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    return model, lambda: 1e4 * functional.mse_loss(model(x), y)


HAZARDOUS = (
    Case("a linear layer overflows", _overflow, "overflow", "middle.projection"),
    Case("variance by hand", lambda: _classify(Stack(HandWrittenVariance()), 32, 8), "overflow", "middle"),
    Case("squares in the loss", _penalty, "overflow", ""),
    Case("RMS norm by hand", lambda: _classify(Stack(HandWrittenNorm()), 32, 8), "dead_output", "middle"),
    Case("an epsilon that is 0", lambda: _classify(Stack(LostEpsilon()), 32, 8), "epsilon", "middle"),
    Case("a mask of -1e9", _mask_that_does_not_fit, "mask", "mixer"),
    Case("hidden rows", lambda: _classify(SequenceModel(HiddenRows(16)), 8, 6, 4), "mask", "mixer"),
    Case(
        "positions at 40,000",
        lambda: _classify(SequenceModel(RotaryAttention(16)), 8, 24, 4),
        "precision",
        "mixer.rotary",
    ),
    Case("binary cross entropy", _bce, "unsupported", ""),
    Case("weights in bfloat16", _half_weights, "half_weights", "middle", policy="mixed_bfloat16"),
    Case("a custom function", lambda: _classify(Stack(CustomLayer(_Scale, 16)), 32, 8), "custom_function", "middle"),
    Case("no kernel in half", lambda: _classify(Stack(Whitening()), 32, 8), "unsupported", "middle"),
    Case("tiny gradients", _vanishing, "vanishing", "middle"),
    Case(
        "units that are missing",
        lambda: _classify(Stack(nn.Tanh()), 32, 8),
        "not_native",
        "",
        "mixed_bfloat16",
        "cuda:volta",
    ),
)
"""Each has one hazard."""


# --- sound models ---------------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.features(x).flatten(1))
        return y


class Encoder(nn.Module):
    """Two encoder layers with dropout, BERT's epsilon in their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, layer_norm_eps=1e-12)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(self.embed(tokens)).mean(1))
        return y


class Decoder(nn.Module):
    """Next-token prediction with a causal mask of -inf, and the embedding's weights in the head."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.full((length, length), -math.inf).triu(1)
        h = self.tokens(tokens) + self.positions(torch.arange(length))
        for block in self.blocks:
            h = checkpoint(block, h, mask, use_reentrant=False) if self.recompute else block(h, mask)
        y: Tensor = self.head(self.norm(h))
        return y


class Recurrent(nn.Module):
    """An LSTM over random walks."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x)[0][:, -1])
        return y


class TwoTowers(nn.Module):
    """Dot products of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(200, 16), nn.Embedding(300, 16)
        self.tower = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        y: Tensor = (self.tower(self.users(users)) * self.tower(self.items(items))).sum(-1)
        return y


class Denoiser(nn.Module):
    """A U-Net of one level: time embedding, group norm, attention, skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.enter = nn.Conv2d(1, 16, 3, padding=1)
        self.down = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.leave = nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 1, 3, padding=1))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        angles = time[:, None] * frequencies
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        first = self.enter(x)
        h = self.down(first + embedded[:, :, None, None])
        flat = h.flatten(2).transpose(1, 2)
        h = h + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).reshape(h.shape)
        y: Tensor = self.leave(torch.cat([first, self.up(h)], 1))
        return y


class LargeLogits(nn.Module):
    """Logits in the tens of thousands: they fit float16, which holds 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        nn.init.uniform_(self.head.weight, -4000.0, 4000.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.body(x)))
        return y


class Noisy(nn.Module):
    """Adds noise of its own, as variational autoencoders do, and drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.mean(x), self.spread(x)
        h = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        y: Tensor = self.head(functional.dropout(torch.relu(h), 0.5))
        return y


class _CastScale(torch.autograd.Function):
    """As `_Scale`, and it knows of autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        ctx.save_for_backward(x.to(y.dtype), weight.to(y.dtype))
        return y

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Adversaries(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def _decoder(*, recompute: bool = False) -> Made:
    model, tokens = Decoder(recompute=recompute), torch.randint(0, 50, (8, 13))
    return model, lambda: functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _encoder() -> Made:
    model, tokens, labels = Encoder(), torch.randint(0, 50, (16, 12)), torch.randint(0, 4, (16,))
    return model, lambda: functional.cross_entropy(model(tokens), labels)


def _towers() -> Made:
    model, users, items = TwoTowers(), torch.randint(0, 200, (64,)), torch.randint(0, 300, (64,))
    clicks = torch.randint(0, 2, (64,)).float()
    return model, lambda: functional.binary_cross_entropy_with_logits(model(users, items), clicks)


def _denoiser() -> Made:
    model, clean = Denoiser(), torch.randn(8, 1, 8, 8)
    time = torch.randint(0, 1000, (8,)).float()

    def closure() -> Tensor:
        noise = torch.randn_like(clean)
        share = (time / 1000)[:, None, None, None]
        return functional.mse_loss(model((1 - share).sqrt() * clean + share.sqrt() * noise, time), noise)

    return model, closure


def _adversaries() -> Made:
    model, real = Adversaries(), torch.randn(32, 16)

    def closure() -> Tensor:
        fake = model.generator(torch.randn(32, 8))
        told_real, told_fake = model.discriminator(real), model.discriminator(fake.detach())
        critic = functional.softplus(-told_real).mean() + functional.softplus(told_fake).mean()
        return critic + functional.softplus(-model.discriminator(fake)).mean()

    return model, closure


def _large_logits() -> Made:
    model = LargeLogits()
    x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
    return model, lambda: functional.cross_entropy(model(x), y)


def _residual() -> Made:
    blocks = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(6))

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks, self.head = nn.Linear(8, 16), nn.ModuleList(blocks), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            for block in self.blocks:
                h = h + block(h)
            y: Tensor = self.head(h)
            return y

    return _classify(Residual(), 32, 8)


SOUND = (
    Case("convnet with batch norm", lambda: _classify(ConvNet(), 8, 3, 12, 12)),
    Case("transformer encoder", _encoder),
    Case("causal decoder, -inf mask, tied weights", _decoder),
    Case("decoder, checkpointed", lambda: _decoder(recompute=True)),
    Case("LSTM", lambda: _classify(Recurrent(), 16, 10, 4)),
    Case("recommender with embeddings", _towers),
    Case("diffusion U-Net block", _denoiser),
    Case("GAN step", _adversaries),
    Case("large logits that fit", _large_logits),
    Case("noise and dropout", lambda: _classify(Noisy(), 32, 8)),
    Case("custom function that knows autocast", lambda: _classify(Stack(CustomLayer(_CastScale, 16)), 32, 8)),
    Case("deep residual network", _residual),
)
"""Nothing is wrong with these, in any precision."""
