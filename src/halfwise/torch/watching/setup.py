"""What `watch` does once: checks its arguments, names the parameters, warns of weights in half."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from halfwise.errors import UsageError
from halfwise.torch.names import named_layers

__all__ = ["check_arguments", "half_weights_warning", "parameter_names", "to_stderr"]


def check_arguments(model: object, optimizer: object, scaler: object) -> None:
    """Raises `UsageError` unless the three are a module, an optimizer, and a `GradScaler` or None."""
    for given, kind, name in ((model, nn.Module, "model"), (optimizer, Optimizer, "optimizer")):
        if not isinstance(given, kind):
            raise UsageError(
                f"watch({name}={given!r}): it must be a torch {kind.__name__}: hw.watch(model, optimizer, scaler)"
            )
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise UsageError(f"watch(scaler={scaler!r}): it must be a torch.amp.GradScaler, or None for a loop without one")


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Names of the parameters as plans spell them, by `id`; a tied parameter has its first name."""
    names: dict[int, str] = {}
    for path, module in named_layers(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), f"{path}.{name}" if path else name)
    return names


def half_weights_warning(names: Mapping[int, str], trainable: Iterable[Tensor]) -> str:
    """A text if trainable parameters are in half, where bfloat16 silently loses small updates; else `""`."""
    half = [p for p in trainable if p.dtype in (torch.float16, torch.bfloat16)]
    if not half:
        return ""
    dtype = str(half[0].dtype).removeprefix("torch.")
    return (
        f"halfwise: {len(half)} trainable parameters are in half precision, such as {names.get(id(half[0]), '?')} in "
        f"{dtype}; updates below half an ulp are lost\n"
        "fix        model.float()  # float32 master weights; keep torch.autocast for the computation"
    )


def to_stderr(text: str) -> None:
    """Writes `text` and a line break to standard error."""
    sys.stderr.write(text + "\n")
