"""docs/recipes/diffusion.md, beside the same loops in memory."""

from __future__ import annotations

import pytest
import torch

diffusers = pytest.importorskip("diffusers")


def _trained(model) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_flux_has_the_bits_of_the_loop_in_memory_with_adapters_and_without(recipe, tight, same):
    page = recipe("diffusion.md")
    for make in (page.build, page.adapted):
        plain, offloaded = make(), make()
        page.train(plain, torch.optim.NAdam(_trained(plain), lr=1e-3))
        optimizer = torch.optim.NAdam(_trained(offloaded), lr=1e-3)
        with tight(offloaded, optimizer=optimizer) as engine:
            page.train(offloaded, engine.optimizer)
            assert engine.plan.nvme_bytes["weights"] > 0
        same(offloaded, plain)


def test_wan_has_the_bits_of_the_loop_in_memory(tight, same):
    def build():
        torch.manual_seed(0)
        return diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=32,
            ffn_dim=48,
            num_layers=6,
            rope_max_seq_len=32,
        )

    def train(model, optimizer):
        generator = torch.Generator().manual_seed(1)
        for step in range(2):
            video = torch.randn(1, 4, 2, 8, 8, generator=generator)
            text = torch.randn(1, 6, 16, generator=generator)
            found = model(video, timestep=torch.tensor([step]), encoder_hidden_states=text).sample
            optimizer.zero_grad()
            found.square().mean().backward()
            optimizer.step()

    plain, offloaded = build(), build()
    train(plain, torch.optim.NAdam(plain.parameters(), lr=1e-3))
    with tight(offloaded, optimizer=torch.optim.NAdam(offloaded.parameters(), lr=1e-3)) as engine:
        train(offloaded, engine.optimizer)
        assert engine.plan.nvme_bytes["weights"] > 0
    same(offloaded, plain)
