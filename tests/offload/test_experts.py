"""Experts are units of their own: the numbers of the plain model, and the bytes of what tokens were sent to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experts import CONFIGS, built, of_modules, text, transformers
from tiny import least_budget
from torch import nn

from offload import BudgetError, ConfigError, OffloadEngine
from offload.testing.simulated import SimulatedDevice
from offload.torch_internals import can_swap_memory
from offload.units.find import find_units

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-4}


def places(model: nn.Module, path: Path, **options: Any) -> list[dict[str, Any]]:
    """Options of an engine with everything in RAM, and of one with as little as works."""
    return [{}, {"nvme_path": path, "host_memory": least_budget(model, path, **options)}]


def three_steps(model: Any, call: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Losses, the gradients of the first step, and the weights after the last one."""
    losses, gradients = [], {}
    for step in range(3):
        tokens = text(seed=step)
        loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return [losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", CONFIGS)
def test_training_has_the_numbers_of_the_plain_model_in_ram_and_at_the_least_budget(kind: str, tmp_path: Path) -> None:
    plain = built(CONFIGS[kind]())
    losses, gradients, weights = three_steps(plain, plain, torch.optim.AdamW(plain.parameters(), **ADAMW))
    runs = []
    for options in places(built(CONFIGS[kind]()), tmp_path, **ADAMW):
        model = built(CONFIGS[kind]())
        with OffloadEngine(model, **ADAMW, **options) as engine:
            runs.append(three_steps(model, engine, engine.optimizer))
    for own_losses, own_gradients, own_weights in runs:
        assert own_losses[0] == losses[0]
        assert own_losses == pytest.approx(losses, rel=1e-5)
        assert own_gradients.keys() == gradients.keys()
        assert all(torch.equal(value, own_gradients[name]) for name, value in gradients.items())
        torch.testing.assert_close(own_weights, weights, rtol=0, atol=2e-5)  # the kernels round in another way
    assert all(torch.equal(value, runs[1][2][name]) for name, value in runs[0][2].items())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", CONFIGS)
def test_generation_has_the_tokens_of_the_plain_model(kind: str, tmp_path: Path) -> None:
    how = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = built(CONFIGS[kind]()).eval().generate(text(1), **how)
    for options in places(built(CONFIGS[kind]()), tmp_path, optimizer=None):
        model = built(CONFIGS[kind]()).eval()
        with OffloadEngine(model, optimizer=None, **options) as engine:
            found = engine.module.generate(text(1), **how)
        assert torch.equal(found.sequences, expected.sequences)
        assert all(map(torch.equal, found.logits, expected.logits))


def test_micro_batches_that_use_other_experts_run_together_with_the_bits_of_the_loop(tmp_path: Path) -> None:
    """One that is held up at its experts gives the router its gradient before those after it, all the same."""
    runs: list[Any] = []
    for together in (False, True):
        model = built(CONFIGS["glm4_moe"]())
        with OffloadEngine(model, **ADAMW, nvme_path=tmp_path, gradient_accumulation_steps=3) as engine:

            def of(tokens: torch.Tensor, engine: OffloadEngine = engine) -> float:
                loss = engine(input_ids=tokens, labels=tokens).loss
                engine.backward(loss)
                return float(loss)

            losses = []
            for step in range(3):
                tokens = [text(seed=10 * step + number) for number in range(3)]
                losses.append(engine.together(tokens, of) if together else [of(each) for each in tokens])
                engine.step()
            runs.append((losses, {name: p.detach().clone() for name, p in model.named_parameters()}))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())


def test_an_expert_is_a_unit_and_the_layer_around_it_is_another() -> None:
    units = {unit.name: unit for unit in find_units(built(CONFIGS["gpt_oss"]()), whole=())}
    expert = units["model.layers.1.mlp.experts[5:6]"]
    prefix = "model.layers.1.mlp.experts"
    assert [(spec.name, tuple(spec.shape)) for spec in expert.parameters] == [
        (f"{prefix}.gate_up_proj[5:6]", (1, 64, 192)),
        (f"{prefix}.gate_up_proj_bias[5:6]", (1, 192)),
        (f"{prefix}.down_proj[5:6]", (1, 96, 64)),
        (f"{prefix}.down_proj_bias[5:6]", (1, 64)),
    ]
    assert expert.depth == 1
    assert not any("experts" in spec.name for spec in units["model.layers.1"].parameters)
    assert sum(unit.experts is not None for unit in units.values()) == 16
    whole = find_units(built(CONFIGS["gpt_oss"]()), whole=(), experts=())
    assert sum(unit.experts is not None for unit in whole) == 16  # a class of transformers says so itself


def test_the_least_budget_is_a_few_experts(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=512,
        intermediate_size=512, moe_intermediate_size=60, num_experts=64, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) * 4 > 51e6
    most = 3 if can_swap_memory() else 5  # MiB: a torch that cannot swap has copies of the weights in use
    assert least_budget(model, tmp_path, optimizer=None) < most << 20


