"""Which loss scales suit a model in float16, from the exponent histograms of its gradients in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable

from halfwise.core.formats import get_format
from halfwise.core.histogram import ExponentHistogram
from halfwise.core.preflight import LossScaleRange
from halfwise.core.profile import Profile, Role
from halfwise.core.ranges import HEADROOM, LARGEST_UNDERFLOW, LOSS_SCALES

__all__ = ["GRADIENT_ROLES", "largest_fitting_scale", "largest_gradient", "loss_scale_range", "underflow_share"]

GRADIENT_ROLES: tuple[Role, ...] = ("activation_gradient", "weight_gradient")


def loss_scale_range(
    profile: Profile,
    paths: Iterable[str],
    *,
    largest: float | None = None,
    used: float | None = None,
    format_name: str = "float16",
) -> LossScaleRange:
    """The loss scales that suit the layers at `paths`, those that compute in the format.

    Args:
        profile: histograms of a float32 run, loss scale 1.
        paths: the layers.
        largest: the largest scale at which nothing overflows, where that is known better than from the layers' inputs
            and outputs: from every single operation.
        used: the scale that gradients are compared at. Default: the highest that leaves room to grow.
        format_name: the format.

    >>> import numpy as np
    >>> gradients = ExponentHistogram.of(np.array([1e-6, 1e-3, 0.5], np.float32))
    >>> loss_scale_range(Profile({("fc", "activation_gradient"): gradients}), ["fc"])
    LossScaleRange(lowest=1.0, highest=8192.0, largest=65536.0, used=8192.0)
    """
    paths = list(paths)
    found = [h for path in paths for role in GRADIENT_ROLES if (h := profile.get(path, role)) is not None]
    if largest is None:
        largest = largest_fitting_scale(max((largest_gradient(profile, p) for p in paths), default=0.0), format_name)
    highest = max(1.0, largest / HEADROOM)
    return LossScaleRange(
        lowest=_lowest(found, highest, format_name), highest=highest, largest=largest, used=used or highest
    )


def largest_fitting_scale(largest_gradient: float, format_name: str = "float16") -> float:
    """The largest power of two within the bounds of loss scales at which this gradient does not overflow.

    >>> largest_fitting_scale(3.0)
    16384.0
    """
    if largest_gradient <= 0.0:
        return LOSS_SCALES[-1]
    room = get_format(format_name).largest / largest_gradient
    exponent = math.floor(math.log2(room)) if room > 0.0 else 0
    return min(max(2.0**exponent, LOSS_SCALES[0]), LOSS_SCALES[-1])


def largest_gradient(profile: Profile, path: str) -> float:
    """Upper bound of the layer's gradients, those of what it reads and writes and of its weights; 0 without any."""
    found = (h for role in GRADIENT_ROLES if (h := profile.get(path, role)) is not None)
    return max((histogram.largest for histogram in found), default=0.0)


def underflow_share(profile: Profile, path: str, loss_scale: float, format_name: str = "float16") -> float:
    """Share of the layer's non-zero gradients that round to zero in the format: that of the role that loses most."""
    shares = (
        histogram.underflow(format_name, loss_scale).upper
        for role in GRADIENT_ROLES
        if (histogram := profile.get(path, role)) is not None
    )
    return max(shares, default=0.0)


def _lowest(found: list[ExponentHistogram], highest: float, format_name: str) -> float:
    """The lowest scale that loses little more than the highest does: some gradients vanish at any scale."""
    unavoidable = [h.underflow(format_name, highest).upper for h in found]
    for scale in LOSS_SCALES:
        if scale >= highest:
            break
        shares = (h.underflow(format_name, scale).upper for h in found)
        if all(share <= least + LARGEST_UNDERFLOW for share, least in zip(shares, unavoidable, strict=True)):
            return scale
    return highest
