"""docs/recipes/pair-bias.md, beside the same loop in memory, and its attention beside one that is written out."""

from __future__ import annotations

import torch


def test_blocks_with_pair_bias_have_the_bits_of_the_loop_in_memory_with_activations_on_nvme(recipe, tight, same):
    page = recipe("pair-bias.md")
    plain, offloaded = page.build(), page.build()
    page.train(plain, torch.optim.NAdam(plain.parameters(), lr=1e-3))
    optimizer = torch.optim.NAdam(offloaded.parameters(), lr=1e-3)
    with tight(offloaded, optimizer=optimizer, activations="nvme", activation_memory=128 << 10) as engine:
        page.train(offloaded, engine.optimizer)
        assert engine.plan.nvme_bytes["states"] > 0 and engine.report().activations.write_bytes > 0
    same(offloaded, plain)


def test_the_fused_attention_is_the_one_that_is_written_out_forward_and_backward(recipe):
    block = recipe("pair-bias.md").PairBlock()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 4, 10, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(2, 1, 4, 10, 10, generator=generator, dtype=torch.float64)
    given = [each.requires_grad_() for each in (q, k, v, bias)]
    fused = block.attend(*given)
    written = (q @ k.transpose(-1, -2) / 8**0.5 + bias).softmax(-1) @ v
    torch.testing.assert_close(fused, written)
    weight = torch.randn(fused.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(fused, given, weight), torch.autograd.grad(written, given, weight), strict=True
    ):
        torch.testing.assert_close(one, other)
