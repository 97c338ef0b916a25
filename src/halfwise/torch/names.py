"""Module paths as plans, profiles and diagnoses spell them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["clean_path", "is_compiled", "named_layers", "unwrap"]


def clean_path(path: str) -> str:
    """`path` without the components that wrappers add: `_orig_mod` (torch.compile) and a leading `module` (DDP).

    For names alone. Where the model is at hand `named_layers` is exact: a user's own module may be called `module`.

    >>> clean_path("_orig_mod.module.encoder.0")
    'encoder.0'
    """
    parts = _without_compilation(path).split(".")
    while parts and parts[0] == "module":
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


def is_compiled(model: nn.Module) -> bool:
    """True where `torch.compile` was applied to the model or a part of it."""
    return any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in model.modules())


def named_layers(model: nn.Module, *, all_names: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """`(path, module)` of the unwrapped model and all its submodules, wrappers' prefixes removed.

    Each module comes once, under its first name; with `all_names` under each of its names.
    """
    for path, module in unwrap(model).named_modules(remove_duplicate=not all_names):
        yield _without_compilation(path), module


def _without_compilation(path: str) -> str:
    return ".".join(part for part in path.split(".") if part != "_orig_mod")
