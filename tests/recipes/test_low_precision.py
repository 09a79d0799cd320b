"""docs/recipes/low-precision.md, beside the same loops in memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchao")


def test_layers_of_low_precision_have_the_bits_of_the_loop_in_memory(recipe, tight, same):
    page = recipe("low-precision.md")
    dense = page.build()
    page.train(dense, torch.optim.NAdam(dense.parameters(), lr=1e-3))
    for make in (page.float8, page.mxfp8, page.int8, page.bitnet, page.quantisation_aware, page.sparse):
        plain, offloaded = make(), make()
        page.train(plain, torch.optim.NAdam(plain.parameters(), lr=1e-3))
        with tight(offloaded, optimizer=torch.optim.NAdam(offloaded.parameters(), lr=1e-3)) as engine:
            page.train(offloaded, engine.optimizer)
            assert engine.plan.nvme_bytes["states"] > 0
        same(offloaded, plain)
        assert type(offloaded[1][1].weight) is type(plain[1][1].weight)
        assert not torch.equal(dense[0].weight, plain[0].weight)  # the layers do compute otherwise
