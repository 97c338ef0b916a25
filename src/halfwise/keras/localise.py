"""Finds the layer, operation and line behind a failed training step by running it again.

Up to three replays, as few as the verdict needs: half precision at loss scale 1, plain float32, and half precision at
the loss scale at hand. Everything a replay changes is put back after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import ml_dtypes

from halfwise.core.diagnosis import Diagnosis, Suspect
from halfwise.core.plan import Plan
from halfwise.keras.tracing import fixes
from halfwise.keras.tracing.outside import from_data, from_weights
from halfwise.keras.tracing.places_in_time import agreeing
from halfwise.keras.tracing.replay import Replay, replay
from halfwise.keras.tracing.slicing import Origin, largest_scale, origins_of, reads_from_outside

__all__ = ["FLOAT32", "localise", "precision_verdict"]

FLOAT32 = Plan.manual(default="float32", framework="keras")
_HALF = ("float16", "bfloat16")
