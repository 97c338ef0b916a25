"""The compiled counting loops behind `exponent_counts`. Importing this module imports numba, so import it on demand.

Counting at memory speed. The plain loop, one increment for each value, is bound by stores: a core retires about one
store a cycle, whatever the memory could deliver. `count_float32` halves the stores and hides the memory behind them:

1. *Codes*. A block of values becomes an array of 14-bit codes, two values to a code. This loop has no data-dependent
   store, so the compiler turns it into SIMD instructions. The pairs are (i-th value of the first half, i-th value of
   the second half): two sequential streams, which need no shuffles and which hardware prefetchers follow.
2. *Counts*. One increment for each code in a joint table of 128 x 128 counters, of which real data touch a few KiB.
   Meanwhile the next block is prefetched, so that its memory latency passes under the increments.

A 7-bit half code holds a window of 111 bins (28 binades), slots for zeros, and one slot for everything else, which is
then recounted one by one; a block with much of it is counted by the plain loop. Any data are counted exactly; only the
speed depends on the window.

Increments of one counter in quick succession wait for each other, and a processor that guesses wrongly which ones do
loses more still (on data that are half zeros the plain loop with one table takes nearly three times as long). So zeros
take 16 slots in turn, and where another single bin holds much of the data, each counter gets 4 copies, used in turn.

Bits are `uint32` throughout. numba promotes `uint32 - uint32` to 64 bits, where the wrap of 0 - 1 would index out of
bounds: hence the `U32(...)` around every operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

__all__ = ["BINS", "WINDOW", "count_float32", "count_float32_plain", "count_patterns"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
UInt16s = npt.NDArray[np.uint16]
UInt32s = npt.NDArray[np.uint32]

U16 = np.uint16
U32 = np.uint32
BINS = 2048  # 0 to 1019 finite (1019 also inf), 1020 to 1023 NaN, 2047 zero
WINDOW = 111  # bins that a code can tell apart
MAGNITUDE = U32(0x7FFFFFFF)
SHIFT = U32(21)  # leaves the exponent and two mantissa bits: four bins a binade
ZERO = U32(2047)
ZERO_BIT = U32(10)  # set in the index of a zero only
ONE = U32(1)
SLOT_BITS = U32(7)
OUTSIDE = U32(111)  # the slot of what is neither zero nor in the window
ZERO_SLOTS = U32(112)  # the first of sixteen
LOW_SLOT = U16(127)  # the bits of a code's first slot
CODES = 8192  # codes in a block: 64 KiB of values, 16 KiB of codes
STRIP = 256  # values or codes that are looked at together
LINE = 16  # float32 values in a cache line of 64 bytes


def _compile(function: _Function) -> _Function:
    """`function` compiled on its first call, to run without the GIL; kept on disk where that can be written."""

    def compiled(cache: bool) -> Any:
        return numba.njit(cache=cache, nogil=True, boundscheck=False, error_model="numpy")(function)

    try:
        return cast(_Function, compiled(cache=True))
    except RuntimeError:  # a read-only installation and no writable cache directory: compile anew in each process
        return cast(_Function, compiled(cache=False))


def _prefetch(_: Any, address: Any) -> Any:
    """Ask for the cache line at `address` (int64). A hint: an address outside the array does no harm."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(function, [pointer, i32(0), i32(3), i32(1)])  # to read, into all caches, data
        return arguments[0]

    return address(address), generate


prefetch = cast(Callable[[int], int], intrinsic(_prefetch))


@_compile
def _index(bits: np.uint32) -> np.uint32:
    """The bin of a float32 value, given its bits."""
    return U32(U32(U32(bits & MAGNITUDE) - ONE) >> SHIFT)


@_compile
def _fill_codes(first: UInt32s, second: UInt32s, codes: UInt16s, base: np.uint32) -> None:
    """Write the codes of the pairs `(first[i], second[i])`."""
    offset = U32(U32(base << SHIFT) + ONE)
    for i in range(codes.size):
        a = U32(first[i] & MAGNITUDE)
        b = U32(second[i] & MAGNITUDE)
        # Below the window the subtraction wraps to more than any slot.
        slot_a = U32(min(U32(U32(a - offset) >> SHIFT), OUTSIDE))
        slot_b = U32(min(U32(U32(b - offset) >> SHIFT), OUTSIDE))
        zero_slot = U32(ZERO_SLOTS | U32(U32(i) & U32(15)))
        slot_a = zero_slot if a == 0 else slot_a
        slot_b = zero_slot if b == 0 else slot_b
        codes[i] = U16(slot_a | U32(slot_b << SLOT_BITS))


