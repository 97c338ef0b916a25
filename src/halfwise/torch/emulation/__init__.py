"""What autocast does on a CUDA device, done on a CPU.

`lists.py` says what CUDA's autocast does with each operation; `kernels.py` does that with tensors on a CPU, with the
help of `casts.py` and `products.py`; `installation.py` puts those kernels in place of the CPU's own for a while, and
`redirect.py` what models say to autocast by name; `region.py` is what is used.

Not reproduced: a GPU adds in another order, splits long sums and may add the parts in half, and its fused attention
and recurrent kernels round inside; here sums are taken in float32 and rounded once. Operations outside the lists run
as on a CPU, which refuses a few in half that CUDA has (Fourier transforms). In `torch.func`'s transforms gradients are
not rounded to tensorfloat32 or float8. `torch.is_autocast_enabled()` stays True in a region that the model turns off.
"""

from __future__ import annotations

from halfwise.torch.emulation.lists import drift
from halfwise.torch.emulation.region import emulated_region, emulation

__all__ = ["drift", "emulated_region", "emulation"]
