"""A PyTorch model as demotion sees it: which paths name one module, and which modules lie inside it."""

from __future__ import annotations

from torch import nn

from halfwise.torch.names import named_layers
from halfwise.torch.profile import is_whole

__all__ = ["ModuleTree"]


class ModuleTree:
    """The modules of `model` by path: a `halfwise.core.demotion.Tree`. A shared module has several paths."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(named_layers(model, all_names=True))
        self._names: dict[nn.Module, list[str]] = {}
        for path, module in self._modules.items():
            self._names.setdefault(module, []).append(path)

    def names(self, path: str) -> list[str]:
        """All paths of the module at `path`, the first one first; none where there is no such module."""
        module = self._modules.get(path)
        return self._names[module] if module is not None else []

    def children(self, path: str) -> list[str]:
        """The modules directly inside, each under its first path; none where they compute as the module itself does."""
        module = self._modules.get(path)
        if module is None or is_whole(module):
            return []
        return [self._names[child][0] for child in module.children()]