@_compile
def _count_outside(codes: UInt16s) -> np.uint16:
    """How many of the values in a block's codes are neither zero nor in the window."""
    count = U16(0)
    for i in range(codes.size):
        is_first = U16(U16(codes[i] & LOW_SLOT) == U16(OUTSIDE))
        is_second = U16(U16(codes[i] >> U16(SLOT_BITS)) == U16(OUTSIDE))
        count = U16(count + U16(is_first + is_second))
    return count


@_compile
def _outside(index: np.uint32, base: np.uint32) -> np.uint32:
    """1 for a value that is neither zero nor in the window, else 0. Arithmetic, since branches would prevent SIMD."""
    return U32(U32(min(U32(index - base), OUTSIDE) + U32(17)) >> SLOT_BITS) ^ U32(index >> ZERO_BIT)


@_compile
def _any_outside(values: UInt32s, base: np.uint32) -> bool:
    """True where some value is neither zero nor in the window."""
    found = U32(0)
    for i in range(values.size):
        found = U32(found | _outside(_index(values[i]), base))
    return bool(found != 0)


@_compile
def _recount(values: UInt32s, base: np.uint32, found: UInt32s, bins: UInt32s) -> None:
    """Add to `bins` the values that are neither zero nor in the window. `found` is scratch, shape (STRIP,)."""
    for start in range(0, values.size, STRIP):
        if _any_outside(values[start : start + STRIP], base):
            count = U32(0)
            for i in range(start, start + STRIP):  # no branch here: the processor could not predict it
                index = _index(values[i])
                found[count] = index
                count = U32(count + _outside(index, base))
            for i in range(count):
                bins[found[i]] += ONE


@_compile
def _all_equal(codes: UInt16s) -> bool:
    """True where all codes are the same."""
    different = U16(0)
    expected = codes[0]
    for i in range(codes.size):
        different = U16(different | U16(codes[i] ^ expected))
    return bool(different == 0)


@_compile
def _count_codes(codes: UInt16s, table: UInt32s, next_first: int, next_second: int) -> None:
    """Add the codes to `table`, shape (128 * 128,); prefetch the next block's two streams from their addresses."""
    for start in range(0, codes.size, STRIP):
        if _all_equal(codes[start : start + STRIP]):
            table[codes[start]] += U32(STRIP)
            continue
        for line in range(start, start + STRIP, LINE):
            prefetch(next_first + 4 * line)
            prefetch(next_second + 4 * line)
            for i in range(line, line + LINE):
                table[codes[i]] += ONE


@_compile
def _count_codes_in_copies(codes: UInt16s, table: UInt32s, next_first: int, next_second: int) -> None:
    """As `_count_codes`, with 4 counters side by side for each code: shape (128 * 128 * 4,)."""
    for start in range(0, codes.size, STRIP):
        if _all_equal(codes[start : start + STRIP]):
            table[U32(U32(codes[start]) << U32(2))] += U32(STRIP)
            continue
        for line in range(start, start + STRIP, LINE):
            prefetch(next_first + 4 * line)
            prefetch(next_second + 4 * line)
            for i in range(line, line + LINE, 4):
                for copy in range(4):
                    table[U32(U32(U32(codes[i + copy]) << U32(2)) + U32(copy))] += ONE


@_compile
def _fold_table(table: UInt32s, slots: UInt32s) -> None:
    """Add each pair's count to the slots of its two values, shape (128,)."""
    for second in range(slots.size):
        row = table[second * slots.size : (second + 1) * slots.size]
        total = U32(0)
        for first in range(slots.size):
            slots[first] += row[first]
            total = U32(total + row[first])
        slots[second] += total