def test_a_fused_expert_without_tokens_has_a_gradient_of_zeros_and_its_moments_decay(tmp_path: Path) -> None:
    plain = built(CONFIGS["mixtral"]())
    model = built(CONFIGS["mixtral"]())
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    with OffloadEngine(model, **ADAMW, **places(model, tmp_path, **ADAMW)[1]) as engine:
        for seed in (1, 2):
            tokens = text(1, 2, seed)
            for of in (plain, engine):
                of(input_ids=tokens, labels=tokens).loss.backward()
            of_layer = [of.model.layers[1].mlp.experts.down_proj for of in (plain, model)]
            gradients = [weight.grad.detach().clone() for weight in of_layer]
            assert not gradients[0].flatten(1).any(-1).all()  # no token was sent to some expert
            assert [e.any().item() for e in gradients[0]] == [e.any().item() for e in gradients[1]]
            for own in (optimizer, engine.optimizer):
                own.step()
                own.zero_grad()
        torch.testing.assert_close(of_layer[1].detach().clone(), of_layer[0], rtol=0, atol=1e-6)
        moments: Any = [
            own.state[weight]["exp_avg"] for own, weight in zip((optimizer, engine.optimizer), of_layer, strict=True)
        ]
        torch.testing.assert_close(moments[1].clone(), moments[0], rtol=0, atol=1e-8)


def test_an_expert_that_is_a_module_without_tokens_has_no_gradient_and_stays(tmp_path: Path) -> None:
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(3))
    plain, model = of_modules(), of_modules()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    with OffloadEngine(model, **ADAMW, **places(of_modules(), tmp_path, **ADAMW)[1]) as engine:
        names = [item.unit.name for item in engine.plan.units if item.unit.experts is not None]
        assert names == [f"{layer}.experts.{expert}" for layer in range(3) for expert in range(8)]
        for of in (plain, engine):
            of(x).square().mean().backward()
        touched = {name for name, p in plain.named_parameters() if p.grad is not None}
        assert len(touched) < len(list(plain.parameters()))
        assert touched == {name for name, p in model.named_parameters() if p.grad is not None}
        for own in (optimizer, engine.optimizer):
            own.step()
            own.zero_grad()
        before = dict(of_modules().named_parameters())
        for name, p in model.named_parameters():
            assert torch.equal(p.detach(), before[name]) is (name not in touched)


def test_a_model_that_takes_one_row_for_an_expert_needs_a_name_alone(tmp_path: Path) -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 48, 48, generator=torch.Generator().manual_seed(5)) / 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(torch.nn.functional.linear(part, self.weight[i]) for i, part in enumerate(x.unbind(0)))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(48, 48), Parallel(), nn.Linear(48, 48))

    x = torch.randn(6, 3, 48, generator=torch.Generator().manual_seed(6))
    plain, named = model(), model()
    with OffloadEngine(named, experts="Parallel", **ADAMW) as engine:
        assert sum(item.unit.experts is not None for item in engine.plan.units) == 6
        for of in (plain, engine):
            of(x).square().mean().backward()
        for name, p in named.named_parameters():
            assert torch.equal(p.grad.detach().clone(), plain.get_parameter(name).grad)
        scaled = named[1].weight[2].t() * 2  # what no unit computes is done with a copy of the expert
        assert torch.equal(scaled, plain[1].weight[2].t() * 2)
        assert torch.equal(named[1].weight[1:3].detach().clone(), plain[1].weight[1:3])


@pytest.mark.parametrize("experts", [3, "", ["experts", 1]])
def test_names_of_experts_are_checked(experts: Any) -> None:
    with pytest.raises(ConfigError, match="experts"):
        OffloadEngine(nn.Linear(2, 2), experts=experts)


def test_the_same_bits_on_a_device(tmp_path: Path) -> None:
    def trained(**options: Any) -> list[Any]:
        model = built(CONFIGS["mixtral"]())
        with OffloadEngine(model, **ADAMW, **options) as engine:
            return three_steps(model, engine, engine.optimizer)

    in_ram, device = trained(), SimulatedDevice(0)
    with pytest.raises(BudgetError) as caught:
        OffloadEngine(built(CONFIGS["mixtral"]()), **ADAMW, device=device, device_memory=1)
    small = {"device": device, "device_memory": caught.value.needed_bytes}
    least = least_budget(built(CONFIGS["mixtral"]()), tmp_path, **ADAMW, **small)
    on_device = trained(**small, nvme_path=tmp_path, host_memory=least)
    assert on_device[0] == in_ram[0]
    assert all(torch.equal(value, on_device[2][name]) for name, value in in_ram[2].items())


def test_lora_beside_experts_trains_as_without_the_engine_and_never_writes_the_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        base = built(CONFIGS["qwen3_moe"]())
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(base, lora)

    plain, model = adapted(), adapted()
    trained = [p for p in plain.parameters() if p.requires_grad]
    losses, gradients, _ = three_steps(plain, plain, torch.optim.AdamW(trained, **ADAMW))
    with OffloadEngine(model, **ADAMW, **places(adapted(), tmp_path, **ADAMW)[1]) as engine:
        own_losses, own_gradients, _ = three_steps(model, engine, engine.optimizer)
        assert own_losses == pytest.approx(losses, rel=1e-5)
        assert all(torch.equal(value, own_gradients[name]) for name, value in gradients.items())
        base = sum((item.unit.numel - item.unit.trainable_numel) * 4 for item in engine.plan.units)
        assert all(not item.unit.trainable_numel for item in engine.plan.units if item.unit.experts is not None)
        written = engine.report().nvme_write_bytes  # by updates of the step, and of the one before
        assert written <= 2 * engine.plan.step_write_bytes < base / 5
