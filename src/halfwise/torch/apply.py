"""Carrying out a plan on a model, and taking it back.

Each module that a rule names gets a small callable object as its instance's `forward`. Of the ways to run one module in
another precision this one survives deepcopy, pickling, `torch.compile(fullgraph=True)`, activation checkpointing, DDP,
parametrizations and export: the object refers to the module that holds it, so a copy of the model refers to the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self
from weakref import finalize

import torch
from torch import nn

from halfwise.core.plan import Default, Plan, Rule
from halfwise.core.policy import disabled
from halfwise.errors import PlanError, UsageError
from halfwise.torch.names import clean_path, is_compiled, named_layers, unwrap
from halfwise.torch.nested import map_tensors
from halfwise.torch.region import COMPUTE_DTYPES, device_type_of, region

__all__ = ["AppliedPlan", "apply"]

_HALF = (torch.float16, torch.bfloat16)
_BY_HAND = ("manual", "healed")


def apply(model: nn.Module, plan: Plan) -> AppliedPlan:
    """Makes `model` compute as `plan` says, inside `torch.autocast` or not; names in its `state_dict` stay as they are.

    The default holds for the whole of the model's forward pass; outputs of a model in half precision come
    back in float32 where the caller is not inside an autocast region itself. A plan that is already
    applied to the model is replaced, and in force again once the new one is removed.

    Args:
        model: any module, also compiled or wrapped for data parallelism; paths are those of the plain module.
        plan: what to carry out. Storage formats other than float32, and formats that torch's autocast does not know,
            are refused by name.

    Returns:
        A handle; `handle.remove()` or leaving `with handle:` restores the model exactly as it was.

    Raises:
        UsageError: `model` is no module, or `plan` no plan.
        PlanError: the plan names modules that do not exist, or asks for what cannot be executed here.

    Example:
        >>> import torch, halfwise.torch as hw
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> with hw.apply(model, hw.Plan.manual({"2": "float32"}, default="bfloat16")):
        ...     print(model(torch.ones(1, 4)).dtype)
        torch.float32
    """
    return AppliedPlan(model, plan, whole_model=True)


class AppliedPlan:
    """A plan in force on a model. Made by `apply`; a context manager.

    Attributes:
        plan: what is in force.
    """

    def __init__(self, model: nn.Module, plan: Plan, *, whole_model: bool) -> None:
        plan = _with_plain_paths(plan, model) if isinstance(plan, Plan) and isinstance(model, nn.Module) else plan
        self.plan = plan
        self._model = model
        self._overrides: dict[str, _Override] = {}
        self._displaced: list[_Override] = []
        _refuse_what_cannot_run(model, plan)
        if disabled():
            return
        computes = _computes(model, plan, whole_model=whole_model)
        self._displaced = remove_overrides(model)
        device_type = device_type_of(model)
        one_half = not (plan.uses("float16") and plan.uses("bfloat16"))
        for path, (module, compute) in computes.items():
            self._overrides[path] = _Override(module, compute, device_type, cache=one_half)
            self._overrides[path].install()
        if not whole_model:  # a training that was dropped without being closed is not put back in force
            finalize(self, _retire, list(self._overrides.values())).atexit = False
        if self._overrides or self._displaced:
            _forget_compiled_code(model)

    def remove(self) -> None:
        """Restores the model exactly as it was, a plan included that this one replaced. Twice is harmless.

        Where a later plan is in force, that one stays.
        """
        overrides, displaced = list(self._overrides.values()), self._displaced
        self._overrides, self._displaced = {}, []
        in_force = {id(override) for override in _installed(self._model)} <= {id(override) for override in overrides}
        for override in overrides:
            override.end()
        for override in displaced:
            if in_force and not override.retired:
                override.install()
        if overrides or displaced:
            _forget_compiled_code(self._model)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within the block the rules are not in force: modules compute in the precision of the surrounding region."""
        for override in self._overrides.values():
            override.active = False
        try:
            yield
        finally:
            for override in self._overrides.values():
                override.active = True

    def never_ran(self) -> tuple[str, ...]:
        """Paths with a rule whose `forward` was not called yet.

        Some modules never call a child's (`MultiheadAttention`).
        """
        return tuple(path for path, override in self._overrides.items() if not override.ran)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _with_plain_paths(plan: Plan, model: nn.Module) -> Plan:
    """`plan` with paths that were read off a compiled or data-parallel model spelled as those of the plain one."""
    known = {path for path, _ in named_layers(model, all_names=True)}

    def plain(rule: Rule) -> Rule:
        wrapped = rule.path is not None and rule.path not in known and clean_path(rule.path) in known
        return replace(rule, path=clean_path(str(rule.path))) if wrapped else rule

    return replace(plan, layers=tuple(plain(rule) for rule in plan.layers))


