"""How the plans of seven kinds of model differ, and by what evidence.

Each kind is trained a few steps in float32; then its plan is made for this machine (measured) and for named targets
(estimates). Printed are the formats by class of layer, what was kept in float32 and why, the loss scale, and the
evidence that differs most between kinds: the largest activation, the smallest loss-scale window, the layer whose
rounding to bfloat16 changes the loss most.

    python benchmarks/kinds.py [--json] [--steps 30] [--targets here,cuda:volta,cuda:ampere,cuda:hopper]
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from typing import Any

import torch

import halfwise.torch as hw
from _harness import emit, keep_freed_memory, table
from halfwise.core.ranges import loss_scale_window
from halfwise.torch.measure import timed_layers
from halfwise.workloads.load import load_workload

KINDS = ("convnet", "encoder", "decoder", "lstm", "recommender", "unet", "gan")
PLANS = ("kind", "target", "formats", "kept in float32", "loss scale", "time")
EVIDENCE = ("kind", "layers", "largest activation", "float16 window", "most sensitive layer", "change", "noise")


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--targets", default="here,cuda:volta,cuda:ampere,cuda:hopper")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plans, evidence = [], []
    for kind in KINDS:
        workload = load_workload(kind)
        closures = [partial(workload.loss, workload.model, batch) for batch in workload.batches]
        for number in range(arguments.steps):
            workload.optimizer.zero_grad()
            closures[number % len(closures)]().backward()
            workload.optimizer.step()
        evidence.append(seen(kind, workload.model, closures))
        made = {target: hw.plan(workload.model, closures, target=target) for target in arguments.targets.split(",")}
        plans += [planned(kind, target, workload.model, plan) for target, plan in made.items()]
    text = table(PLANS, plans) + "\n\n" + table(EVIDENCE, evidence)
    emit(text, {"plans": plans, "evidence": evidence}, as_json=arguments.json)
    assert len({row[2] for row in plans if row[1] == "cuda:hopper"}) > 2, "the plans do not differ"


def planned(kind: str, target: str, model: Any, plan: hw.Plan) -> list[str]:
    """A row of the first table."""
    layers = timed_layers(model)
    by_format: dict[str, Counter[str]] = {}
    for path, layer in layers.items():
        by_format.setdefault(plan.compute(path), Counter())[type(layer).__name__] += 1
    formats = "; ".join(f"{name}: {_counted(classes)}" for name, classes in sorted(by_format.items()))
    kept = Counter(rule.reason for rule in plan.layers if rule.compute == "float32" and rule.path in layers)
    scale = f"{plan.loss_scale.initial:g}" if plan.loss_scale is not None else "-"
    time = plan.default.evidence.get("relative_time")
    return [kind, target, formats, _counted(kept) or "-", scale, "-" if time is None else f"{time:.2f}"]


def seen(kind: str, model: Any, closures: Any) -> list[str]:
    """A row of the second table."""
    profile = hw.profile(model, closures)
    layers = timed_layers(model)
    largest = {path: found.largest for path in layers if (found := profile.get(path, "activation")) is not None}
    hottest = max(largest, key=largest.__getitem__)
    windows = {path: loss_scale_window(profile, path, "float16") for path in layers}
    common = [window for window in windows.values() if window is not None]
    low, high = max(window[0] for window in common), min(window[1] for window in common)
    scores = _scores(model, closures)
    worst = max(scores, key=scores.__getitem__)
    return [
        kind,
        str(len(layers)),
        f"{largest[hottest]:.3g} ({hottest})",
        f"{low:g} to {high:g}" + (f", none for {len(windows) - len(common)}" if len(common) < len(windows) else ""),
        f"{worst} ({type(layers[worst]).__name__})",
        f"{scores[worst] ** 0.5:.2g}",
        f"{_noise(closures):.2g}",
    ]


def _scores(model: Any, closures: Any) -> dict[str, float]:
    from halfwise.torch.sensitivity import SensitivityProbe

    probe = SensitivityProbe(model, "cpu")
    for closure in closures:
        model.zero_grad()
        with probe.watching(["bfloat16"]):
            loss = closure()
            loss.backward()
        probe.keep(float(loss.detach()))
    return {path: found["bfloat16"].score for path, found in probe.sensitivity.layers.items()}


def _noise(closures: Any) -> float:
    with torch.no_grad():
        return float(torch.stack([closure() for closure in closures]).std(correction=0))


def _counted(found: Counter[Any]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items()))


if __name__ == "__main__":
    main()
