"""Loops of other libraries that take a model and an optimizer, beside the same loops in memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import least_budget
from torch import nn

from offload import OffloadEngine

diffusers = pytest.importorskip("diffusers")

_PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "others.md"


def test_the_example_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    code = re.search(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path)

    def run(source: str) -> tuple[str, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        names: dict[str, object] = {}
        exec(source, names)
        average = names["average"]
        assert isinstance(average, nn.Module)
        values = {name: value.detach().clone() for name, value in average.state_dict().items()}
        if isinstance(engine := names.get("engine"), OffloadEngine):
            assert engine.plan.nvme_bytes["weights"] > 0
            engine.close()
        return capsys.readouterr().out, values

    ours = run(code[1])
    optimizer = "engine = type('', (), {'optimizer': torch.optim.AdamW(model.parameters(), lr=1e-2)})"
    plain = run(re.sub(r"engine = OffloadEngine\(.*\)", optimizer, code[1]))
    numbers = [[float(number) for number in re.findall(r"-?\d+\.\d+", out)] for out in (ours[0], plain[0])]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-3) and len(numbers[0]) == 2
    for name, value in plain[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=1e-4, atol=1e-5)


def _unet() -> nn.Module:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def _diffuse(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], list[torch.Tensor]]:
    """Four steps of the unconditional training script; losses, and the averaged weights."""
    from diffusers.optimization import get_cosine_schedule_with_warmup
    from diffusers.training_utils import EMAModel

    noising = diffusers.DDPMScheduler(num_train_timesteps=100)
    rates = get_cosine_schedule_with_warmup(optimizer, 2, 8)
    average = EMAModel(model.parameters(), decay=0.9)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        images = torch.randn(2, 3, 8, 8, generator=generator)
        noise = torch.randn(2, 3, 8, 8, generator=generator)
        times = torch.randint(0, 100, (2,), generator=generator)
        loss = torch.nn.functional.mse_loss(model(noising.add_noise(images, noise, times), times).sample, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(loss.item())
    average.store(model.parameters())
    average.copy_to(model.parameters())
    averaged = [parameter.detach().clone() for parameter in model.parameters()]
    average.restore(model.parameters())
    return losses, averaged


def test_a_diffusion_model_with_its_own_average_and_schedule(tmp_path: Path):
    options: dict[str, Callable[..., object] | float] = {"lr": 1e-3}
    plain = _unet()
    expected = _diffuse(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    least = least_budget(_unet(), tmp_path, **options)
    model = _unet()
    with OffloadEngine(model, nvme_path=tmp_path, host_memory=least, **options) as engine:
        assert engine.plan.nvme_bytes["states"] > 0
        losses, averaged = _diffuse(model, engine.optimizer)
        assert losses == pytest.approx(expected[0], rel=1e-4)
        for ours, theirs, now in zip(averaged, expected[1], plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
            assert now.shape == ours.shape
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.detach().clone(), theirs.detach(), rtol=1e-3, atol=1e-4)
