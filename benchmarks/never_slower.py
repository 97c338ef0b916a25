"""Whether the plan that `"auto"` chooses on this device is ever slower than float32, for each built-in workload.

Three precisions take turns on the same model and batch: plain float32, the chosen plan (`hw.apply`), and plain autocast
in bfloat16 for comparison. Claim: the plan takes at most 1.02 times the float32 time. Where the answer is float32 the
two are the same computation; "A/A", float32 against itself, shows the machine's noise. `ONEDNN_MAX_CPU_ISA=AVX2` before
the command takes a CPU's half-precision units away.

    python benchmarks/never_slower.py [--json] [--rounds 30] [--workloads image,convnet,...]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

import halfwise.torch as hw
from _harness import emit, keep_freed_memory, medians, ratios, table
from halfwise.core.workload import Workload
from halfwise.workloads.load import BUILT_IN, load_workload

HEADERS = ("workload", "answer", "ms/step", "A/A", "plan", "bfloat16 autocast")
LIMIT = 1.02
TURN = 0.05  # seconds


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workloads", default=",".join(BUILT_IN))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(name, arguments.rounds) for name in arguments.workloads.split(",")]
    shown = [(*row[:2], f"{row[2]:.2f}", *map(told, row[3:])) for row in rows]
    emit(table(HEADERS, shown), {"rows": rows}, as_json=arguments.json)
    slow = [row[0] for row in rows if row[4] > LIMIT]
    assert not slow, f"the plan is slower than float32: {slow}"


def told(ratio: float | None) -> str:
    """For the table."""
    return "does not run" if ratio is None else f"{ratio:.3f}"


def measured(name: str, rounds: int) -> list[Any]:
    """Workload, answer, milliseconds of a float32 step, ratios; None where a precision does not run here."""
    workload = load_workload(name)
    plan = hw.plan(workload.model, [partial(workload.loss, workload.model, batch) for batch in workload.batches])
    half = sum(rule.compute != "float32" for rule in plan.layers)
    default = plan.default.compute
    answer = "float32" if default == "float32" else f"{default} in {half} of {len(plan.layers)}"
    step = training_step(workload)
    regions: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "float32": nullcontext,
        "again": nullcontext,
        "plan": partial(hw.apply, workload.model, plan),
        "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    }
    regions = {what: region for what, region in regions.items() if what != "autocast" or runs(step, region)}
    seconds = taking_turns(step, regions, rounds)
    relative = ratios(seconds, "float32")
    shown = relative["again"], relative["plan"], relative.get("autocast")
    return [name, answer, medians(seconds)["float32"] * 1e3, *shown]


def training_step(workload: Workload) -> Callable[[], None]:
    """One step on the first batch."""
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-4)
    batch = workload.batches[0]

    def run() -> None:
        optimizer.zero_grad()
        loss = workload.loss(workload.model, batch)
        loss.backward()
        optimizer.step()

    return run


def runs(step: Callable[[], None], region: Callable[[], AbstractContextManager[Any]]) -> bool:
    """Whether the step runs at all in a precision: some kernels do not exist on some processors."""
    try:
        with region():
            step()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def taking_turns(
    step: Callable[[], None], regions: Mapping[str, Callable[[], AbstractContextManager[Any]]], rounds: int
) -> dict[str, list[float]]:
    """Seconds per step in each region and round, all on the same model in the same memory.

    A turn lasts a few hundredths of a second at least; its first step, after the change, is not measured.
    """
    start = time.perf_counter()
    for _ in range(3):
        step()
    steps = max(2, math.ceil(3 * TURN / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {what: [] for what in regions}
    for number in range(-1, rounds):
        order = list(regions.items())
        for what, region in order if number % 2 else reversed(order):
            with region():
                step()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                elapsed = (time.perf_counter() - start) / steps
            if number >= 0:
                seconds[what].append(elapsed)
    return seconds


if __name__ == "__main__":
    main()
