"""Whether the plan that `"auto"` chooses on this device is ever slower than float32, for each built-in workload.

Three steps take turns on copies of the same model and the same batches: plain float32, the chosen plan (`hw.apply`),
and plain autocast in bfloat16 for comparison. Claim: the plan takes at most 1.02 times the float32 time. Where the
answer is float32 the two are the same computation, and their ratio shows the machine's noise; "A/A" is float32 against
itself. `ONEDNN_MAX_CPU_ISA=AVX2` before the command takes a CPU's half-precision units away.

    python benchmarks/never_slower.py [--json] [--rounds 30] [--workloads image,convnet,...]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

import halfwise.torch as hw
from _harness import emit, interleave, keep_freed_memory, medians, ratios, table
from halfwise.workloads.load import BUILT_IN, load_workload

HEADERS = ("workload", "answer", "ms/step", "A/A", "plan", "bfloat16 autocast")
LIMIT = 1.02


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workloads", default=",".join(BUILT_IN))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(name, arguments.rounds) for name in arguments.workloads.split(",")]
    shown = [(*row[:2], f"{row[2]:.2f}", *(f"{ratio:.3f}" for ratio in row[3:])) for row in rows]
    emit(table(HEADERS, shown), {"rows": rows}, as_json=arguments.json)
    slow = [row[0] for row in rows if row[4] > max(LIMIT, LIMIT * row[3])]
    assert not slow, f"the plan is slower than float32: {slow}"


def measured(name: str, rounds: int) -> list[Any]:
    """Workload, answer, milliseconds of a float32 step, ratios."""
    workload = load_workload(name)
    plan = hw.plan(workload.model, [partial(workload.loss, workload.model, batch) for batch in workload.batches])
    half = sum(rule.compute != "float32" for rule in plan.layers)
    answer = (
        "float32" if plan.default.compute == "float32" else f"{plan.default.compute} in {half} of {len(plan.layers)}"
    )
    steps = {
        "float32": step(workload, nullcontext),
        "again": step(workload, nullcontext),
        "plan": step(workload, nullcontext, plan),
        "autocast": step(workload, partial(torch.autocast, "cpu", dtype=torch.bfloat16)),
    }
    seconds = interleave(steps, rounds)
    relative = ratios(seconds, "float32")
    return [name, answer, medians(seconds)["float32"] * 1e3, relative["again"], relative["plan"], relative["autocast"]]


def step(
    workload: Any, region: Callable[[], AbstractContextManager[Any]], plan: hw.Plan | None = None
) -> Callable[[], None]:
    """One step on a batch, on a copy of the model of its own."""
    model = copy.deepcopy(workload.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if plan is not None:
        hw.apply(model, plan)
    batch = workload.batches[0]

    def run() -> None:
        optimizer.zero_grad()
        with region():
            loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()

    return run


if __name__ == "__main__":
    main()
