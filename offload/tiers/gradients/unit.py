"""The interface of the place where the gradients of one unit rest."""

from __future__ import annotations

from typing import Protocol

import torch

from offload.units import ParameterSpec


class Loan(Protocol):
    """The right to read a unit's gradients where they are, until it is ended. Any thread may end it."""

    address: int

    def end_loan(self) -> None: ...


class UnitGradients:
    """Home of the gradients of one unit, flat, as its weights lie. One thread at a time calls all methods but
    ``lend`` and ``wait_until_spilled``."""

    is_on_device = False
    """The gradients stay on the device that makes them."""
    spills = False
    """The gradients leave host memory after the unit's backward, so that a later read costs a transfer."""
    keeps_used = True
    """Those that a step has used can be read, each until another one is put in its place."""

    def put(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        """Make the parameter's gradient a copy of this one. Like the next two, returns the sum of squares: NaN where it
        is found later."""
        raise NotImplementedError

    def add(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        """Add one to it."""
        raise NotImplementedError

    def rescale_and_add(self, spec: ParameterSpec, factor: float, gradient: torch.Tensor, scale: float) -> float:
        """Multiply it by ``factor``, and add ``scale`` times another one."""
        raise NotImplementedError

    def sum_squares(self, spec: ParameterSpec) -> float:
        """Of the gradient that rests here; NaN where it is found later."""
        raise NotImplementedError

    def read(self, spec: ParameterSpec) -> torch.Tensor:
        """A copy, in host memory."""
        raise NotImplementedError

    def landing(self, spec: ParameterSpec) -> torch.Tensor | None:
        """Memory that a first gradient may be put into from outside, flat; None if it must be brought here by
        ``put``."""
        return None

    def close(self) -> None:
        """The unit has all its gradients of this backward."""

    def use_up(self, *, all_of_them: bool) -> None:
        """The gradients belong to a step now, or some of them do."""
        if all_of_them:
            self.forget()

    def forget(self) -> None:
        """The gradients are not wanted."""

    def leave(self) -> None:
        """The unit's gradients are stored elsewhere from now on. There are none now."""

    def lend(self) -> Loan | None:
        """The gradients where they still lie, if an update that reads them there saves a transfer. Any thread."""
        return None

    def wait_until_spilled(self) -> None:
        """Block until a transfer can read them. Any thread."""

    def begin_squares(self) -> None:
        """Have sums of squares worked out that are found later."""
