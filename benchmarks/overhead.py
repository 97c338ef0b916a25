"""What `mp.step` and `watch` cost per training step, against a hand-written loop in the same precision.

Claim: at most 1.03 times the hand-written loop, on a small convnet and a 4-layer transformer, one thread,
sampled statistics included. Beside it stands the hand-written loop against itself, which is what the machine's
noise looks like. Weights of all loops of a precision are compared bit for bit at the end, so that only loops
that do the same work are compared.

    python benchmarks/overhead.py [--json] [--rounds 40] [--steps 10]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import halfwise.torch as hw
from _harness import emit, interleave, keep_freed_memory, medians, ratios, table
from halfwise.workloads.torch.networks import ConvNet

DTYPES = {"float32": torch.float32, "mixed_bfloat16": torch.bfloat16, "mixed_float16": torch.float16}


def convnet() -> tuple[nn.Module, Tensor, Tensor]:
    """The built-in image classifier at the size of MNIST."""
    return ConvNet((1, 28, 28), 10), torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    """Four encoder layers of width 128 on 8 sequences of 64."""
    layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True, norm_first=True) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 64, 10))
    return model, torch.randn(8, 64, 128), torch.randint(0, 10, (8,))


MODELS = {"convnet": convnet, "transformer": transformer}


class Loop:
    """A training loop on one batch, with its own copy of the model."""

    def __init__(
        self, make: Callable[[], tuple[nn.Module, Tensor, Tensor]], policy: str, kind: str, steps: int
    ) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.y = make()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.steps = steps
        self.dtype = DTYPES[policy]
        self.scaler = torch.amp.GradScaler("cpu", enabled=policy == "mixed_float16")
        self.generator = torch.Generator().manual_seed(1).get_state()
        if kind == "watch":
            self.watch = hw.watch(self.model, self.optimizer, self.scaler if policy == "mixed_float16" else None)
        self.mp = hw.MixedPrecision(self.model, self.optimizer, policy) if kind == "mp.step" else None

    def loss(self) -> Tensor:
        return nn.functional.cross_entropy(self.model(self.x), self.y)

    def __call__(self) -> None:
        torch.set_rng_state(self.generator)  # each loop has its own dropout masks, whoever ran before
        for _ in range(self.steps):
            if self.mp is not None:
                self.mp.step(self.loss)
                continue
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is not torch.float32):
                loss = self.loss()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.generator = torch.get_rng_state()


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="at most so long per row, in fewer rounds if need be"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of each loop in each round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hw.exponent_histogram(torch.ones(1000))  # the first statistics of a process load and compile their code
    rows, data = [], {}
    for model, make in MODELS.items():
        for policy in DTYPES:
            loops = {
                name: Loop(make, policy, name, arguments.steps)
                for name in ("hand-written", "hand-written again", "mp.step", "watch")
            }
            started = time.perf_counter()
            loops["hand-written"]()
            affordable = int(arguments.seconds / (len(loops) * (time.perf_counter() - started)))
            for name in list(loops)[1:]:
                loops[name]()
            seconds = interleave(loops, min(arguments.rounds, max(5, affordable)), warmup=1)
            reference = list(loops["hand-written"].model.parameters())
            for name, loop in loops.items():
                same = all(torch.equal(a, b) for a, b in zip(reference, loop.model.parameters(), strict=True))
                assert same, f"{model}, {policy}: {name} does other work than the hand-written loop"
            relative = ratios(seconds, "hand-written")
            totals = {name: sum(times) / sum(seconds["hand-written"]) for name, times in seconds.items()}
            step = medians(seconds)["hand-written"] / arguments.steps
            data[f"{model} {policy}"] = {"seconds_per_step": step, "ratio": relative, "ratio_of_totals": totals}
            rows.append(
                (
                    model,
                    policy,
                    step * 1e3,
                    *(relative[n] for n in list(loops)[1:]),
                    *(totals[n] for n in list(loops)[1:]),
                )
            )
    headers = ("model", "policy", "ms/step", "A/A", "mp.step", "watch", "total A/A", "total mp.step", "total watch")
    formatted = [(*row[:2], f"{row[2]:.2f}", *(f"{value:.3f}" for value in row[3:])) for row in rows]
    emit(table(headers, formatted), {"loops": data}, as_json=arguments.json)


if __name__ == "__main__":
    main()
