"""The guard as a value with pure updates: when to apply a step, skip it, localise, heal, or stop.

A step is watched through one `Observation`. Where something is wrong the guard either skips (the loss scale backs off)
or asks for the culprit to be localised; the adapter does so and comes back with a `Diagnosis`, on which the guard
concludes: demote the culprit and try the same batch again, leave the batch out, or stop the run.

One bad batch does not end a run: a failure that no precision can heal is left out and reported. It is the fourth in a
row, or weights that are already NaN, that stop it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from halfwise.core.diagnosis import Diagnosis

__all__ = ["LARGEST_NORM", "PATIENCE", "Action", "Conclusion", "GuardState", "Observation", "conclude", "observe"]

PATIENCE = 4
"""Skips in a row (once the loss scale has settled) before the culprit is looked for; unhealed failures in a row before
the end."""

LARGEST_NORM = 3.4028234663852886e38**0.5
"""A gradient norm above this has no finite square in float32 (about 1.8e19): it would freeze Adam for good."""

Action = Literal["apply", "skip", "localise"]
Conclusion = Literal["demote", "skip", "stop"]

_UNHEALABLE = ("not_a_precision_problem", "nonfinite_input", "not_reproducible")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a step showed.

    Attributes:
        loss_finite: the loss is finite.
        gradients_sound: the sum over all gradients of (g / scale)^2 is finite in float32: their norm is no NaN and at
            most `LARGEST_NORM`.
        scaled: the loss was scaled (something computes in float16), so that lowering the scale may help.
        at_floor: the loss scale stands at its floor.
    """

    loss_finite: bool
    gradients_sound: bool
    scaled: bool
    at_floor: bool


@dataclass(frozen=True, kw_only=True)
class GuardState:
    """What the guard remembers from step to step.

    Attributes:
        settled: a scaled step was applied since the loss scale was last set, so its first descent is over.
        skips_in_a_row: steps skipped since one was applied or localised.
        unhealed_in_a_row: failures in a row that no precision could heal.
    """

    settled: bool = False
    skips_in_a_row: int = 0
    unhealed_in_a_row: int = 0


def observe(state: GuardState, seen: Observation) -> tuple[GuardState, Action]:
    """What to do with a step.

    >>> bad = Observation(loss_finite=True, gradients_sound=False, scaled=True, at_floor=False)
    >>> state, actions = GuardState(settled=True), []
    >>> for _ in range(4):
    ...     state, action = observe(state, bad)
    ...     actions.append(action)
    >>> actions
    ['skip', 'skip', 'skip', 'localise']
    """
    if seen.loss_finite and seen.gradients_sound:
        return GuardState(settled=True), "apply"
    skips = state.skips_in_a_row + 1
    hopeless = not seen.loss_finite or not seen.scaled or seen.at_floor
    if hopeless or (state.settled and skips >= PATIENCE):
        return replace(state, skips_in_a_row=0), "localise"
    return replace(state, skips_in_a_row=skips), "skip"


def conclude(state: GuardState, diagnosis: Diagnosis) -> tuple[GuardState, Conclusion]:
    """What to do after the culprit was looked for."""
    if diagnosis.verdict == "overflow_at_every_scale":
        return state, "demote"
    if diagnosis.verdict == "nonfinite_parameters":
        return state, "stop"
    if diagnosis.verdict in _UNHEALABLE:
        return unhealed(state)
    return state, "skip"


def unhealed(state: GuardState) -> tuple[GuardState, Conclusion]:
    """What to do where nothing helped: leave the batch out, or stop at the `PATIENCE`-th time in a row."""
    failures = state.unhealed_in_a_row + 1
    return replace(state, unhealed_in_a_row=failures), "stop" if failures >= PATIENCE else "skip"
