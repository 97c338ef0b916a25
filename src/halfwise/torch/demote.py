"""The smallest change of a plan that takes a suspect out of half precision."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from halfwise.core.diagnosis import Suspect
from halfwise.core.plan import Default, Plan, Rule
from halfwise.torch.names import named_layers
from halfwise.torch.profile import is_whole

__all__ = ["demoted", "float32_everywhere"]


def demoted(plan: Plan, model: nn.Module, suspect: Suspect) -> Plan:
    """`plan` with the suspect's own code in float32.

    Where the suspect is a module with children, the children keep their precision: only its own operations are raised.
    Where it lies outside all modules (a loss in the closure), that code is raised and the model keeps its precision.
    """
    detail = (
        f"{suspect.operation} gave {suspect.found} in {suspect.dtype} ({suspect.direction}); "
        f"largest input {suspect.largest_input:.4g}"
    )
    evidence = {"largest_input": suspect.largest_input}
    if not suspect.module and not suspect.module_class:
        default = Default(compute="float32", reason="healed", detail=detail, evidence=evidence)
        root = plan.match("") or _as_rule("", plan.default)
        return replace(plan, default=default).with_rule(root)
    changed = plan
    names: dict[nn.Module, list[str]] = {}
    for path, part in named_layers(model, all_names=True):
        names.setdefault(part, []).append(path)
    module = dict(named_layers(model)).get(suspect.module)
    if module is not None and not is_whole(module):
        for child in module.children():
            if all(plan.match(path) is None for path in names[child]):
                first = names[child][0]
                changed = changed.with_rule(_as_rule(first, plan.rule_for(first)))
    raised = Rule(path=suspect.module, compute="float32", reason="healed", detail=detail, evidence=evidence)
    for path in names[module] if module is not None else ():
        if plan.match(path) is not None:  # all entries for one module must say the same
            changed = changed.with_rule(replace(raised, path=path))
    return changed.with_rule(raised)


def float32_everywhere(plan: Plan, detail: str) -> Plan:
    """`plan` with everything in float32."""
    return replace(plan, default=Default(reason="healed", detail=detail), loss_scale=None, layers=())


def _as_rule(path: str, entry: Rule | Default) -> Rule:
    return Rule(path=path, compute=entry.compute, reason=entry.reason, detail=entry.detail, evidence=entry.evidence)
