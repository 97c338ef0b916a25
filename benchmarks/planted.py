"""Planted trouble: does the plan keep exactly the right layer in higher precision?

Twenty cases in seven kinds of model (`_planted_cases.py`): an overflowing layer, tiny gradients, outlier channels, a
norm written by hand, large logits, positions near 65536. With a timing table in which half precision takes half the
time in every layer, a plan has every reason to lower all layers but the one that has the trouble. Scored are, over all
cases and both formats, how many of the troubled layers were kept (recall) and how many of the kept ones had the trouble
(precision); the healthy models are looked at as well.

Then some of them are trained: in float32, under the plan for the format, and in the format everywhere, without a
guard, by CUDA's rules as they are emulated on a CPU. With every seed the plan's loss at the end is nearer to float32's
than those of two seeds are, and that of half precision everywhere is not. Not every case would show the latter within a
few steps: what a plan keeps apart for outliers in a norm, or for tiny gradients, need not be missed by then.

    python benchmarks/planted.py [--json] [--framework torch|keras] [--cases 0,1,2] [--seeds 3] [--steps 60]

Keras runs on the backend that `KERAS_BACKEND` names. There the same cases are trained, but the failure of the format
everywhere has been seen for the recommender's norm only; its outlier channels stayed within the spread of the seeds.
`--steps 0` trains nothing.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

import halfwise.torch as hw
from _harness import emit, table
from _planted_cases import CASES, FORMATS, Case
from _planted_torch import planted
from _planted_training import HEADERS as TRAININGS
from _planted_training import trained
from halfwise.core.workload import Workload
from halfwise.torch.measure import timed_layers
from halfwise.workloads.load import load_workload

HEADERS = ("case", "seed", "format", "barred", "kept", "right")
TRAINED = (
    ("convnet", "overflow", "float16"),
    ("convnet", "large logits", "bfloat16"),
    ("encoder", "large positions", "bfloat16"),
    ("decoder", "overflow", "float16"),
    ("lstm", "hand-written norm", "float16"),
    ("recommender", "hand-written norm", "float16"),
    ("recommender", "outlier channels", "bfloat16"),
    ("unet", "hand-written norm", "float16"),
    ("unet", "outlier channels", "bfloat16"),
)
LEAST = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", default=",".join(str(number) for number in range(len(CASES))))
    parser.add_argument("--framework", choices=("torch", "keras"), default="torch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    framework, numbers = arguments.framework, [int(number) for number in arguments.cases.split(",")]
    kinds = dict.fromkeys(CASES[number].kind for number in numbers)
    rows, healthy = [], []
    for seed in range(arguments.seeds):
        rows += [row for number in numbers for row in judged(CASES[number], framework, seed)]
        healthy += [row for kind in kinds for row in judged_healthy(kind, framework, seed)]
    right, kept, troubled = (sum(row[place] for row in [*rows, *healthy]) for place in (6, 7, 8))
    exact = sum(row[5] for row in [*rows, *healthy])
    score = {"precision": right / max(1, kept), "recall": right / max(1, troubled)}
    shown = [(*row[:5], "yes" if row[5] else "NO") for row in [*rows, *healthy]]
    text = table(HEADERS, shown) + "\n\n" + "  ".join(f"{name} {value:.3f}" for name, value in score.items())
    text += f"  exactly right {exact} of {len(shown)}"
    how = {"framework": framework, "seeds": arguments.seeds, "steps": arguments.steps}
    trainings = [trained(*case, **how) for case in TRAINED] if arguments.steps else []
    text += "\n\n" + table(TRAININGS, trainings) if trainings else ""
    emit(text, {"rows": rows, "healthy": healthy, **score, "trainings": trainings}, as_json=arguments.json)
    assert min(score.values()) >= LEAST, score
    for what, name, _, _, _, _, spread, plan, everywhere in trainings:
        assert plan <= spread, f"{what}: the plan does not reach float32's loss"
        assert not everywhere <= spread, f"{what}: {name} everywhere does not fail"


def judged(case: Case, framework: str, seed: int) -> list[list[Any]]:
    """A row for each format: case, seed, format, troubled layer, kept layers, whether right; and counts."""
    rows = []
    for name in FORMATS:
        workload, path = _planted(case, framework, seed)
        kept = kept_layers(workload, name)
        wanted = {path} if name in case.barred else set()
        rows.append(_row(case.name, seed, name, wanted, kept))
    return rows


def judged_healthy(kind: str, framework: str, seed: int) -> list[list[Any]]:
    """The same of a model in which nothing was planted."""
    rows = []
    for name in FORMATS:
        kept = kept_layers(load_workload(kind, framework=framework, seed=seed), name)
        rows.append(_row(f"{kind}: healthy", seed, name, set(), kept))
    return rows


def _planted(case: Case, framework: str, seed: int) -> tuple[Workload, str]:
    if framework == "torch":
        return planted(case, seed)
    from _planted_keras import planted as planted_in_keras

    return planted_in_keras(case, seed)


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


def _row(what: str, seed: int, name: str, wanted: set[str], kept: set[str]) -> list[Any]:
    told = ", ".join(sorted(kept)) or "-"
    return [
        what,
        seed,
        name,
        ", ".join(wanted) or "-",
        told,
        kept == wanted,
        len(kept & wanted),
        len(kept),
        len(wanted),
    ]


if __name__ == "__main__":
    main()
