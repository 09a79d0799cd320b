"""Finds what a module writes to its own weights while its forward runs: a largest norm, a clamp, a projection.

Code outside of a forward writes to handles, which pass it on. Inside of it there are ordinary parameters over memory
that is not the weights' home: a change must be found, or it is lost when the unit is evicted.

A change through autograd's eyes moves the parameter's version, and ``parameter.data = tensor`` its address: both are
looked at after each forward. A change in place of ``parameter.data`` shows in the bytes alone. They are compared in the
first forward with gradients and in the first one without; a module that changed them there has them compared in each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OwnWrites:
    """Looks at the parameters in one unit's window, before and after each of its forwards."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """They may be the tensors that parameters wrap."""
        self._parameters = parameters
        self._views = [parameter.data for parameter in parameters]
        """Memory to which each parameter belongs."""
        self._compares_bytes = {True: True, False: True}
        """In forwards with gradients, and in those without."""
        self._mode = True
        """Of the forward that runs: with gradients."""
        self._versions: list[int] = []
        self._sums: list[torch.Tensor] = []

    def begin(self) -> None:
        """The forward begins; the weights are there."""
        self._versions = [parameter._version for parameter in self._parameters]
        self._sums = []
        self._mode = torch.is_grad_enabled()
        if self._compares_bytes[self._mode]:
            self._sums = self._added_up()

    def end(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The forward is over: the index of each parameter that was changed and its value, an own copy. Parameters that
        were pointed elsewhere are put back."""
        changed = []
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            moved = parameter.data_ptr() != view.data_ptr()
            if moved or parameter._version != self._versions[index]:
                changed.append(index)
        if self._sums:
            pairs = enumerate(zip(self._sums, self._added_up(), strict=True))
            by_bytes = [index for index, (before, after) in pairs if not torch.equal(before, after)]
            self._compares_bytes[self._mode] = bool(by_bytes)
            changed = sorted({*changed, *by_bytes})
        for index in changed:
            parameter, view = self._parameters[index], self._views[index]
            value = parameter.detach().clone()
            parameter.data = view
            yield index, value

    def _added_up(self) -> list[torch.Tensor]:
        """A number for each parameter's bytes."""
        with torch.no_grad():
            sums = [_sum_of_words(parameter.detach().reshape(-1)) for parameter in self._parameters]
        return sums if all(type(number) is torch.Tensor for number in sums) else []  # a fake one has no value


def _sum_of_words(flat: torch.Tensor) -> torch.Tensor:
    """The bytes of a one-dimensional tensor, added up eight at a time: a sum of narrower numbers would first copy
    all of them into the sum's dtype."""
    in_word = 8 // flat.itemsize
    if flat.storage_offset() % in_word:
        flat = flat.clone()
    rest = flat.numel() % in_word
    words, left = flat[: flat.numel() - rest], flat[flat.numel() - rest :]
    return words.view(torch.int64).sum() + left.view(_AS_INTEGERS[flat.itemsize]).sum(dtype=torch.int64)
