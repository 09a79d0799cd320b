"""Uses that end after an interrupt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload.model.resting import resting_class
from offload.uses import DeviceWindows
from swapper import OffloadError


class Window:
    """Holds what lies in its memory."""

    def __init__(self) -> None:
        self.flat = torch.zeros(4)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() == self.flat.data_ptr()


def end_use(window: Any, parameter: nn.Parameter) -> None:
    """Of a unit with this parameter, which rests: an interrupt came before its use had ended."""
    parameter._backing = SimpleNamespace(name="weight", in_model=nn.Parameter(torch.zeros(4)))  # type: ignore[attr-defined]
    parameter.__class__ = resting_class(nn.Parameter)
    pin: Any = SimpleNamespace(entry=SimpleNamespace(unit=SimpleNamespace(index=0, name="unit"), place=None))
    DeviceWindows([window], [[parameter]]).close(pin)


def test_a_parameter_that_rests_is_looked_at_itself_when_a_use_ends() -> None:
    window = Window()
    end_use(window, nn.Parameter(window.flat))


def test_one_that_was_moved_is_an_error_though_it_rests() -> None:
    with pytest.raises(OffloadError, match="unit unit: its forward has moved its parameters"):
        end_use(Window(), nn.Parameter(torch.zeros(4)))
