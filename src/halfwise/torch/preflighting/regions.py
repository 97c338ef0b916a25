"""In which region a preflight runs: what the target's rules for mixed precision make of a policy, on this machine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from halfwise.core.preflight import PREFLIGHT_POLICIES, native_format
from halfwise.core.targets import HERE, get_target
from halfwise.errors import PolicyError
from halfwise.torch.emulation import emulated_region, emulation
from halfwise.torch.region import region

__all__ = ["Setting", "setting_of"]


class Setting(NamedTuple):
    """A policy on a target, as it is run here.

    Attributes:
        policy: a key of `PREFLIGHT_POLICIES`.
        target: the target's name.
        device_type: `"cuda"`, `"tpu"` or `"cpu"`: whose rules hold.
        on: the kind of device that runs it.
        compute: the format that layers compute in: a value of `PREFLIGHT_POLICIES`.
        half: the 16-bit format that results have, `"float32"` where they stay in 32 bits.
        emulated: whether the rules are another device's.
    """

    policy: str
    target: str
    device_type: str
    on: str
    compute: str
    half: str
    emulated: bool

    def region(self) -> AbstractContextManager[object]:
        """A context that runs things under the policy."""
        if not self.emulated:
            return region(self.on, self.compute)
        return emulated_region(self.device_type, self.compute)

    def whole_run(self) -> AbstractContextManager[object]:
        """A context for a run with its backward pass, which may compute parts of the forward pass again."""
        return emulation(self.compute) if self.emulated else nullcontext()

    @property
    def products(self) -> str:
        """The format that the operands of products are rounded to."""
        return native_format(self.policy)

    @property
    def autocast_device(self) -> str:
        """What `torch.autocast` calls the target's device."""
        return "xla" if self.device_type == "tpu" else self.device_type

    def full(self) -> AbstractContextManager[object]:
        """A context that runs things in float32."""
        return region(self.on, "float32")


def setting_of(policy: str, target: str, on: str) -> Setting:
    """What `policy` means on `target`, for a model that lies on a device of the kind `on`.

    Raises:
        PolicyError: there is no such target, or the policy cannot be emulated for a model on that device.
    """
    compute = PREFLIGHT_POLICIES[policy]
    device_type = on if target == HERE else get_target(target).device_type
    half = {"float8": "bfloat16", "tensorfloat32": "float32"}.get(compute, compute)
    emulated = device_type != on or compute in ("float8", "tensorfloat32")
    if emulated and on != "cpu":
        raise PolicyError(
            f"preflight(policy={policy!r}, target={target!r}) emulates on a CPU, and the model lies on {on!r}: "
            'move model and batches there with .to("cpu"), or give target="here"'
        )
    return Setting(policy, target, device_type, on, compute, half, emulated)
