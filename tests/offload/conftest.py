from collections.abc import Callable

import pytest
import torch
from tiny import Tiny


@pytest.fixture
def make_model() -> Callable[..., Tiny]:
    def make(**options: int) -> Tiny:
        torch.manual_seed(0)
        return Tiny(**options)

    return make
