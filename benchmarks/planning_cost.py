"""What planning costs, in units of a plain float32 training step, and what it is spent on.

Claim: at most 25 steps, for networks of 10 and of 100 layers alike. What is counted is all that `"auto"` does besides
training: counting exponents, timing layers, looking at their sensitivities, trying the plan. The steps in which the
evidence is gathered are training steps and are not counted; a step is timed before and after, in the same process.
The time that loading libraries takes (numba, scipy) is not planning either: one plan is made before.

    python benchmarks/planning_cost.py [--json] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _harness import emit, keep_freed_memory, table
from halfwise.core.planner import EVIDENCE_STEPS
from halfwise.torch.evidence import Evidence, WholeStep
from halfwise.torch.measure import timed_layers
from halfwise.torch.snapshot import rehearsal

HEADERS = ("network", "layers", "ms/step", "ranges", "times", "sensitivities", "trial", "choice", "all", "answer")
LIMIT = 25.0


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    planned(*NETWORKS["10 dense of 256"]())
    rows = []
    for name, make in NETWORKS.items():
        torch.manual_seed(0)
        runs = [planned(*make()) for _ in range(arguments.rounds)]
        spent = {what: statistics.median(run[what] for run in runs) for what in runs[0] if what != "answer"}
        rows.append({"network": name, **spent, "answer": runs[-1]["answer"]})
    shown = [
        [row["network"], int(row["layers"]), *(f"{row[h]:.2f}" for h in HEADERS[2:-1]), row["answer"]] for row in rows
    ]
    emit(table(HEADERS, shown), {"rows": rows}, as_json=arguments.json)
    assert all(row["all"] <= LIMIT for row in rows), f"planning takes more than {LIMIT:g} steps"


def planned(model: nn.Module, batch: Callable[[], Tensor]) -> dict[str, Any]:
    """What planning took, in steps, by what it was spent on."""
    before = _step_seconds(model, batch)
    evidence = Evidence(model, tolerance=0.1, timing=None)
    for _ in range(EVIDENCE_STEPS):
        with rehearsal(model), evidence.observing():
            loss = batch()
            loss.backward()
            evidence.record_gradients()
            evidence.add_step(float(loss.detach()))
    start = time.perf_counter()
    plan = evidence.plan(WholeStep(model, (batch,)))
    choice = time.perf_counter() - start - evidence.spent["trial"]
    step = min(before, _step_seconds(model, batch))
    spent = {what: seconds / step for what, seconds in {**evidence.spent, "choice": choice}.items()}
    half = sum(rule.compute != "float32" for rule in plan.layers)
    layers = len(timed_layers(model))
    answer = "float32" if plan.default.compute == "float32" else f"{plan.default.compute} in {half}"
    return {"layers": layers, "ms/step": step * 1e3, **spent, "all": sum(spent.values()), "answer": answer}


def _step_seconds(model: nn.Module, batch: Callable[[], Tensor]) -> float:
    """The median of plain float32 steps, optimizer included."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    seconds = []
    for _ in range(12):
        start = time.perf_counter()
        optimizer.zero_grad()
        batch().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def dense(depth: int, width: int, rows: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    x, y = torch.randn(rows, width), torch.randint(0, 10, (rows,))
    return model, lambda: cross_entropy(model(x), y)


def convnet() -> tuple[nn.Module, Callable[[], Tensor]]:
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 32, 64, 64, 128):
        layers += [
            nn.Conv2d(channels, width, 3, stride=1 + (width != channels), padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    return model, lambda: cross_entropy(model(x), y)


def transformer() -> tuple[nn.Module, Callable[[], Tensor]]:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    body = nn.TransformerEncoder(layer, 20, enable_nested_tensor=False)
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(64 * 32, 10))
    x, y = torch.randn(8, 32, 64), torch.randint(0, 10, (8,))
    return model, lambda: cross_entropy(model(x), y)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Callable[[], Tensor]]]] = {
    "10 dense of 256": lambda: dense(10, 256, 64),
    "100 dense of 256": lambda: dense(100, 256, 64),
    "10 dense of 64": lambda: dense(10, 64, 64),
    "100 dense of 64": lambda: dense(100, 64, 64),
    "convnet": convnet,
    "20-layer transformer": transformer,
}


if __name__ == "__main__":
    main()
