"""What is tried: layers kept in float32 within the policy's region, and perhaps the loss as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from halfwise.core.plan import Plan
from halfwise.torch.apply import AppliedPlan, remove_overrides
from halfwise.torch.names import named_layers
from halfwise.torch.preflighting.regions import Setting
from halfwise.torch.profile import is_whole

__all__ = ["Trial", "first_trial", "without_plan"]


@dataclass(frozen=True)
class Trial:
    """One way to run the model under the policy.

    Attributes:
        rules: module path -> `"float32"` or the policy's 16-bit format; empty for the policy alone.
        loss_outside: the policy holds for the model, and what the closure computes besides is in float32.
        in_force: the rules are those of a plan that is in force on the model already.
        whole: modules that were moved with all that they hold, because moving their own code was not enough.
    """

    rules: Mapping[str, str] = field(default_factory=dict)
    loss_outside: bool = False
    in_force: bool = False
    whole: frozenset[str] = frozenset()

    @contextmanager
    def around(self, model: nn.Module, setting: Setting) -> Iterator[None]:
        """A context for a whole run, in which the rules are in force on `model`."""
        with setting.whole_run():
            if self.in_force or not (self.rules or self.loss_outside):
                yield
                return
            plan = Plan.manual(self.rules, default=setting.half)
            with AppliedPlan(model, plan, whole_model=self.loss_outside):
                yield

    @contextmanager
    def region(self, setting: Setting) -> Iterator[None]:
        """The region that the closure runs in."""
        with setting.region(), setting.full() if self.loss_outside else nullcontext():
            yield

    def with_float32(self, model: nn.Module, path: str, half: str) -> Trial | None:
        """The next thing to try for a module in which something goes wrong; None where nothing is left.

        First what the module computes itself is moved, and the modules that it calls stay; then all of it.
        """
        modules = dict(named_layers(model))
        if path not in modules or path in self.whole:
            return None
        inner = _called_within(modules[path], path)
        if self.rules.get(path) == "float32" or not inner:
            within = [other for other in self.rules if other != path and _is_within(other, path)]
            kept = {other: name for other, name in self.rules.items() if other not in within}
            return replace(self, rules={**kept, path: "float32"}, in_force=False, whole=self.whole | {path})
        below = {other: half for other in inner if other not in self.rules}
        return replace(self, rules={**self.rules, path: "float32", **below}, in_force=False)


def first_trial(model: nn.Module) -> Trial:
    """The policy alone, or the plan that is in force on `model`."""
    with without_plan(model) as overrides:
        computes = {id(override.module): override.compute for override in overrides}
    rules = {path: computes[id(module)] for path, module in named_layers(model) if id(module) in computes}
    return Trial(rules, in_force=bool(rules))


@contextmanager
def without_plan(model: nn.Module) -> Iterator[list[Any]]:
    """Within the block no plan is in force on `model`; gives the stand-ins for `forward` that were."""
    removed = remove_overrides(model)
    try:
        yield removed
    finally:
        for override in removed:
            override.install()


def _called_within(module: nn.Module, path: str) -> list[str]:
    """The paths of the modules that `module` calls itself, as far as its structure tells."""
    if is_whole(module):
        return []
    found: list[str] = []
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        never_called = type(child).forward is nn.Module.forward  # ModuleList and ModuleDict have none of their own
        found += _called_within(child, inner) if never_called else [inner]
    return found


def _is_within(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")
