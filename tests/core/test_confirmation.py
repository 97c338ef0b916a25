"""A plan is tried on a whole step: not faster, too disturbing or impossible, and the answer is float32."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest

from halfwise.core.confirmation import Trial, confirmed
from halfwise.core.plan import Plan, Rule
from halfwise.core.profile import Profile
from halfwise.core.timing import TimingTable

HALF = Plan.manual({"fc": "bfloat16"}, default="bfloat16", framework="keras")
TIMING = TimingTable.uniform(["fc"], relative={"bfloat16": 0.5})
LOSSES = [1.0, 1.5, 2.0]  # their spread is 0.408, a tenth of which may be spent


def confirm(trial: Trial, *, losses: list[float] = LOSSES, tolerance: float = 0.1) -> Plan:
    return confirmed(HALF, trial, profile=Profile({}), timing=TIMING, losses=losses, tolerance=tolerance)


def known(half: tuple[float, float], full: tuple[float, float]) -> Trial:
    return lambda plan: half if plan.uses("bfloat16") else full


@pytest.mark.parametrize(
    ("half", "full", "reason"),
    [
        ((1.0, 0.5), (1.0, 1.0), None),
        ((1.0, 1.0), (1.0, 1.0), "slower"),
        ((1.0, 0.98), (1.0, 1.0), "slower"),
        ((1.03, 0.5), (1.0, 1.0), None),
        ((0.97, 0.5), (1.0, 1.0), None),
        ((1.2, 0.5), (1.0, 1.0), "sensitivity"),
        ((0.8, 0.5), (1.0, 1.0), "sensitivity"),
        ((float("nan"), 0.5), (1.0, 1.0), "sensitivity"),
        ((float("inf"), 0.5), (1.0, 1.0), "sensitivity"),
        ((1.2, 2.0), (1.0, 1.0), "slower"),
    ],
)
def test_time_and_loss_decide(half: tuple[float, float], full: tuple[float, float], reason: str | None) -> None:
    plan = confirm(known(half, full))
    if reason is None:
        assert plan.default.compute == HALF.default.compute
    else:
        assert (plan.default.compute, plan.default.reason) == ("float32", reason)
        assert plan.framework == "keras"
        assert not plan.uses("bfloat16")


def test_losses_without_any_spread_leave_a_share_of_the_loss() -> None:
    assert confirm(known((1.0045, 0.5), (1.0, 1.0)), losses=[1.0, 1.0, 1.0]).default.compute == HALF.default.compute
    assert confirm(known((1.0055, 0.5), (1.0, 1.0)), losses=[1.0, 1.0, 1.0]).default.reason == "sensitivity"


def test_the_tolerance_is_the_callers() -> None:
    assert confirm(known((1.2, 0.5), (1.0, 1.0)), tolerance=0.6).default.compute == HALF.default.compute


def test_what_a_trial_raises_is_a_reason_for_float32() -> None:
    def only_float32(plan: Plan) -> tuple[float, float]:
        if plan.uses("bfloat16"):
            raise TypeError("float32 only")
        return 1.0, 1.0

    plan = confirm(only_float32)
    assert (plan.default.compute, plan.default.reason) == ("float32", "operation")
    assert "float32 only" in plan.default.detail


def test_plan_and_float32_take_turns() -> None:
    ran: list[bool] = []

    def trial(plan: Plan) -> tuple[float, float]:
        ran.append(plan.uses("bfloat16"))
        return 1.0, 0.01

    confirm(trial)
    assert ran == [True, *[True, False] * 3]  # a warm-up and three rounds


def test_a_plan_that_saves_memory_may_be_slower_but_not_disturb() -> None:
    def confirm_memory(trial: Trial) -> str:
        evidence = {"profile": Profile({}), "timing": TIMING, "losses": LOSSES, "tolerance": 0.1}
        return confirmed(HALF, trial, objective="memory", **evidence).default.compute  # type: ignore[arg-type]

    assert confirm_memory(known((1.0, 3.0), (1.0, 1.0))) == "bfloat16"
    assert confirm_memory(known((1.2, 0.5), (1.0, 1.0))) == "float32"


@pytest.mark.parametrize(("half", "full"), [([0.1, 9.0, 9.0, 9.0], [1.0]), ([0.5], [1.0, 1.0, 0.4])])
def test_neither_a_lucky_run_nor_lucky_pairs_make_a_plan_faster(half: list[float], full: list[float]) -> None:
    """In the first case the shortest times alone would say 0.1; in the second the pairs' median alone 0.5."""
    runs: dict[bool, Iterator[float]] = {True: cycle(half), False: cycle(full)}
    assert confirm(lambda plan: (1.0, next(runs[plan.uses("bfloat16")]))).default.reason == "slower"


def test_layers_that_are_kept_keep_their_reason_in_the_float32_answer() -> None:
    plan = confirmed(
        HALF,
        known((1.0, 2.0), (1.0, 1.0)),
        profile=Profile({}),
        timing=TIMING,
        losses=LOSSES,
        tolerance=0.1,
        kept={"head": ("hazard", "a softmax head")},
    )
    assert Rule(path="head", compute="float32", reason="hazard", detail="a softmax head") in plan.layers


def test_the_whole_step_is_told_where_the_plan_is_taken() -> None:
    plan = confirm(known((1.0, 0.5), (1.0, 1.0)))
    assert plan.layers == HALF.layers
    assert plan.default.detail.endswith("tried on a whole step, bfloat16 takes 0.50 times the float32 time")
