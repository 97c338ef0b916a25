"""The smallest change of a plan that takes a suspect out of half precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from halfwise.core.diagnosis import Suspect
from halfwise.core.plan import Default, Plan, Rule

__all__ = ["Tree", "demoted", "float32_everywhere"]


class Tree(Protocol):
    """The modules of a model by path, as far as demotion has to know them."""

    def names(self, path: str) -> Sequence[str]:
        """All paths of the module at `path`, which is one of them; none where there is no such module."""

    def children(self, path: str) -> Sequence[str]:
        """The modules directly inside, each under one of its paths.

        None where these compute in whatever precision the module itself does (attention, recurrent layers).
        """


def demoted(plan: Plan, suspect: Suspect, tree: Tree) -> Plan:
    """`plan` with the suspect's own code in float32.

    Where the suspect is a module with children, the children keep their precision: only its own operations are raised.
    Where it lies outside all modules (a loss in the training loop), that code is raised and the model keeps its
    precision.

    Args:
        plan: the plan in force.
        suspect: what overflowed.
        tree: the model.
    """
    detail = (
        f"{suspect.operation} gave {suspect.found} in {suspect.dtype} ({suspect.direction}); "
        f"largest input {suspect.largest_input:.4g}"
    )
    evidence = {"largest_input": suspect.largest_input}
    if not suspect.module and not suspect.module_class:
        default = replace(plan.default, compute="float32", reason="healed", detail=detail, evidence=evidence)
        root = plan.match("") or _as_rule("", plan.default)
        return replace(plan, default=default).with_rule(root)
    changed = plan
    for child in tree.children(suspect.module):
        if all(plan.match(name) is None for name in tree.names(child)):
            changed = changed.with_rule(_as_rule(child, plan.rule_for(child)))
    raised = Rule(path=suspect.module, compute="float32", reason="healed", detail=detail, evidence=evidence)
    for name in tree.names(suspect.module):
        if plan.match(name) is not None:  # all entries for one module must say the same
            changed = changed.with_rule(replace(raised, path=name))
    return changed.with_rule(raised)


def float32_everywhere(plan: Plan, detail: str) -> Plan:
    """`plan` with everything in float32."""
    return replace(plan, default=Default(reason="healed", detail=detail), loss_scale=None, layers=())


def _as_rule(path: str, entry: Rule | Default) -> Rule:
    return Rule(path=path, compute=entry.compute, reason=entry.reason, detail=entry.detail, evidence=entry.evidence)
