"""One optimizer step, whatever the optimizer: how the weight is kept, what its states are, and the checks.

The master weight is kept in one of four ways:

- ``weight_dtype=F32`` alone: the weight is its own master.
- ``weight_dtype=BF16`` and ``rest``, a uint16 array: split master, see ``split_master``.
- ``master``, an fp32 array: ``weight``, of any dtype, is only written, with the new master rounded to it.
- ``weight_dtype=BF16`` alone: the weight is its own master, rounded at random. Inexact.

States are F32, BF16 or INT8 (codes; pass the address of the scales, fp32, one for each ``CODE_BLOCK`` elements from the
start of the call, as ``<state>_scale``). Both are inexact, and rounded at random: up as often as what is cut off says,
so that the mean is exact. The random bits of BF16 come from what an element has become and from the step, those of INT8
from what a block has become: the same bits everywhere, of INT8 for any tiles whose sizes are multiples of
``CODE_BLOCK``. All states, scales included, are zero before step 1.

Bytes of memory traffic per element (read + write), gradients in BF16:

=========================  ===========  ==========  ==========
weight                     F32 moments  BF16        INT8
=========================  ===========  ==========  ==========
F32                        26           18          14
BF16                       22           14          10
split, BF16 + rest         26           18          14
master, BF16 weight out    28           20          16
=========================  ===========  ==========  ==========

for Adam; an F32 gradient adds 2, a second state less takes off 8, 4 or 2. (INT8: and 1/16 for two scales.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import NamedTuple

from offload.native_optimizers import Coef

from . import _kernels
from ._native import Dtype, check_address, check_numbers, check_numel, seed_of

_FORMAT_F32, _FORMAT_SPLIT, _FORMAT_OUT, _FORMAT_BF16 = 0, 1, 2, 5  # WeightFormat in src/arrays.h: _FORMAT_OUT + Dtype


class Sweep(NamedTuple):
    """The arguments of a native kernel, in their order. It takes three states and scales, used or not."""

    constants: Sequence[float]
    numel: int
    grad: int
    grad_dtype: int
    weight: int
    rest: int
    master: int
    weight_format: int
    states: Sequence[int]
    scales: Sequence[int]
    state_dtype: int
    seed: int
    """Of random rounding, to codes and to bf16."""
    weight_shift: int = 0
    """Bytes from where a new weight goes to where the old one stands. On the CPU alone."""
    states_shift: int = 0
    """The same of all else that is written."""


Kernel = Callable[[Sweep], None]

Native = Callable[[str], Kernel]
"""Give a kernel, run by the CPU or by a device, by its name in the native module."""


Threads = Callable[[int], contextlib.AbstractContextManager[int]]
"""Give the number of threads, one at least, that update so many elements within the block. The bits are the same."""


def always(num_threads: int) -> Threads:
    """The same number, whatever it is for."""
    return lambda numel: contextlib.nullcontext(num_threads)


_ONE = always(1)


class OnHost:
    """The CPU, at once."""

    def __init__(self, threads: Threads = _ONE) -> None:
        self._threads = threads

    def __call__(self, name: str) -> Kernel:
        return partial(self._run, name)

    @contextlib.contextmanager
    def lend(self, numel: int) -> Iterator[Native]:
        """Run kernels over so many elements in all, within the block, by the threads for them."""
        with self._threads(numel) as num_threads:
            check_numel(numel, num_threads)
            yield lambda name: partial(_run, getattr(_kernels, name), num_threads)

    def _run(self, name: str, sweep: Sweep) -> None:
        with self.lend(sweep.numel) as native:
            native(name)(sweep)


def _run(kernel: Callable[..., None], num_threads: int, sweep: Sweep) -> None:
    kernel(*sweep, num_threads, None)


class Queue:
    """The CPU, in its own time: kernels run one after the other while the caller goes on, by threads that go from one
    to the next without a pause. No two may touch the same bytes, which must stay until they are done."""

    def __init__(self) -> None:
        self._queue = _kernels.Queue()

    def by(self, num_threads: int, works: list[_kernels.Work]) -> OnQueue:
        """Have kernels run by so many threads; ``works`` gets each of them, to wait for."""
        return OnQueue(self._queue, num_threads, works)


@dataclass(frozen=True)
class OnQueue:
    """Gives kernels to a queue of the CPU."""

    queue: _kernels.Queue
    num_threads: int
    works: list[_kernels.Work]

    def __call__(self, name: str) -> Kernel:
        return partial(self._submit, getattr(_kernels, name))

    def _submit(self, kernel: Callable[..., _kernels.Work], sweep: Sweep) -> None:
        self.works.append(kernel(*sweep, self.num_threads, self.queue))


on_host = OnHost()
"""The CPU, by one thread."""


def update(
    coef: Coef,
    numel: int,
    *,
    grad: int,
    grad_dtype: Dtype,
    weight: int,
    weight_dtype: Dtype,
    rest: int = 0,
    master: int = 0,
    moments_dtype: Dtype = Dtype.F32,
    native: Native = on_host,
    weight_shift: int = 0,
    states_shift: int = 0,
    **states: int,
) -> None:
    """Advance ``numel`` weights by one step of the optimizer that ``coef`` is of, in one pass.

    Shapes:  every array has ``numel`` elements; for the formats see the top of this file. ``states`` are the
             addresses of ``coef.states`` by name, and of their scales as ``<name>_scale``.
             The old weight is read ``weight_shift`` bytes from there, what else is written ``states_shift`` bytes: 0
             is in place. The old arrays and the new ones do not overlap then.
    Effects: writes all arrays but ``grad``. Allocates nothing. ``native`` says who runs the kernel: the CPU, at once,
             or a GPU, whose memory all addresses are then of (``gpu.py``).
    Raises:  ``ValueError`` for an impossible address, count or combination. Nothing has been written in that case.
    """
    names = coef.states
    addresses, scales = [0, 0, 0], [0, 0, 0]
    for index, name in enumerate(names):
        addresses[index], scales[index] = states.pop(name, 0), states.pop(f"{name}_scale", 0)
    given = [grad, weight, rest or grad, master or grad, *addresses[: len(names)]]
    are_words = min(given) > 0 and not reduce(or_, given) & 3
    if not (are_words and numel > 0 and Dtype.INT8 not in (grad_dtype, weight_dtype, moments_dtype)):
        check_numel(numel)  # each small unit passes this by
        check_numbers("grad", grad, grad_dtype, numel)
        check_numbers("weight", weight, weight_dtype, numel)
        for index, name in enumerate(names):
            check_address(name, addresses[index], moments_dtype.itemsize, numel)
            if moments_dtype is Dtype.INT8:
                check_address(f"{name}_scale", scales[index], 4, numel)
    if moments_dtype is Dtype.F16:
        raise ValueError("states are F32, BF16 or INT8: the range of F16 is too small for squares of gradients")
    master, weight_format = _weight_format(numel, weight, weight_dtype, rest, master)
    if states:
        raise ValueError(f"{coef.kernel} has no states {', '.join(states)}: it has {', '.join(names) or 'none'}")
    kernel = native(coef.kernel)
    kernel(
        Sweep(
            coef.constants, numel, grad, grad_dtype, weight, rest, master, weight_format, addresses, scales,
            moments_dtype, seed_of(coef.step), weight_shift, states_shift,
        )
    )  # fmt: skip


def _weight_format(numel: int, weight: int, weight_dtype: Dtype, rest: int, master: int) -> tuple[int, int]:
    """Return the address of the fp32 master (0 for a split one) and the weight format."""
    if master and rest:
        raise ValueError("give master or rest, not both")
    if master:
        check_address("master", master, 4, numel)
        return master, _FORMAT_OUT + weight_dtype
    if rest:
        if weight_dtype is not Dtype.BF16:
            raise ValueError(f"rest is the lower half of a BF16 weight; weight_dtype is {weight_dtype.name}")
        check_address("rest", rest, 2, numel)
        return 0, _FORMAT_SPLIT
    if weight_dtype is Dtype.BF16:
        return 0, _FORMAT_BF16
    if weight_dtype is not Dtype.F32 and numel > 0:
        raise ValueError(f"a {weight_dtype.name} weight needs a master")
    return weight, _FORMAT_F32
