"""Workloads: a model with its loss and a few batches, which is what `plan` and `preflight` work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from halfwise.errors import UsageError

__all__ = ["Workload"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a function named on the command line returns: `halfwise plan file.py:function`.

    Attributes:
        model: a `torch.nn.Module`, or a `keras.Model`; weights in float32.
        batches: a few batches (2 to 4 are enough), all of the size that training uses.
        loss: PyTorch: `loss(model, batch)` returns the scalar loss of a batch, whatever a batch is, forward pass
            included. Keras: what `model.compile` takes; None means the compiled one. Keras' batches are `(x, y)` or
            `(x, y, sample_weight)`.
        optimizer: as in training, or None. Where it is given, updates that are too small for the weights' format are
            looked for.
        name: for messages and plans.

    Raises:
        UsageError: there is no batch, no model of either framework, or, in PyTorch, no loss.

    Example:
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> net = torch.nn.Linear(4, 1)
        >>> batches = [(torch.ones(8, 4), torch.ones(8, 1))] * 2
        >>> loss = lambda model, batch: mse_loss(model(batch[0]), batch[1])
        >>> Workload(model=net, batches=batches, loss=loss).framework
        'torch'
    """

    model: Any
    batches: Sequence[Any]
    loss: Any = None
    optimizer: Any = None
    name: str = ""

    def __post_init__(self) -> None:
        framework = self.framework
        if not isinstance(self.batches, Sequence) or isinstance(self.batches, str) or not len(self.batches):
            raise UsageError(
                f"Workload(batches={self.batches!r:.60}): give a list of at least one batch; 2 to 4 are good"
            )
        if framework == "torch" and not callable(self.loss):
            raise UsageError(
                f"Workload(loss={self.loss!r:.60}): give a function that returns a batch's loss, such as "
                "lambda model, batch: cross_entropy(model(batch[0]), batch[1])"
            )

    @property
    def framework(self) -> Literal["torch", "keras"]:
        """The framework that the model belongs to. On Keras' torch backend that is Keras."""
        homes = {base.__module__.partition(".")[0] for base in type(self.model).__mro__}
        if "keras" in homes:
            return "keras"
        if "torch" in homes:
            return "torch"
        raise UsageError(f"Workload(model={self.model!r:.60}): give a torch.nn.Module or a keras.Model")
