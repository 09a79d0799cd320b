"""docs/recipes/matrix-optimizers.md, beside the same loops in memory."""

from __future__ import annotations


def test_muon_lamb_and_adafactor_have_the_bits_of_the_loop_in_memory(recipe, tight, same):
    page = recipe("matrix-optimizers.md")
    states = {}
    for make in (page.muon, page.lamb, page.adafactor):
        plain, offloaded = page.build(), page.build()
        page.train(plain, make(plain))
        with tight(offloaded, optimizer=make(offloaded)) as engine:
            page.train(offloaded, engine.optimizer)
            assert engine.plan.nvme_bytes["states"] > 0 and engine.report().nvme_read_bytes > 0
            of_matrix = engine.optimizer.state[offloaded[1][1].weight].values()
            states[make] = sum(value.numel() for value in of_matrix if value.ndim) / offloaded[1][1].weight.numel()
        same(offloaded, plain)
    assert (states[page.muon], states[page.lamb]) == (1, 2) and states[page.adafactor] < 0.02
