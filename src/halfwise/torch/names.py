"""Module paths as plans, profiles and diagnoses spell them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["clean_path", "named_layers", "unwrap"]

_WRAPPER_PREFIXES = ("_orig_mod", "module")


def clean_path(path: str) -> str:
    """`path` without the components that wrappers add: `_orig_mod` (torch.compile) and a leading `module` (DDP).

    >>> clean_path("_orig_mod.module.encoder.0")
    'encoder.0'
    """
    parts = path.split(".") if path else []
    parts = [part for part in parts if part != "_orig_mod"]
    while parts and parts[0] in _WRAPPER_PREFIXES:
        parts = parts[1:]
    return ".".join(parts)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside `torch.compile` and data-parallel wrappers."""
    while True:
        if isinstance(
            compiled := model._modules.get("_orig_mod"), nn.Module
        ):  # without importing torch._dynamo, which is slow
            model = compiled
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`(path, module)` of the unwrapped model and all its submodules, each module once, wrappers' prefixes removed."""
    for path, module in unwrap(model).named_modules():
        yield clean_path(path), module