class _Override:
    """Stands in for a module's `forward`: runs it in `compute`, whatever the region around it."""

    def __init__(self, module: nn.Module, compute: str, device_type: str, *, cache: bool) -> None:
        self.module = module
        self.cache = cache
        self.compute = compute
        self.device_type = device_type
        self.earlier = module.__dict__.get("forward")  # an instance's own forward, put there by someone else
        self.active = True
        self.retired = False  # whoever installed it wants it no more
        self.ran = False
        self.holds_half = any(p.dtype in _HALF for p in module.parameters())  # frozen weights kept in half

    def install(self) -> None:
        if self.module.__dict__.get("forward") is self.earlier:  # else somebody else put one there since
            self.module.__dict__["forward"] = self

    def uninstall(self) -> None:
        if self.module.__dict__.get("forward") is self:
            if self.earlier is None:
                del self.module.__dict__["forward"]
            else:
                self.module.__dict__["forward"] = self.earlier

    def end(self) -> None:
        """Uninstalled for good. Whoever wrapped it calls it further on, so it does nothing of its own then."""
        self.uninstall()
        self.retired, self.active = True, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self._forward(*args, **kwargs)
        if not self.ran:
            self.ran = True
        if self.compute == "float32":
            with region(self.device_type, "float32"):
                return self._forward_in_float32(*_to_float32(args), **_to_float32(kwargs))
        outside_is_half = torch.is_autocast_enabled(self.device_type)
        with region(self.device_type, self.compute, cache=self.cache):
            output = self._forward(*args, **kwargs)
        return output if outside_is_half else _to_float32(output)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.earlier is not None:
            return self.earlier(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _forward_in_float32(self, *args: Any, **kwargs: Any) -> Any:
        if not self.holds_half:
            return self._forward(*args, **kwargs)
        raised = {name: p.float() for name, p in self.module.named_parameters() if p.dtype in _HALF}
        with torch.nn.utils.stateless._reparametrize_module(self.module, raised):
            return self._forward(*args, **kwargs)


def remove_overrides(model: nn.Module) -> list[_Override]:
    """Takes back whatever plan is in force on `model`, whoever applied it; returns what was there."""
    found = _installed(model)
    for override in found:
        override.uninstall()
    return found


def _retire(overrides: list[_Override]) -> None:
    for override in overrides:
        override.retired = True


def _installed(model: nn.Module) -> list[_Override]:
    forwards = (module.__dict__.get("forward") for _, module in named_layers(model))
    return [forward for forward in forwards if isinstance(forward, _Override)]


def _computes(model: nn.Module, plan: Plan, *, whole_model: bool) -> dict[str, tuple[nn.Module, str]]:
    """`{path: (module, format)}` of the modules that the plan names, each once.

    Where nothing computes in half, what a planner says of single layers goes without saying: each override would cost a
    layer some microseconds.
    """
    in_float32 = plan.default.compute == "float32" and all(rule.compute == "float32" for rule in plan.layers)
    rules: dict[nn.Module, tuple[str, nn.Module, Rule]] = {}
    for path, module in named_layers(model, all_names=True):
        if (rule := plan.match(path)) is None or (in_float32 and rule.reason not in _BY_HAND):
            continue
        earlier_path, _, earlier = rules.setdefault(module, (path, module, rule))
        if not rule.says_the_same_as(earlier):
            raise PlanError(
                f"{earlier_path!r} and {path!r} are two names of one module, for which the plan has different entries; "
                "keep one of them, or make them the same"
            )
    computes = {path: (module, rule.compute) for path, module, rule in rules.values()}
    if whole_model:
        computes.setdefault("", (unwrap(model), plan.default.compute))
    return computes


def _to_float32(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.float() if tensor.dtype in _HALF else tensor)


def _refuse_what_cannot_run(model: nn.Module, plan: Plan) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is {model!r}; give a torch.nn.Module: hw.apply(model, plan)")
    if not isinstance(plan, Plan):
        raise UsageError(
            f"plan is {plan!r}; give a Plan: one of hw.plan(model, closure), hw.Plan.load('plan.toml'), "
            "or hw.Plan.manual(default='bfloat16')"
        )
    if plan.framework != "torch":
        raise PlanError(
            f"the plan is for framework {plan.framework!r}; this is the PyTorch adapter. Make one with halfwise.torch"
        )
    plan.check_paths([path for path, _ in named_layers(model, all_names=True)], type(unwrap(model)).__name__)
    entries: list[Default | Rule] = [plan.default, *plan.layers]
    for entry in entries:
        name = "default" if isinstance(entry, Default) else entry.name
        if entry.compute not in COMPUTE_DTYPES:
            raise PlanError(
                f"{name!r} asks for compute = {entry.compute!r}, which cannot be executed here; "
                f"allowed: {', '.join(COMPUTE_DTYPES)}"
            )
        _refuse_storage(entry, name)


def _refuse_storage(entry: Default | Rule, name: str) -> None:
    for storage in ("parameters", "saved_activations", "optimizer_state"):
        if getattr(entry, storage) not in (None, "float32"):
            raise PlanError(
                f"{name!r} asks for {storage} = {getattr(entry, storage)!r}, which cannot be executed yet; "
                "allowed: 'float32' (remove the entry)"
            )


def _forget_compiled_code(model: nn.Module) -> None:
    """Compiled code does not notice that a `forward` was replaced, so it is made again."""
    if is_compiled(model):
        torch.compiler.reset()
