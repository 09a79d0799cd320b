"""docs/recipes/techniques.md, beside the same loops in memory."""

from __future__ import annotations

import copy

import torch


class Averaged(torch.optim.AdamW):
    """AdamW with the moving average of each weight as one of its states."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                state.setdefault("average", parameter.clone()).lerp_(parameter, 0.1)


def test_dropped_layers_and_both_averages_have_the_bits_of_the_loop_in_memory(recipe, tight, same):
    page = recipe("techniques.md")
    plain, offloaded = page.build(), page.build()
    of_plain = [copy.deepcopy(plain), copy.deepcopy(plain)]
    of_offloaded = [copy.deepcopy(offloaded), copy.deepcopy(offloaded)]
    page.train(plain, torch.optim.NAdam(plain.parameters(), lr=1e-3), *of_plain)
    optimizer = torch.optim.NAdam(offloaded.parameters(), lr=1e-3)
    with (
        tight(offloaded, optimizer=optimizer) as engine,
        tight(of_offloaded[0], optimizer=None) as ema,
        tight(of_offloaded[1], optimizer=None) as swa,
    ):
        page.train(offloaded, engine.optimizer, *of_offloaded)
        assert all(each.plan.nvme_bytes["weights"] > 0 for each in (engine, ema, swa))
    for one, other in zip((offloaded, *of_offloaded), (plain, *of_plain), strict=True):
        same(one, other)


def test_states_of_a_block_that_is_not_called_are_not_moved(recipe, tight):
    page = recipe("techniques.md")
    moved = {}
    for kept in (1.0, -1e9):  # all of them, none
        model = page.build()
        with tight(model, lr=1e-3) as engine:
            model.kept = kept
            for _ in range(3):
                engine.backward(model(torch.arange(8)[None]).square().mean())
                engine.step()
            engine.synchronize()
            moved[kept] = engine.report().nvme_write_bytes
            blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    assert moved[1.0] - moved[-1e9] >= 12 * blocks  # master and moments


def test_an_average_among_the_states_of_an_optimizer_has_the_bits_of_the_loop_in_memory(recipe, tight, same):
    page = recipe("techniques.md")
    plain, offloaded = page.build(), page.build()
    spare = [page.build(), page.build()]
    optimizer = Averaged(plain.parameters(), lr=1e-3)
    page.train(plain, optimizer, *spare, 3)
    with tight(offloaded, optimizer=Averaged(offloaded.parameters(), lr=1e-3)) as engine:
        page.train(offloaded, engine.optimizer, *spare, 3)
        for ours, theirs in zip(offloaded.parameters(), plain.parameters(), strict=True):
            assert torch.equal(engine.optimizer.state[ours]["average"], optimizer.state[theirs]["average"])
    same(offloaded, plain)
