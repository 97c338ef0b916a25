"""Twenty planted cases: a healthy model of each kind, with something wrong for half precision in one named layer.

What is planted leaves the function in float32 as it was, or nearly: what is scaled up before or in the layer is scaled
down behind it. Which formats the layer must not compute in follows from the trouble: with enough exponents for it
(bfloat16), overflow and underflow are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BEYOND",
    "CASES",
    "FIRST_POSITION",
    "FORMATS",
    "KEY_OFFSET",
    "OFFSET",
    "SHARPER",
    "SQUARES_BEYOND",
    "TINY",
    "Case",
    "Trouble",
]

Trouble = Literal[
    "overflow", "tiny gradients", "outlier channels", "hand-written norm", "large logits", "large positions"
]

FORMATS = ("float16", "bfloat16")

BEYOND = 2.0**18
"""Four times what float16 holds."""
OFFSET = 2.0**12
"""Of outliers and logits: float16 holds it, and tells apart what differs by 4; bfloat16, by 32."""
KEY_OFFSET = 2.0**10
SHARPER = 4.0
"""Of attention: what queries and keys are multiplied by, or else untrained attention matters to nothing."""
SQUARES_BEYOND = 2.0**10
"""float16 holds it, and not its square."""
TINY = 2.0**-32
"""What gradients are multiplied by."""
FIRST_POSITION = 65472
"""float16 holds it, and bfloat16 tells it from none of the next 64."""

_BARRED: Mapping[Trouble, frozenset[str]] = {
    "overflow": frozenset({"float16"}),
    "tiny gradients": frozenset({"float16"}),
    "hand-written norm": frozenset({"float16"}),
    "outlier channels": frozenset({"float16", "bfloat16"}),
    "large logits": frozenset({"float16", "bfloat16"}),
    "large positions": frozenset({"float16", "bfloat16"}),
}


@dataclass(frozen=True)
class Case:
    """Something wrong in one layer.

    Attributes:
        kind: of the model: a name in `halfwise.workloads.load.BUILT_IN`.
        trouble: what is planted.
        torch, keras: the layer's path in the healthy models of the two frameworks.
        barred: what the layer that has the trouble must not compute in.
    """

    kind: str
    trouble: Trouble
    torch: str
    keras: str
    barred: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.barred:
            object.__setattr__(self, "barred", _BARRED[self.trouble])

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind}: {self.trouble}"


# float16 has digits enough for keys with an offset that bfloat16 cannot bear.
_BFLOAT16_ONLY = frozenset({"bfloat16"})

CASES = (
    Case("convnet", "overflow", "convs.3", "conv4"),
    Case("convnet", "tiny gradients", "convs.0", "conv1"),
    Case("convnet", "large logits", "head", "head"),
    Case("encoder", "overflow", "layers.layers.1.linear2", "layer2.fc2"),
    Case("encoder", "large logits", "layers.layers.2.self_attn", "layer3.attention", _BFLOAT16_ONLY),
    Case("encoder", "outlier channels", "layers.norm", "norm"),
    Case("encoder", "large positions", "patches", "patches"),
    Case("decoder", "overflow", "blocks.1.out", "block2.out"),
    Case("decoder", "tiny gradients", "embedding", "embedding"),
    Case("decoder", "large positions", "embedding", "embedding"),
    Case("lstm", "outlier channels", "norms.0", "norm1"),
    Case("lstm", "hand-written norm", "norms.1", "norm2"),
    Case("lstm", "large logits", "head", "head"),
    Case("recommender", "hand-written norm", "user.norm", "user.norm"),
    Case("recommender", "outlier channels", "user.dense.0", "user.dense1"),
    Case("unet", "hand-written norm", "down.norm2", "down.norm2"),
    Case("unet", "outlier channels", "first", "first"),
    Case("unet", "overflow", "up.conv1", "up.conv1"),
    Case("gan", "overflow", "generator.conv1", "generator.conv1"),
    Case("gan", "tiny gradients", "generator.dense", "generator.dense"),
)
