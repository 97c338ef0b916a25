"""The planted cases in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from _planted_cases import BEYOND, FIRST_POSITION, KEY_OFFSET, OFFSET, SHARPER, SQUARES_BEYOND, TINY, Case, Trouble
from halfwise.core.workload import Workload
from halfwise.torch.names import named_layers
from halfwise.torch.nested import floating_tensors
from halfwise.workloads.load import load_workload

__all__ = ["plant", "planted"]


def planted(case: Case, seed: int = 0) -> tuple[Workload, str]:
    """The model of the case, and the path of the layer that has the trouble."""
    workload = load_workload(case.kind, seed=seed)
    return workload, plant(workload, case.torch, case.trouble)


def plant(workload: Workload, path: str, trouble: Trouble) -> str:
    """Puts the trouble into the layer; gives the path of the one that has it."""
    model = workload.model
    parent, _, name = path.rpartition(".")
    holder, layer = model.get_submodule(parent), model.get_submodule(path)
    around = _AROUND[trouble](layer, _Seen(workload, layer))
    setattr(holder, name, around)
    return next(found for found, module in named_layers(model) if module is around.troubled)


class _Seen:
    """What a layer gets and gives in the first batch."""

    def __init__(self, workload: Workload, layer: nn.Module) -> None:
        self._largest, self._size = [0.0, 0.0], [0.0, 0.0]
        handle = layer.register_forward_hook(self._note)
        with torch.no_grad():
            workload.loss(workload.model, workload.batches[0])
        handle.remove()
        self.largest_input, self.largest_output = self._largest
        self.typical_input = self._size[0]

    def _note(self, _: nn.Module, args: tuple[object, ...], output: object) -> None:
        for place, value in enumerate((args, output)):
            for tensor in floating_tensors(value):
                self._largest[place] = max(self._largest[place], float(tensor.abs().max()))
                self._size[place] = max(self._size[place], float(tensor.square().mean().sqrt()))


class Around(nn.Module):
    """Stands in a layer's place and calls it, with something done before and behind it."""

    def __init__(
        self,
        layer: nn.Module,
        before: Callable[[Tensor], Tensor] | None = None,
        behind: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.before, self.behind = before, behind

    @property
    def troubled(self) -> nn.Module:
        """The layer that has the trouble."""
        return self.layer

    def forward(self, x: Tensor) -> Tensor:
        """The layer's."""
        y: Tensor = self.layer(x if self.before is None else self.before(x))
        return y if self.behind is None else self.behind(y)


def _overflow(layer: nn.Module, seen: _Seen) -> Around:
    """Inputs and outputs are so many times larger; the weights, and their gradients, are as they were."""
    scale = 2.0 ** math.ceil(math.log2(BEYOND / seen.largest_output))
    with torch.no_grad():
        if isinstance(layer.bias, Tensor):
            layer.bias.mul_(scale)
    return Around(layer, partial(_times, scale), partial(_times, 1.0 / scale))


def _tiny_gradients(layer: nn.Module, _: _Seen) -> Around:
    return Around(layer, behind=_with_tiny_gradient)


def _outlier_channels(layer: nn.Module, _: _Seen) -> Around:
    """Some channels stand far from zero, which is taken off again behind."""
    assert isinstance(layer.bias, Tensor)
    offset = torch.zeros_like(layer.bias).index_fill_(0, torch.arange(0, len(layer.bias), 4), OFFSET)
    with torch.no_grad():
        layer.bias.add_(offset)
    return Around(layer, behind=partial(_minus_in_channels, offset))


def _large_logits(layer: nn.Module, _: _Seen) -> Around | MultiheadAttention:
    """All logits of a softmax are so much larger, which it does not see."""
    if isinstance(layer, nn.MultiheadAttention):
        return MultiheadAttention(layer)
    assert isinstance(layer.bias, Tensor)
    with torch.no_grad():
        layer.bias.add_(OFFSET)
    return Around(layer)


def _hand_written_norm(layer: nn.Module, seen: _Seen) -> Around:
    scale = 2.0 ** round(math.log2(SQUARES_BEYOND / seen.typical_input))
    return Around(HandWrittenNorm(layer), partial(_times_in_its_dtype, scale))


def _large_positions(layer: nn.Module, _: _Seen) -> Around:
    return WithPositions(layer)


_AROUND: dict[Trouble, Callable[[nn.Module, _Seen], Around | MultiheadAttention]] = {
    "overflow": _overflow,
    "tiny gradients": _tiny_gradients,
    "outlier channels": _outlier_channels,
    "large logits": _large_logits,
    "hand-written norm": _hand_written_norm,
    "large positions": _large_positions,
}


class MultiheadAttention(nn.MultiheadAttention):
    """Sharp attention whose keys have an offset: a query's scores all move by the same, which softmax does not see."""

    def __init__(self, healthy: nn.MultiheadAttention) -> None:
        super().__init__(healthy.embed_dim, healthy.num_heads, healthy.dropout, batch_first=healthy.batch_first)
        self.load_state_dict(healthy.state_dict())
        with torch.no_grad():
            self.in_proj_weight[: 2 * self.embed_dim].mul_(SHARPER)
            self.in_proj_bias[self.embed_dim : 2 * self.embed_dim].add_(2.0 * KEY_OFFSET)  # scores stay in float32

    @property
    def troubled(self) -> nn.Module:
        """The layer that has the trouble."""
        return self


class HandWrittenNorm(nn.Module):
    """A layer norm, or group norm, as people write it, with squares that do not fit float16."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        assert isinstance(norm, nn.LayerNorm | nn.GroupNorm)
        self.groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else 0
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        """In the shape of `x`."""
        grouped = x.unflatten(1, (self.groups, -1)) if self.groups else x
        dims = tuple(range(2, grouped.dim())) if self.groups else (-1,)
        centred = grouped - grouped.mean(dims, keepdim=True)
        normed = centred * torch.rsqrt((centred * centred).mean(dims, keepdim=True) + 1e-5)
        shape = (-1, *(1,) * (x.dim() - 2)) if self.groups else (-1,)
        return normed.view_as(x) * self.weight.view(shape) + self.bias.view(shape)


class WithPositions(Around):
    """Adds to what a layer gives something that depends on positions far along."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        width = layer.out_features if isinstance(layer, nn.Linear) else layer.embedding_dim
        assert isinstance(width, int)
        self.far = Positions(width)

    @property
    def troubled(self) -> nn.Module:
        """The layer that has the trouble."""
        return self.far

    def forward(self, x: Tensor) -> Tensor:
        """The layer's, and the positions'."""
        y: Tensor = self.layer(x)
        result: Tensor = y + self.far(
            FIRST_POSITION + torch.arange(y.shape[1], device=y.device, dtype=torch.float32)[:, None]
        )
        return result


class Positions(nn.Module):
    """Sines of positions at several frequencies, the angles by a matrix product, as rotary embeddings have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        frequencies = torch.logspace(-2.0, 0.0, width)[None]
        self.frequencies = nn.Parameter(frequencies, requires_grad=False)
        self.weight = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, positions: Tensor) -> Tensor:
        """(positions, 1) to (positions, width)."""
        angles: Tensor = positions @ self.frequencies
        return torch.sin(angles) * self.weight


def _times(scale: float, x: Tensor) -> Tensor:
    return x.float() * scale


def _times_in_its_dtype(scale: float, x: Tensor) -> Tensor:
    return x * scale


def _with_tiny_gradient(y: Tensor) -> Tensor:
    fixed = y.float().detach()
    return fixed + TINY * (y.float() - fixed)


def _minus_in_channels(offset: Tensor, y: Tensor) -> Tensor:
    channels_last = y.dim() < 4
    return y.float() - (offset if channels_last else offset[:, None, None])
