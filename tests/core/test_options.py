"""Policies in all their spellings, and the guard's options: what is accepted, and one clear error for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.options import as_policy, check_options, plan_of_policy
from halfwise.core.plan import Default, Plan
from halfwise.core.timing import TimingTable
from halfwise.errors import PlanError, PolicyError, UsageError


def test_names_come_back_in_their_canonical_spelling() -> None:
    assert as_policy("auto") == "auto"
    assert as_policy("bf16-mixed") == "mixed_bfloat16"


def test_plans_come_back_as_they_are_and_files_are_read(tmp_path: Path) -> None:
    plan = Plan.manual({"head": "float32"}, default="bfloat16")
    plan.save(tmp_path / "plan.toml")
    assert as_policy(plan) is plan
    assert as_policy(tmp_path / "plan.toml") == as_policy(str(tmp_path / "plan.toml")) == plan


def test_a_known_name_is_no_file_and_any_other_file_is_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("auto").write_text("no plan")
    Plan.manual(default="bfloat16").save("mine")
    assert as_policy("auto") == "auto"
    assert as_policy("mine") == Plan.manual(default="bfloat16")
    with pytest.raises(PlanError, match=r"missing\.toml"):
        as_policy("missing.toml")


@pytest.mark.parametrize("policy", [3, None, ["auto"]])
def test_other_things_are_refused(policy: Any) -> None:
    with pytest.raises(PolicyError, match=r"policy is .*; give a policy's name, a Plan, or the path of a plan file"):
        as_policy(policy)


@pytest.mark.parametrize(
    ("name", "compute", "scale"),
    [
        ("float32", "float32", None),
        ("mixed_bfloat16", "bfloat16", None),
        ("mixed_float16", "float16", LossScaleSettings()),
    ],
)
def test_a_policys_plan(name: str, compute: str, scale: LossScaleSettings | None) -> None:
    default = Default(compute=compute, reason="policy", detail=f"policy {name!r}")
    expected = Plan(framework="keras", model="Net", default=default, loss_scale=scale)
    assert plan_of_policy(name, framework="keras", model="Net") == expected


FINE: dict[str, Any] = {"guard": True, "tolerance": 0.1, "objective": "time", "timing": None, "log": None}


@pytest.mark.parametrize(
    "change", [{"guard": "report"}, {"guard": False}, {"timing": TimingTable({})}, {"log": print}, {"tolerance": 1}]
)
def test_options_that_are_fine(change: dict[str, Any]) -> None:
    check_options(**{**FINE, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"guard": "maybe"}, "guard is 'maybe'; allowed: True, \"report\", False"),
        ({"guard": None}, "guard is None"),
        ({"tolerance": 0.0}, "tolerance is 0.0; give a positive number"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"tolerance": float("inf")}, "tolerance is inf"),
        ({"tolerance": True}, "tolerance is True"),
        ({"tolerance": "0.1"}, "tolerance is '0.1'"),
        ({"objective": "speed"}, "objective is 'speed'; allowed: 'time', 'memory', 'balanced'"),
        ({"timing": {}}, "timing is dict; give a TimingTable"),
        ({"log": "stderr"}, "log is 'stderr'; give a function"),
    ],
)
def test_options_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_options(**{**FINE, **change})
