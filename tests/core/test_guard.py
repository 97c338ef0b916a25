"""The guard's rules, one test a rule."""

from __future__ import annotations

import pytest

from halfwise.core.diagnosis import Diagnosis, Verdict
from halfwise.core.guard import PATIENCE, GuardState, Observation, conclude, observe


def seen(*, loss: bool = True, gradients: bool = True, scaled: bool = True, floor: bool = False) -> Observation:
    return Observation(loss_finite=loss, gradients_sound=gradients, scaled=scaled, at_floor=floor)


def test_healthy_step_is_applied_and_settles_the_guard() -> None:
    state, action = observe(GuardState(skips_in_a_row=3, unhealed_in_a_row=2), seen())
    assert action == "apply"
    assert state == GuardState(settled=True)


def test_skips_while_the_loss_scale_settles_are_not_counted_against_the_run() -> None:
    state = GuardState()
    for _ in range(16):
        state, action = observe(state, seen(gradients=False))
        assert action == "skip"


def test_fourth_skip_in_a_row_once_settled_is_localised() -> None:
    state, actions = GuardState(settled=True), []
    for _ in range(2 * PATIENCE):
        state, action = observe(state, seen(gradients=False))
        actions.append(action)
    assert actions == (["skip"] * (PATIENCE - 1) + ["localise"]) * 2


def test_a_healthy_step_starts_the_count_anew() -> None:
    state = GuardState(settled=True)
    for flags in ([False] * 3, [True], [False] * 3):
        for sound in flags:
            state, action = observe(state, seen(gradients=sound))
            assert action != "localise"


@pytest.mark.parametrize(
    "bad",
    [
        seen(loss=False, gradients=False),
        seen(loss=False),
        seen(gradients=False, scaled=False),
        seen(gradients=False, floor=True),
    ],
    ids=["loss not finite", "only the loss not finite", "nothing is scaled", "at the floor"],
)
@pytest.mark.parametrize("settled", [True, False])
def test_localised_at_once_where_a_lower_scale_cannot_help(bad: Observation, settled: bool) -> None:
    _, action = observe(GuardState(settled=settled), bad)
    assert action == "localise"


def test_overflow_at_every_scale_is_demoted() -> None:
    assert conclude(GuardState(), Diagnosis("overflow_at_every_scale"))[1] == "demote"


def test_broken_weights_stop_the_run_at_once() -> None:
    assert conclude(GuardState(), Diagnosis("nonfinite_parameters"))[1] == "stop"


@pytest.mark.parametrize("verdict", ["not_a_precision_problem", "nonfinite_input", "not_reproducible"])
def test_what_cannot_be_healed_is_left_out_three_times_and_stops_the_fourth(verdict: Verdict) -> None:
    state, conclusions = GuardState(settled=True), []
    for _ in range(PATIENCE):
        state, _ = observe(state, seen(loss=False))
        state, conclusion = conclude(state, Diagnosis(verdict))
        conclusions.append(conclusion)
    assert conclusions == ["skip"] * (PATIENCE - 1) + ["stop"]


@pytest.mark.parametrize("verdict", ["healthy", "loss_scale_too_high", "loss_scale_settling"])
def test_harmless_verdicts_only_skip(verdict: Verdict) -> None:
    state, conclusion = conclude(GuardState(unhealed_in_a_row=PATIENCE), Diagnosis(verdict))
    assert conclusion == "skip"
    assert state.unhealed_in_a_row == PATIENCE
