"""What autocast does on a CUDA device, done on a CPU.

`lists.py` says what CUDA's autocast does with each operation, `kernels.py` does that with tensors on a CPU,
`region.py` puts those kernels in place of the CPU's own for a while.

Not reproduced: a GPU accumulates in another order and splits long sums, fused attention rounds inside, and tensor cores
may truncate where this rounds. Sums are taken in float32 here as there.
"""

from __future__ import annotations

from halfwise.torch.emulation.lists import drift
from halfwise.torch.emulation.region import emulated_region, emulation

__all__ = ["drift", "emulated_region", "emulation"]
