"""The hooks and wrappers by which a `Watch` sees a loop, and their removal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

__all__ = ["Observer", "Wiring"]


class Observer(Protocol):
    """What is told of the events of a loop."""

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def after_forward(self, output: Any, *, training: bool) -> None: ...
    def after_scaling(self, loss: Any) -> None: ...
    def before_scaler_step(self) -> None: ...
    def after_scaler_step(self) -> None: ...
    def after_scaler_update(self) -> None: ...
    def before_optimizer_step(self) -> None: ...
    def after_optimizer_step(self) -> None: ...


class Wiring:
    """Attaches an observer; `remove()` takes everything off again, also in the middle of a step.

    Attributes:
        sees_forward: False where the model was compiled in place (`model.compile()`): its hooks would be compiled with
            it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None, observer: Observer) -> None:
        self._scaler = scaler
        self._wrapped: dict[str, tuple[Any, Any]] = {}
        self.sees_forward = model._compiled_call_impl is None
        self._hooks: list[_Hook] = []
        self._handles: list[Any] = []

        def hook(call: Callable[..., None]) -> _Hook:
            self._hooks.append(_Hook(call))
            return self._hooks[-1]

        if self.sees_forward:

            def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if torch.is_grad_enabled():
                    observer.before_forward(args, kwargs)

            def after(module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
                if torch.is_grad_enabled():
                    observer.after_forward(output, training=module.training)

            self._handles += [
                model.register_forward_pre_hook(hook(before), with_kwargs=True),
                model.register_forward_hook(hook(after)),
            ]
        begin = hook(lambda *_: observer.before_optimizer_step())
        end = hook(lambda *_: observer.after_optimizer_step())
        self._handles += [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]
        if scaler is not None:
            self._wrap_scaler(scaler, optimizer, observer)

    def remove(self) -> None:
        """Takes off every hook and wrapper. A wrapper that someone else wrapped in turn stays, and does nothing any
        more.
        """
        for hook in self._hooks:
            hook.call = None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for name, (ours, before) in self._wrapped.items():
            ours.active = False
            if self._scaler is None or self._scaler.__dict__.get(name) is not ours:
                continue
            if before is None:
                del self._scaler.__dict__[name]
            else:
                self._scaler.__dict__[name] = before
        self._wrapped = {}

    def _wrap_scaler(self, scaler: GradScaler, optimizer: Optimizer, observer: Observer) -> None:
        def scale(original: Callable[..., Any], outputs: Any) -> Any:
            observer.after_scaling(outputs)
            return original(outputs)

        def step(original: Callable[..., Any], stepped: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if stepped is not optimizer:
                return original(stepped, *args, **kwargs)
            observer.before_scaler_step()
            returned = original(stepped, *args, **kwargs)
            observer.after_scaler_step()
            return returned

        def update(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            observer.after_scaler_update()

        for name, around in (("scale", scale), ("step", step), ("update", update)):
            wrapper = _Wrapper(getattr(scaler, name), around)
            self._wrapped[name] = (wrapper, scaler.__dict__.get(name))
            scaler.__dict__[name] = wrapper


class _Hook:
    """A hook that does not follow its module into copies: a deep copy or pickle of the model (an average, a checkpoint)
    gets a
    hook that does nothing.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        if self.call is not None:
            self.call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return (_Hook, ())


class _Wrapper:
    """A method of one object with something around it, until `active` is False."""

    def __init__(self, original: Callable[..., Any], around: Callable[..., Any]) -> None:
        self.original = original
        self.around = around
        self.active = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.original, *args, **kwargs) if self.active else self.original(*args, **kwargs)
