"""How long healing takes: from the decision to localise to the retried batch, in steps' worth of time.

Claim: at most 6 steps, for a planted float16 overflow in a middle layer; exactly that layer is named and demoted.

    python benchmarks/healing.py [--json] [--repeats 15]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

import halfwise.torch as hw
from _harness import emit, keep_freed_memory, table


class SixLayers(nn.Module):
    """The third layer has inputs of 60, and will get weights of 40."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            if number == 2:
                x = 60 * torch.sigmoid(x + 3)
            x = torch.relu(norm(layer(x)))
        return x


class Transformer(nn.Module):
    """Four encoder layers, before the third a projection of inputs of 60, which will get weights of 40."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.hot, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 2:
                x = self.norm(self.hot(60 * torch.sigmoid(x + 3)))
            x = layer(x)
        return x


_HEALTHY = 6  # steps before the failure


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "6 layers of 64": (lambda: SixLayers(64), (64, 64), "layers.2"),
    "6 layers of 512": (lambda: SixLayers(512), (64, 512), "layers.2"),
    "4-layer transformer": (Transformer, (8, 32, 64), "hot"),
}


def healing(make: Callable[[], nn.Module], shape: tuple[int, ...], planted: str) -> tuple[float, float]:
    """`(seconds of a step before the failure, seconds from the decision to localise to the end of the healed step)`."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    plan = hw.Plan.manual(default="float16", loss_scale=hw.LossScaleSettings(initial=1.0))
    with hw.MixedPrecision(model, optimizer, plan, log=lambda _: None) as mp:
        seconds = []
        for number in range(12):
            if number == _HEALTHY:
                nn.init.normal_(model.get_parameter(f"{planted}.weight"), mean=40.0)
            start = time.perf_counter()
            result = mp.step(lambda: model(x).float().square().mean())
            seconds.append(time.perf_counter() - start)
            assert result.applied
            assert result.retries == (1 if number == _HEALTHY else 0)
        assert mp.plan is not None
        assert [incident.module for incident in mp.incidents] == [planted], mp.incidents
        assert [rule.path for rule in mp.plan.layers] == [planted]
    step = median(seconds[1:_HEALTHY])
    return step, seconds[_HEALTHY] - step  # less the attempt that failed


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, data = [], {}
    for name, (make, shape, planted) in CASES.items():
        healing(make, shape, planted)  # the first trace imports what it needs
        found = [healing(make, shape, planted) for _ in range(arguments.repeats)]
        steps = median(heal / step for step, heal in found)
        data[name] = {"seconds_per_step": median(step for step, _ in found), "steps": steps}
        rows.append((name, median(step for step, _ in found) * 1e3, steps))
    emit(table(("network", "ms/step", "healing in steps"), rows), {"healing": data}, as_json=arguments.json)


if __name__ == "__main__":
    main()
