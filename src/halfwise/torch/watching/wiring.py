"""The hooks and wrappers by which a `Watch` sees a loop, and their removal.

A failure of the observer never reaches the loop: it is taken off and told of its error. Nothing is told of code that
torch runs only to look at it, such as while it compiles or exports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_compiling
from torch.optim import Optimizer

__all__ = ["Observer", "Wiring"]

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_dispatch_mode = torch._C._get_dispatch_mode
_tracing_state = torch._C._get_tracing_state
_transforms = torch._C._functorch.peek_interpreter_stack


class Observer(Protocol):
    """What is told of the events of a loop."""

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def before_inference(self) -> None: ...
    def forward_broken_off(self) -> None: ...
    def after_forward(self, output: Any, *, training: bool) -> None: ...
    def after_scaling(self, loss: Any) -> None: ...
    def before_scaler_step(self) -> None: ...
    def after_scaler_step(self) -> None: ...
    def after_scaler_update(self) -> None: ...
    def before_optimizer_step(self) -> None: ...
    def after_optimizer_step(self) -> None: ...
    def failed(self, error: Exception) -> None: ...


class Wiring:
    """Attaches an observer; `remove()` takes everything off again, also in the middle of a step.

    The forward pass of a model that was compiled in place (`model.compile()`) is not observed: hooks would be compiled
    with it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None, observer: Observer) -> None:
        self._observer = observer
        self._attached = True
        self._wrappers: list[_Wrapper] = []
        self._hooks: list[_Hook] = []
        self._handles: list[Any] = []

        def hook(call: Callable[..., None]) -> _Hook:
            self._hooks.append(_Hook(call))
            return self._hooks[-1]

        if model._compiled_call_impl is None:

            def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if torch.is_grad_enabled():
                    self._tell(observer.before_forward, args, kwargs)
                else:
                    self._tell(observer.before_inference)

            def after(module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
                if not torch.is_grad_enabled():
                    return
                if output is None and sys.exc_info()[0] is not None:  # the reason for `always_call`
                    self._tell(observer.forward_broken_off)
                else:
                    self._tell(observer.after_forward, output, training=module.training)

            self._handles += [
                model.register_forward_pre_hook(hook(before), with_kwargs=True),
                model.register_forward_hook(hook(after), always_call=True),
            ]
        begin = hook(lambda *_: self._tell(observer.before_optimizer_step))
        end = hook(lambda *_: self._tell(observer.after_optimizer_step))
        self._handles += [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]
        if scaler is not None:
            self._wrap_scaler(scaler, optimizer, observer)

    def remove(self) -> None:
        """Takes off every hook and wrapper. A wrapper that someone else wrapped in turn stays, and does nothing any
        more.
        """
        self._attached = False
        for hook in self._hooks:
            hook.call = None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for wrapper in self._wrappers:
            wrapper.remove()
        self._wrappers = []

    def _tell(self, event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not self._attached:
            return
        try:
            event(*args, **kwargs)
        except Exception as error:
            self.remove()
            self._observer.failed(error)

    def _wrap_scaler(self, scaler: GradScaler, optimizer: Optimizer, observer: Observer) -> None:
        def scale(original: Callable[..., Any], outputs: Any) -> Any:
            self._tell(observer.after_scaling, outputs)
            return original(outputs)

        def step(original: Callable[..., Any], stepped: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if stepped is not optimizer:
                return original(stepped, *args, **kwargs)
            self._tell(observer.before_scaler_step)
            returned = original(stepped, *args, **kwargs)
            self._tell(observer.after_scaler_step)
            return returned

        def update(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self._tell(observer.after_scaler_update)

        for name, around in (("scale", scale), ("step", step), ("update", update)):
            self._wrappers.append(_Wrapper(scaler, name, around))


def _is_real_run() -> bool:
    """False while torch compiles, exports or traces, within `torch.func`'s transforms, and on fake tensors."""
    return not (
        is_compiling() or _tracing_state() is not None or _transforms() is not None or _dispatch_mode(_FAKE) is not None
    )


class _Hook:
    """A hook that does not follow its module into copies: a deep copy or pickle of the model (an average, a checkpoint)
    gets a hook that does nothing.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        if _is_real_run() and self.call is not None:
            self.call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return (_Hook, ())


class _Wrapper:
    """A method of one object with something around it, until `remove()`. Copies of the object have the plain method."""

    def __init__(self, owner: object, name: str, around: Callable[..., Any]) -> None:
        self.original = getattr(owner, name)
        self.active = True
        self._owner = owner
        self._name = name
        self._around = around
        self._before = owner.__dict__.get(name)
        owner.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.active and _is_real_run():
            return self._around(self.original, *args, **kwargs)
        return self.original(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        return (getattr, (self._owner, self._name))

    def remove(self) -> None:
        """Puts back what was there before, but for wrappers that have been removed since. One that someone else wrapped
        in turn stays, and does nothing any more.
        """
        self.active = False
        if self._owner.__dict__.get(self._name) is not self:
            return
        before = self._before
        while isinstance(before, _Wrapper) and not before.active:
            before = before._before
        if before is None:
            del self._owner.__dict__[self._name]
        else:
            self._owner.__dict__[self._name] = before
