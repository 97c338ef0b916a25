"""Carrying out a plan on a model, and taking it back.

Each module that a rule names gets a small callable object as its instance's `forward`. Of the ways to run one module in
another precision this one survives deepcopy, pickling, `torch.compile(fullgraph=True)`, activation checkpointing, DDP,
parametrizations and export: the object refers to the module that holds it, so a copy of the model refers to the copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from halfwise.core.plan import Default, Plan, Rule
from halfwise.errors import PlanError
from halfwise.torch.names import named_layers, unwrap
from halfwise.torch.nested import map_tensors
from halfwise.torch.region import COMPUTE_DTYPES, device_type_of, region

__all__ = ["AppliedPlan", "apply", "disabled"]

_HALF = (torch.float16, torch.bfloat16)


def disabled() -> bool:
    """True where the environment says `HALFWISE_DISABLE=1`: everything is plain float32 training."""
    return os.environ.get("HALFWISE_DISABLE", "") not in ("", "0")


def apply(model: nn.Module, plan: Plan) -> AppliedPlan:
    """Makes `model` compute as `plan` says, inside `torch.autocast` or not; names in its `state_dict` stay as they are.

    The default holds for the whole of the model's forward pass; outputs of a model in half precision come
    back in float32 where the caller is not inside an autocast region itself. A plan that is already
    applied to the model is replaced.

    Args:
        model: any module, also compiled or wrapped for data parallelism; paths are those of the plain module.
        plan: what to carry out. Storage formats other than float32, and formats that torch's autocast does not know,
            are refused by name.

    Returns:
        A handle; `handle.remove()` or leaving `with handle:` restores the model exactly.

    Raises:
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
        self.plan = plan
        self._model = model
        self._overrides: dict[str, _Override] = {}
        _refuse_what_cannot_run(model, plan)
        if disabled():
            return
        remove_overrides(model)
        device_type = device_type_of(model)
        one_half = not (plan.uses("float16") and plan.uses("bfloat16"))
        for path, module in named_layers(model):
            rule = plan.match(path)
            compute = rule.compute if rule is not None else plan.default.compute if whole_model and path == "" else None
            if compute is not None:
                self._overrides[path] = _Override(module, compute, device_type, cache=one_half)
        for override in self._overrides.values():
            override.install()
        if self._overrides:
            _forget_compiled_code(model)

    def remove(self) -> None:
        """Restores the model exactly. Doing so twice is harmless."""
        for override in self._overrides.values():
            override.uninstall()
        if self._overrides:
            _forget_compiled_code(self._model)
        self._overrides = {}

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


class _Override:
    """Stands in for a module's `forward`: runs it in `compute`, whatever the region around it."""

    def __init__(self, module: nn.Module, compute: str, device_type: str, *, cache: bool) -> None:
        self.module = module
        self.cache = cache
        self.compute = compute
        self.device_type = device_type
        self.earlier = module.__dict__.get("forward")  # an instance's own forward, put there by someone else
        self.active = True
        self.ran = False
        self.holds_half = any(p.dtype in _HALF for p in module.parameters())  # frozen weights kept in half

    def install(self) -> None:
        self.module.__dict__["forward"] = self

    def uninstall(self) -> None:
        if self.module.__dict__.get("forward") is self:
            if self.earlier is None:
                del self.module.__dict__["forward"]
            else:
                self.module.__dict__["forward"] = self.earlier

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


def remove_overrides(model: nn.Module) -> None:
    """Takes back whatever plan is in force on `model`, whoever applied it."""
    for _, module in named_layers(model):
        override = module.__dict__.get("forward")
        if isinstance(override, _Override):
            override.uninstall()


def _to_float32(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.float() if tensor.dtype in _HALF else tensor)


def _refuse_what_cannot_run(model: nn.Module, plan: Plan) -> None:
    if plan.framework != "torch":
        raise PlanError(
            f"the plan is for framework {plan.framework!r}; this is the PyTorch adapter. Make one with halfwise.torch"
        )
    plan.check_paths([path for path, _ in named_layers(model)], type(unwrap(model)).__name__)
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
    compiled = any(
        "_orig_mod" in module._modules or module._compiled_call_impl is not None for module in model.modules()
    )
    if compiled:
        torch.compiler.reset()
