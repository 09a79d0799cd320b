"""Passes of the engine over gradients and weights beside the update, each in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable

from . import _kernels
from ._native import Dtype, check_address, check_numbers, check_numel, seed_of

_INT8 = Dtype.INT8

Bring = Callable[[int, int, Dtype, int, Dtype, int], float]
"""``convert`` or ``accumulate``."""


def sum_squares(address: int, numel: int, dtype: Dtype, num_threads: int = 1) -> float:
    """Return the sum of the squares of ``numel`` elements; the finite check at the same time.

    The sum is infinite or NaN exactly if an element is: squares of finite elements cannot overflow a double. It is
    taken in double, in blocks and lanes that depend on ``numel`` alone: the same bits for any number of threads.

    Cost:   reads every element once; allocates 8 bytes for every 16,384 elements.
    Raises: ``ValueError`` for an impossible address or count.
    """
    check_numel(numel, num_threads)
    check_numbers("address", address, dtype, numel)
    return _kernels.sum_squares(numel, address, dtype, num_threads)


def accumulate(
    numel: int, destination: int, destination_dtype: Dtype, source: int, source_dtype: Dtype, num_threads: int = 1
) -> float:
    """Add ``source`` to ``destination``, element by element, in fp32, rounded to ``destination_dtype`` (nearest, even).

    Returns ``sum_squares`` of ``destination`` as it is then, taken in the same pass.

    Effects: writes ``destination``; reads ``source``. Allocates 8 bytes for every 16,384 elements.
    Cost:    10 bytes of memory traffic per element for bf16 into fp32 (read 4 + 2, write 4).
    Raises:  ``ValueError`` for an impossible address or count. Nothing has been written in that case.
    """
    _check_both(numel, destination, destination_dtype, source, source_dtype, num_threads)
    return _kernels.accumulate(numel, destination, destination_dtype, source, source_dtype, num_threads)


def convert(
    numel: int, destination: int, destination_dtype: Dtype, source: int, source_dtype: Dtype, num_threads: int = 1
) -> float:
    """Write ``source`` to ``destination``, rounded to its dtype (nearest, ties to even; NaNs become the canonical one).

    Returns ``sum_squares`` of ``destination`` as it is then, taken in the same pass.

    Effects: writes ``destination``; reads ``source``. Allocates 8 bytes for every 16,384 elements.
    Cost:    6 bytes of memory traffic per element for fp32 to bf16 (read 4, write 2).
    Raises:  ``ValueError`` for an impossible address or count. Nothing has been written in that case.
    """
    _check_both(numel, destination, destination_dtype, source, source_dtype, num_threads)
    return _kernels.convert(numel, destination, destination_dtype, source, source_dtype, num_threads)


def split_master(numel: int, master_f32: int, weight: int, rest: int, num_threads: int = 1) -> None:
    """Write fp32 ``master_f32`` as bf16 ``weight`` (its upper half, rounded) and 16-bit ``rest`` (its lower half).

    With b the bits of a master: weight = (b + 0x8000) >> 16, rest = b & 0xffff. Lossless for every value; NaNs are made
    canonical first. ``weight`` rounds half away from zero, so only exact ties differ from nearest-even.

    Effects: writes ``weight`` and ``rest``; reads ``master_f32``. Allocates nothing.
    Raises:  ``ValueError`` for an impossible address or count. Nothing has been written in that case.
    """
    _check_master(numel, master_f32, weight, rest, num_threads)
    _kernels.split_master(numel, master_f32, weight, rest, num_threads)


def join_master(numel: int, master_f32: int, weight: int, rest: int, num_threads: int = 1) -> None:
    """Write fp32 ``master_f32`` from ``weight`` and ``rest``, as ``split_master`` left them: its inverse.

    Effects: writes ``master_f32``; reads ``weight`` and ``rest``. Allocates nothing.
    Raises:  ``ValueError`` for an impossible address or count. Nothing has been written in that case.
    """
    _check_master(numel, master_f32, weight, rest, num_threads)
    _kernels.join_master(numel, master_f32, weight, rest, num_threads)


def round_randomly(numel: int, destination_bf16: int, numbers_f32: int, *, step: int, num_threads: int = 1) -> None:
    """Write fp32 numbers as bf16, rounded at random as the update of this step rounds a state of its own.

    Each is rounded away from zero as often as what is cut off says. The random bits depend on the number and the step
    alone: the same bits everywhere. Numbers of bf16 stay.

    Effects: writes ``destination_bf16``; reads ``numbers_f32``. Allocates nothing.
    Raises:  ``ValueError`` for an impossible address or count. Nothing has been written in that case.
    """
    check_numel(numel, num_threads)
    check_address("destination", destination_bf16, 2, numel)
    check_address("numbers", numbers_f32, 4, numel)
    _kernels.round_randomly(numel, destination_bf16, numbers_f32, seed_of(step), num_threads)


def encode(numel: int, codes: int, scales: int, numbers_f32: int, *, signed: bool, num_threads: int = 1) -> None:
    """Write ``numel`` numbers as a state in ``Dtype.INT8``, rounded at random as an update rounds it.

    The random bits depend on what a block holds alone: the same bits everywhere. Numbers that ``decode`` gave keep
    their values exactly. ``signed`` is False for squares, whose codes have no sign: what is below zero gets the least.

    Shapes:  ``codes`` is uint8 ``(numel,)``, ``scales`` fp32, one for each ``CODE_BLOCK`` elements from the start.
    Effects: writes ``codes`` and ``scales``; reads ``numbers_f32``. Allocates nothing.
    Raises:  ``ValueError`` for an impossible address or count. Nothing has been written in that case.
    """
    _check_codes(numel, codes, scales, numbers_f32, num_threads)
    _kernels.encode(numel, codes, scales, numbers_f32, signed, num_threads)


def decode(numel: int, numbers_f32: int, codes: int, scales: int, *, signed: bool, num_threads: int = 1) -> None:
    """Write the fp32 numbers that a state in ``Dtype.INT8`` stands for: the other way round, and exact.

    Effects: writes ``numbers_f32``; reads ``codes`` and ``scales``. Allocates nothing.
    Raises:  ``ValueError`` for an impossible address or count. Nothing has been written in that case.
    """
    _check_codes(numel, codes, scales, numbers_f32, num_threads)
    _kernels.decode(numel, numbers_f32, codes, scales, signed, num_threads)


def dequantize(
    numel: int,
    numbers: int,
    dtype: Dtype,
    codes: int,
    scales_f32: int,
    per_scale: int,
    pairs_f32: int,
    num_threads: int = 1,
) -> None:
    """Write the numbers that 4-bit codes stand for, two a byte, times their scales: the product in fp32, rounded to
    ``dtype`` (nearest, ties to even; NaNs become the canonical one).

    Shapes:  ``codes`` is uint8 ``(ceil(numel / 2),)``, ``scales_f32`` has one for each ``per_scale`` elements,
             ``pairs_f32`` is ``(256, 2)``: for each byte its first number and its second.
    Effects: writes ``numbers``; reads the others. Allocates nothing.
    Cost:    2.5 bytes of memory traffic per element of bf16, and the scales.
    Raises:  ``ValueError`` for an impossible address or count. Nothing has been written in that case.
    """
    check_numel(numel, num_threads)
    if per_scale < 1:
        raise ValueError(f"per_scale must be >= 1, got {per_scale}")
    check_numbers("numbers", numbers, dtype, numel)
    check_address("codes", codes, 1, numel)
    check_address("scales_f32", scales_f32, 4, numel)
    check_address("pairs_f32", pairs_f32, 4, numel)
    _kernels.dequantize(numel, numbers, dtype, codes, scales_f32, per_scale, pairs_f32, num_threads)


def _check_both(
    numel: int, destination: int, destination_dtype: Dtype, source: int, source_dtype: Dtype, num_threads: int
) -> None:
    are_words = destination > 0 < source and not (destination | source) & 3
    if are_words and numel > 0 < num_threads and _INT8 is not destination_dtype and _INT8 is not source_dtype:
        return  # aligned for any of them: each gradient comes here
    check_numel(numel, num_threads)
    check_numbers("destination", destination, destination_dtype, numel)
    check_numbers("source", source, source_dtype, numel)


def _check_codes(numel: int, codes: int, scales: int, numbers_f32: int, num_threads: int) -> None:
    check_numel(numel, num_threads)
    check_address("codes", codes, 1, numel)
    check_address("scales", scales, 4, numel)
    check_address("numbers_f32", numbers_f32, 4, numel)


def _check_master(numel: int, master_f32: int, weight: int, rest: int, num_threads: int) -> None:
    check_numel(numel, num_threads)
    check_address("master_f32", master_f32, 4, numel)
    check_address("weight", weight, 2, numel)
    check_address("rest", rest, 2, numel)


def twist(words: int, times: int) -> None:
    """Replace the 624 32-bit words of a Mersenne Twister's state (MT19937) by the next ones, so many times: as drawing
    624 of its numbers so often does.

    Cost:    0.1 to 0.4 ns a number.
    Raises:  ``ValueError`` for an impossible address or count. Nothing has been written in that case.
    """
    check_address("words", words, 4, 624)
    check_numel(times)
    _kernels.twist(words, times)
