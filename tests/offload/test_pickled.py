"""Pickles of ``torch.distributed.checkpoint``: what they may name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from offload.checkpoint.dcp.pickled import unpickled
from swapper.checked import Refused


class _Attribute:
    """Is pickled as Python 3.11.0 to 3.11.3 pickle a member of an enumeration: ``getattr`` of its class."""

    def __init__(self, of: Any, name: Any) -> None:
        self._arguments = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._arguments


def test_a_member_of_an_enumeration_is_read_as_every_python_writes_it():
    for pickled in (WriteItemType.TENSOR, _Attribute(WriteItemType, "TENSOR")):
        assert unpickled(pickle.dumps(pickled), WriteItemType) is WriteItemType.TENSOR


@pytest.mark.parametrize(
    ("of", "name"), [(Metadata, "__init__"), (WriteItemType, "__class__"), (WriteItemType, 1), (7, "real")]
)
def test_no_other_attribute_is_read(of: Any, name: Any):
    with pytest.raises(Refused):
        unpickled(pickle.dumps(_Attribute(of, name)), object)
