"""Whether a preflight flags what would fail on a GPU and is silent where nothing would, and what it costs.

Claims: on every hazardous model the first hazard is the planted one, in the planted module, and no cure that was tried
fails; every sound model is found ready in every policy. What it costs is shown in float32 steps: these models take a
millisecond or so for one, so that most of it is the price of looking at each operation; larger ones take 5 to 20 steps.

    python benchmarks/preflight.py [--json]

Assumptions: everything runs on a CPU, by CUDA's rules as they are emulated; no GPU is asked.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

import halfwise.torch as hw
from _harness import emit, table
from _preflight_cases import HAZARDOUS, SOUND, Case

POLICIES = ("mixed_float16", "mixed_bfloat16", "tensorfloat32", "float8")
NEW_HARDWARE = "cuda:hopper"  # it has units for all of these


def judge_hazardous(case: Case) -> dict[str, Any]:
    """What a preflight says of a model in which something is planted."""
    model, closure = _made(case)
    found = hw.preflight(model, closure, policy=case.policy, target=case.target)
    first = found.hazards[0] if found.hazards else None
    said = (first.kind, first.module) if first is not None else ("", "")
    kept = [rule.path for rule in found.plan.layers if rule.compute == "float32"] if found.plan is not None else []
    return {
        "case": case.name,
        "expected": [case.kind, case.module],
        "said": list(said),
        "right": said == (case.kind, case.module),
        "others": len(found.hazards) - 1,
        "cured": found.cured,
        "kept": kept,
    }


def judge_sound(case: Case) -> dict[str, Any]:
    """What a preflight says of a sound model under each policy, and what it costs."""
    verdicts, seconds = {}, []
    for policy in POLICIES:
        model, closure = _made(case)
        start = time.perf_counter()
        found = hw.preflight(model, closure, policy=policy, target=NEW_HARDWARE)
        seconds.append(time.perf_counter() - start)
        verdicts[policy] = "" if found.ready else found.sentence
    model, closure = _made(case)
    return {"case": case.name, "verdicts": verdicts, "steps": median(seconds) / _step(model, closure)}


def _made(case: Case) -> tuple[nn.Module, Callable[[], Any]]:
    torch.manual_seed(0)
    return case.make()


def _step(model: nn.Module, closure: Callable[[], Any]) -> float:
    """Seconds of a float32 step."""
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        closure().backward()
        seconds.append(time.perf_counter() - start)
        model.zero_grad()
    return median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    judge_hazardous(HAZARDOUS[0])  # the first run imports what it needs
    hazardous = [judge_hazardous(case) for case in HAZARDOUS]
    sound = [judge_sound(case) for case in SOUND]
    right = sum(row["right"] for row in hazardous)
    silent = sum(not any(row["verdicts"].values()) for row in sound)
    text = table(
        ("planted", "flagged as", "in", "kept in float32", "cured"),
        [
            (r["case"], r["said"][0], r["said"][1] or "-", ", ".join(r["kept"]) or "-", str(r["cured"]))
            for r in hazardous
        ],
    )
    text += "\n\n" + table(
        ("sound model", *POLICIES, "float32 steps"),
        [(r["case"], *("ready" if not r["verdicts"][p] else "HAZARD" for p in POLICIES), r["steps"]) for r in sound],
    )
    text += f"\n\nflagged rightly: {right} of {len(HAZARDOUS)}; silent on {silent} of {len(SOUND)} sound models"
    emit(text, {"hazardous": hazardous, "sound": sound}, as_json=arguments.json)
    assert right == len(HAZARDOUS), [row for row in hazardous if not row["right"]]
    assert not any(row["cured"] is False for row in hazardous), hazardous
    assert silent == len(SOUND), [row for row in sound if any(row["verdicts"].values())]


if __name__ == "__main__":
    main()
