"""How long planning may take: so many float32 training steps, however many layers there are.

Each phase is told what is left when it starts, less what later phases need, and measures less where that is little.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["PLANNING_STEPS", "Budget"]

PLANNING_STEPS = 25.0
"""Float32 training steps that planning may take the time of, beside the steps that train meanwhile."""


@dataclass
class Budget:
    """What planning may spend, and has spent.

    Attributes:
        steps: float32 steps in all.
        step_seconds: of one such step; infinite until one was seen.
        spent: seconds by phase.

    >>> budget = Budget(steps=10.0)
    >>> budget.left()
    inf
    >>> budget.saw_step(0.5)
    >>> budget.spent["times"] = 2.0
    >>> budget.left(), budget.left(reserved=4.0), budget.left(reserved=9.0)
    (3.0, 1.0, 0.0)
    """

    steps: float = PLANNING_STEPS
    step_seconds: float = float("inf")
    spent: dict[str, float] = field(default_factory=dict)

    def saw_step(self, seconds: float) -> None:
        """Takes a step's seconds into account: the shortest counts, for the first ones pay for warming up."""
        self.step_seconds = min(self.step_seconds, seconds)

    def left(self, reserved: float = 0.0) -> float:
        """Seconds left, 0 at the least, where so many steps' time is kept for later phases."""
        if self.step_seconds == float("inf"):
            return float("inf")
        return max(0.0, (self.steps - reserved) * self.step_seconds - sum(self.spent.values()))
