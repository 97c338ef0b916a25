"""What both adapters accept from users: policies in all their spellings, and the guard's options."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import Literal

from halfwise.core.objective import OBJECTIVES
from halfwise.core.plan import Default, Plan
from halfwise.core.policy import POLICIES, compute_format, parse_policy
from halfwise.core.timing import TimingTable
from halfwise.errors import PolicyError, UsageError

__all__ = ["as_policy", "check_options", "plan_of_policy"]


def as_policy(policy: str | Plan | PathLike[str]) -> str | Plan:
    """The canonical name of a policy, or the plan that was given or lies in the file.

    Raises:
        PolicyError: it is none of these, or a policy that is refused; PlanError: the file holds no plan.

    >>> as_policy("16-mixed")
    'mixed_float16'
    """
    if isinstance(policy, Plan):
        return policy
    if isinstance(policy, PathLike) or (isinstance(policy, str) and _is_plan_file(policy)):
        return Plan.load(fspath(policy))
    if not isinstance(policy, str):
        raise PolicyError(f"policy is {policy!r}; give a policy's name, a Plan, or the path of a plan file (plan.toml)")
    return parse_policy(policy)


def plan_of_policy(name: str, *, framework: Literal["torch", "keras"], model: str) -> Plan:
    """What a policy other than `"auto"` asks for, as a plan without rules.

    >>> plan_of_policy("mixed_float16", framework="torch", model="Net").loss_scale.initial
    65536.0
    """
    compute = compute_format(name)
    default = Default(compute=compute, reason="policy", detail=f"policy {name!r}")
    loss_scale = Plan.manual(default=compute).loss_scale
    return Plan(framework=framework, model=model, default=default, loss_scale=loss_scale)


def check_options(
    *, guard: object, tolerance: float, objective: str = "time", timing: object = None, log: object = None
) -> None:
    """Checks the options of a guarded training.

    Raises:
        UsageError: one of them cannot be used as given; PolicyError: an unknown objective.
    """
    if guard is not True and guard is not False and guard != "report":
        raise UsageError(f'guard is {guard!r}; allowed: True, "report", False')
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0.0 < tolerance < float("inf"):
        raise UsageError(f"tolerance is {tolerance!r}; give a positive number, such as 0.1")
    if objective not in OBJECTIVES:
        raise PolicyError(f"objective is {objective!r}; allowed: {', '.join(map(repr, OBJECTIVES))}")
    if timing is not None and not isinstance(timing, TimingTable):
        raise UsageError(f"timing is {type(timing).__name__}; give a TimingTable, or None to measure")
    if log is not None and not callable(log):
        raise UsageError(f"log is {log!r}; give a function that takes a text, such as print, or None")


def _is_plan_file(policy: str) -> bool:
    """A known policy's name is never a file, whatever lies in the working directory."""
    return policy not in POLICIES and (policy.endswith(".toml") or Path(policy).is_file())
