"""Planted trouble: does the plan keep exactly the right layer in higher precision?

Twenty cases in seven kinds of model (`_planted_cases.py`): an overflowing layer, tiny gradients, outlier channels, a
norm written by hand, large logits, positions near 65536. With a timing table in which half precision takes half the
time in every layer, a plan has every reason to lower all layers but the one that has the trouble. Scored are, over all
cases and both formats, how many of the troubled layers were kept (recall) and how many of the kept ones had the trouble
(precision); the healthy models are looked at as well.

Then some of them are trained: in float32, under the plan for float16, and in float16 everywhere, without a guard. The
loss at the end, over seeds, shows that the plan is as good as float32 where float16 everywhere fails.

    python benchmarks/planted.py [--json] [--framework torch|keras] [--cases 0,1,2] [--seeds 3] [--steps 40]

With Keras, on the backend that `KERAS_BACKEND` names, nothing is trained.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch

import halfwise.torch as hw
from _harness import emit, table
from _planted_cases import CASES, FORMATS, Case
from _planted_torch import planted
from halfwise.core.workload import Workload
from halfwise.torch.measure import timed_layers
from halfwise.workloads.load import load_workload

HEADERS = ("case", "format", "barred", "kept", "right")
TRAINED = ("convnet", "recommender")
TRAININGS = ("case", "float32", "plan", "float16", "skipped in float16", "spread over seeds")
LEAST = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", default=",".join(str(number) for number in range(len(CASES))))
    parser.add_argument("--framework", choices=("torch", "keras"), default="torch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    framework, numbers = arguments.framework, [int(number) for number in arguments.cases.split(",")]
    rows = [row for number in numbers for row in judged(number, framework)]
    kinds = dict.fromkeys(CASES[number].kind for number in numbers)
    healthy = [row for kind in kinds for row in judged_healthy(kind, framework)]
    right, kept, troubled = (sum(row[place] for row in [*rows, *healthy]) for place in (5, 6, 7))
    score = {"precision": right / max(1, kept), "recall": right / max(1, troubled)}
    shown = [(*row[:4], "yes" if row[4] else "NO") for row in [*rows, *healthy]]
    text = table(HEADERS, shown) + "\n\n" + "  ".join(f"{name} {value:.3f}" for name, value in score.items())
    trainings = [trained(kind, arguments.seeds, arguments.steps) for kind in TRAINED if framework == "torch"]
    text += "\n\n" + table(TRAININGS, trainings) if trainings else ""
    emit(text, {"rows": rows, "healthy": healthy, **score, "trainings": trainings}, as_json=arguments.json)
    assert min(score.values()) >= LEAST, score
    for what, full, plan, uniform, _, spread in trainings:
        assert abs(plan - full) <= max(2 * spread, 0.02 * full), f"{what}: the plan does not reach float32's loss"
        assert not uniform < full + 5 * spread, f"{what}: float16 everywhere does not fail"


def judged(number: int, framework: str) -> list[list[Any]]:
    """A row for each format: case, format, troubled layer, kept layers, whether right; and counts."""
    case = CASES[number]
    rows = []
    for name in FORMATS:
        workload, path = _planted(case, framework)
        kept = kept_layers(workload, name)
        wanted = {path} if name in case.barred else set()
        rows.append(_row(case.name, name, wanted, kept))
    return rows


def judged_healthy(kind: str, framework: str) -> list[list[Any]]:
    """The same of a model in which nothing was planted."""
    made = (load_workload(kind, framework=framework) for _ in FORMATS)
    return [_row(f"{kind}: healthy", name, set(), kept_layers(w, name)) for name, w in zip(FORMATS, made, strict=True)]


def _planted(case: Case, framework: str) -> tuple[Workload, str]:
    if framework == "torch":
        return planted(case)
    from _planted_keras import planted as planted_in_keras

    return planted_in_keras(case)


def kept_layers(workload: Workload, name: str) -> set[str]:
    """The layers that the plan keeps in float32, where the format is offered at half the time."""
    if workload.framework == "keras":
        return _kept_in_keras(workload, name)
    model = workload.model
    closures = [partial(workload.loss, model, batch) for batch in workload.batches]
    layers = timed_layers(model)
    plan = hw.plan(model, closures, timing=hw.TimingTable.uniform(layers, relative={name: 0.5}))
    return {path for path in layers if plan.compute(path) == "float32"}


def _kept_in_keras(workload: Workload, name: str) -> set[str]:
    """Softmax heads stay in float32 whatever the evidence, and do not count."""
    import halfwise.keras as hwk
    from halfwise.keras.heads import heads
    from halfwise.keras.measure import timed_layers as timed_in_keras

    model = workload.model
    layers = timed_in_keras(model)
    timing = hw.TimingTable.uniform(layers, relative={name: 0.5})
    plan = hwk.plan(model, list(workload.batches), loss=workload.loss, timing=timing)
    return {path for path in layers if plan.compute(path) == "float32"} - set(heads(model))


def trained(kind: str, seeds: int, steps: int) -> list[Any]:
    """The loss after training a planted model of the kind, the mean over seeds, in three precisions."""
    case = next(c for c in CASES if c.kind == kind and c.trouble in ("overflow", "hand-written norm"))
    losses: dict[str, list[float]] = {"float32": [], "plan": [], "mixed_float16": []}
    skipped = 0
    for seed in range(seeds):
        for what, found in losses.items():
            workload, _ = planted(case, seed)
            closures = [partial(workload.loss, workload.model, batch) for batch in workload.batches]
            policy: Any = what
            if what == "plan":
                timing = hw.TimingTable.uniform(timed_layers(workload.model), relative={"float16": 0.5})
                policy = hw.plan(workload.model, closures, timing=timing)
            mp = hw.MixedPrecision(workload.model, workload.optimizer, policy, guard=False, log=lambda _: None)
            for number in range(steps):
                mp.step(closures[number % len(closures)])
            skipped += mp.skipped_steps if what == "mixed_float16" else 0
            mp.close()
            with torch.no_grad():
                found.append(float(torch.stack([closure() for closure in closures]).mean()))
    mean = {what: statistics.mean(found) for what, found in losses.items()}
    spread = statistics.stdev(losses["float32"])
    return [case.name, mean["float32"], mean["plan"], mean["mixed_float16"], f"{skipped} of {seeds * steps}", spread]


def _row(what: str, name: str, wanted: set[str], kept: set[str]) -> list[Any]:
    told = ", ".join(sorted(kept)) or "-"
    return [what, name, ", ".join(wanted) or "-", told, kept == wanted, len(kept & wanted), len(kept), len(wanted)]


if __name__ == "__main__":
    main()
