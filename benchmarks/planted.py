"""Planted trouble: does the plan keep exactly the right layer in higher precision?

Twenty cases in seven kinds of model (`_planted_cases.py`): an overflowing layer, tiny gradients, outlier channels, a
norm written by hand, large logits, positions near 65536. With a timing table in which half precision takes half the
time in every layer, a plan has every reason to lower all layers but the one that has the trouble. Scored are, over all
cases and both formats, how many of the troubled layers were kept (recall) and how many of the kept ones had the trouble
(precision); the healthy models are looked at as well.

    python benchmarks/planted.py [--json] [--cases 0,1,2]
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

import halfwise.torch as hw
from _harness import emit, table
from _planted_cases import BARRED, CASES, FORMATS
from _planted_torch import planted
from halfwise.core.workload import Workload
from halfwise.torch.measure import timed_layers
from halfwise.workloads.load import load_workload

HEADERS = ("case", "format", "barred", "kept", "right")
LEAST = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", default=",".join(str(number) for number in range(len(CASES))))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for number in map(int, arguments.cases.split(",")) for row in judged(number)]
    healthy = [row for kind in dict.fromkeys(case.kind for case in CASES) for row in judged_healthy(kind)]
    right, kept, troubled = (sum(row[place] for row in [*rows, *healthy]) for place in (5, 6, 7))
    score = {"precision": right / max(1, kept), "recall": right / max(1, troubled)}
    shown = [(*row[:4], "yes" if row[4] else "NO") for row in [*rows, *healthy]]
    text = table(HEADERS, shown) + "\n\n" + "  ".join(f"{name} {value:.3f}" for name, value in score.items())
    emit(text, {"rows": rows, "healthy": healthy, **score}, as_json=arguments.json)
    assert min(score.values()) >= LEAST, score


def judged(number: int) -> list[list[Any]]:
    """A row for each format: case, format, troubled layer, kept layers, whether right; and counts."""
    case = CASES[number]
    rows = []
    for name in FORMATS:
        workload, path = planted(case)
        kept = kept_layers(workload, name)
        wanted = {path} if name in BARRED[case.trouble] else set()
        rows.append(_row(case.name, name, wanted, kept))
    return rows


def judged_healthy(kind: str) -> list[list[Any]]:
    """The same of a model in which nothing was planted."""
    return [_row(f"{kind}: healthy", name, set(), kept_layers(load_workload(kind), name)) for name in FORMATS]


def kept_layers(workload: Workload, name: str) -> set[str]:
    """The layers that the plan keeps in float32, where the format is offered at half the time."""
    model = workload.model
    closures = [partial(workload.loss, model, batch) for batch in workload.batches]
    layers = timed_layers(model)
    plan = hw.plan(model, closures, timing=hw.TimingTable.uniform(layers, relative={name: 0.5}))
    return {path for path in layers if plan.compute(path) == "float32"}


def _row(what: str, name: str, wanted: set[str], kept: set[str]) -> list[Any]:
    told = ", ".join(sorted(kept)) or "-"
    return [what, name, ", ".join(wanted) or "-", told, kept == wanted, len(kept & wanted), len(kept), len(wanted)]


if __name__ == "__main__":
    main()