@_compile
def _fold_table_of_copies(table: UInt32s, slots: UInt32s) -> None:
    """As `_fold_table`, for a table with four counters for each pair."""
    for second in range(slots.size):
        row = table[second * slots.size * 4 : (second + 1) * slots.size * 4]
        total = U32(0)
        for first in range(slots.size):
            at = 4 * first
            count = U32(U32(row[at] + row[at + 1]) + U32(row[at + 2] + row[at + 3]))
            slots[first] += count
            total = U32(total + count)
        slots[second] += total


@_compile
def _count_plain(values: UInt32s, copies: UInt32s) -> None:
    """Add the values to `copies`, shape (4 * BINS,): four counters side by side for each bin."""
    whole = values.size // 4 * 4
    for i in range(0, whole, 4):
        for copy in range(4):
            copies[U32(U32(_index(values[i + copy]) << U32(2)) + U32(copy))] += ONE
    for i in range(whole, values.size):
        copies[U32(_index(values[i]) << U32(2))] += ONE


@_compile
def _fold_copies(copies: UInt32s, bins: UInt32s) -> None:
    """Add the four counters of each bin to `bins`."""
    for index in range(bins.size):
        at = 4 * index
        bins[index] += U32(U32(copies[at] + copies[at + 1]) + U32(copies[at + 2] + copies[at + 3]))


@_compile
def count_float32_plain(values: UInt32s, bins: UInt32s) -> None:
    """Add the values to `bins` one by one. For few values, where a table of pairs would not pay.

    Args:
        values: the bits of float32 values, shape (n,).
        bins: `BINS` counters, added to.
    """
    copies = np.zeros(4 * BINS, np.uint32)
    _count_plain(values, copies)
    _fold_copies(copies, bins)


@_compile
def count_float32(values: UInt32s, base: np.uint32, copies: np.uint32, bins: UInt32s) -> None:
    """Add the values to `bins` by pairs: see the head of this module.

    Args:
        values: the bits of float32 values, shape (n,), n below 2^31 so that no counter overflows.
        base: first bin of the window, which holds `base` to `base + 110`; at most 909.
        copies: counters for each pair of bins, 1 or 4: 4 where a single bin holds much of the data.
        bins: `BINS` counters, added to.
    """
    half = values.size // 2 // CODES * CODES
    first = values[:half]
    second = values[half : 2 * half]
    first_address = first.ctypes.data
    second_address = second.ctypes.data
    codes = np.empty(CODES, np.uint16)
    table = np.zeros((1 << 14) * np.int64(copies), np.uint32)
    plain = np.zeros(4 * BINS, np.uint32)
    found = np.empty(STRIP, np.uint32)
    for start in range(0, half, CODES):
        stop = start + CODES
        _fill_codes(first[start:stop], second[start:stop], codes, base)
        outside = _count_outside(codes)
        if outside > CODES // 512:  # one value of 1024: recounting would take as long
            _count_plain(first[start:stop], plain)
            _count_plain(second[start:stop], plain)
            continue
        if outside:
            _recount(first[start:stop], base, found, bins)
            _recount(second[start:stop], base, found, bins)
        if copies == ONE:
            _count_codes(codes, table, first_address + 4 * stop, second_address + 4 * stop)
        else:
            _count_codes_in_copies(codes, table, first_address + 4 * stop, second_address + 4 * stop)
    slots = np.zeros(1 << 7, np.uint32)
    if copies == ONE:
        _fold_table(table, slots)
    else:
        _fold_table_of_copies(table, slots)
    for slot in range(WINDOW):
        bins[U32(base + U32(slot))] += slots[slot]
    bins[ZERO] += slots[ZERO_SLOTS:].sum()
    _count_plain(values[2 * half :], plain)
    _fold_copies(plain, bins)


@_compile
def count_patterns(values: npt.NDArray[np.unsignedinteger[Any]], mask: np.uint32, counts: UInt32s) -> None:
    """Add to `counts[v & mask]` for each of the bit patterns `v`, shape (n,), 8 or 16 bits wide."""
    copies = np.zeros(4 * counts.size, np.uint32)
    whole = values.size // 4 * 4
    for i in range(0, whole, 4):
        for copy in range(4):
            copies[U32(U32(U32(values[i + copy] & mask) << U32(2)) + U32(copy))] += ONE
    for i in range(whole, values.size):
        copies[U32(U32(values[i] & mask) << U32(2))] += ONE
    _fold_copies(copies, counts)
