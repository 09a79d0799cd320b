"""Adapters of all kinds over frozen bases, by PEFT and by hand, switched, merged, added and saved. The optimizer is
torch's own arithmetic, so that bits are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from misuses.case import Family
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Exact, Net, batch

family = Family("adapters", needs=("peft",), preload=("peft",))

TARGETS = ["up", "down"]
SGD: dict[str, Any] = {"optimizer": Exact, "lr": 0.05, "optimizer_options": {"momentum": 0.9}}


def same_bits(title, **options):
    return family.works(title, rtol=0.0, atol=0.0, **{"seconds": 90.0, **options})


def adapted(config=None, **options):
    """A model with PEFT's adapters."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = Net()
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=4, target_modules=TARGETS, **options) if config is None else config)


def steps(engine, model, count=3, first=0, after=None):
    found = []
    for step in range(first, first + count):
        loss = model(batch(step)).square().mean()
        engine.optimizer.zero_grad()
        loss.backward()
        found.append(loss.item())
        last = {name: g for name, g in gradients(engine.module).items() if g is not None}
        engine.optimizer.step()
        if after is not None:
            found.append(after(engine.module, step))
    return found, last


def trained(place, model, after=None, **options):
    engine = place.wrap(model, **{**SGD, **options})
    return steps(engine, engine.module, after=after), values(engine.module)


# PEFT's methods.


def _method(name, title, make):
    def case(place):
        return trained(place, make())

    case.__name__ = f"adapter_{name}"
    if name == "vblora":  # a bank of vectors is used by all layers: its gradient is summed up in another order
        family.works(title, seconds=90.0)(case)
    else:
        same_bits(title)(case)


def _config(name, **options):
    def make():
        import peft

        return adapted(getattr(peft, name)(target_modules=TARGETS, **options))

    return make


for _name, _title, _options in (
    ("lora_all", "LoRA with biases that are trained (`bias='all'`)", {"r": 4, "bias": "all"}),
    ("lora_only", "LoRA, and the biases of its layers (`bias='lora_only'`)", {"r": 4, "bias": "lora_only"}),
    ("rslora", "rsLoRA", {"r": 4, "use_rslora": True}),
    ("dora", "DoRA", {"r": 4, "use_dora": True}),
    ("pissa", "PiSSA: the base loses what the adapter begins with", {"r": 4, "init_lora_weights": "pissa"}),
    ("olora", "OLoRA", {"r": 4, "init_lora_weights": "olora"}),
    ("gaussian", "LoRA with a Gaussian start", {"r": 4, "init_lora_weights": "gaussian"}),
    ("dropped", "LoRA with dropout on its input", {"r": 4, "lora_dropout": 0.2}),
    ("lora_bias", "LoRA with a bias of its own", {"r": 4, "lora_bias": True}),
    (
        "ranks",
        "LoRA with other ranks and scales for some layers",
        {"r": 4, "rank_pattern": {"blocks.1.up": 2}, "alpha_pattern": {"blocks.2.up": 16}},
    ),
    (
        "saved_modules",
        "LoRA with a head that is trained as a whole (`modules_to_save`)",
        {"r": 4, "modules_to_save": ["last"]},
    ),
    (
        "parametrised",
        "LoRA on some layers by their number",
        {"r": 4, "layers_to_transform": [1, 3], "layers_pattern": "blocks"},
    ),
):
    _method(_name, _title, _config("LoraConfig", **_options))

for _name, _title, _class, _options in (
    ("ia3", "IA3", "IA3Config", {"feedforward_modules": ["down"]}),
    ("vera", "VeRA: two random matrices are shared by all layers", "VeraConfig", {"r": 8}),
    ("loha", "LoHa", "LoHaConfig", {"r": 4}),
    ("lokr", "LoKr", "LoKrConfig", {"r": 4}),
    ("adalora", "AdaLoRA, without its allocator", "AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 20}),
    ("oft", "OFT: orthogonal matrices of blocks", "OFTConfig", {"oft_block_size": 8}),
    ("boft", "BOFT", "BOFTConfig", {"boft_block_size": 8}),
    ("hra", "HRA: reflections", "HRAConfig", {"r": 4}),
    ("fourier", "FourierFT", "FourierFTConfig", {"n_frequency": 20}),
    (
        "vblora",
        "VB-LoRA: a bank of vectors is shared",
        "VBLoRAConfig",
        {"r": 4, "num_vectors": 8, "vector_length": 8, "topk": 2},
    ),
    ("tuned_norms", "layers that are trained as they are", "LNTuningConfig", {}),
    ("bone", "MiSS", "MissConfig", {"r": 8}),
    ("randlora", "RandLoRA", "RandLoraConfig", {"r": 8}),
    ("shira", "SHiRA: sparse changes", "ShiraConfig", {"r": 4}),
    ("c3a", "C3A: circulant convolutions", "C3AConfig", {"block_size": 8}),
):
    _method(_name, _title, _config(_class, **_options))


# What is done with them.


def _allocating(order):
    def case(place):
        from peft import AdaLoraConfig

        model = adapted(
            AdaLoraConfig(target_modules=TARGETS, init_r=6, target_r=2, tinit=1, tfinal=2, deltaT=1, total_step=8)
        )
        engine = place.wrap(model, **SGD)
        found = []
        for step in range(7):
            loss = model(batch(step)).square().mean()
            loss.backward()
            order(engine.optimizer.step, lambda at=step: model.base_model.update_and_allocate(at))
            engine.optimizer.zero_grad()
            found.append(loss.item())
        return found, values(model)

    return case


def _after(step, allocate):
    step()
    allocate()


def _before(step, allocate):
    allocate()
    step()


for _name, _order in (("after", _after), ("before", _before)):
    _case = _allocating(_order)
    _case.__name__ = f"adalora_allocates_{_name}_the_step"
    same_bits(f"AdaLoRA with its allocator, which reads gradients {_name} the step")(_case)


@same_bits("sensitivities of weight and gradient are looked at after the step, and some gradients set for the next one")
def adapters_sensitive_after_step(place):
    model = adapted()
    engine = place.wrap(model, **SGD)
    found = []
    for step in range(3):
        loss = model(batch(step)).square().mean()
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        trained = [p for p in model.parameters() if p.requires_grad]
        found.append([(p.detach() * p.grad).abs().sum() for p in trained])
        for p in trained[::2]:
            p.grad.mul_(0.5)
        found.append([p.grad.clone() for p in trained])
    return found, values(model)


@same_bits("gradients are there after `unwrap()`, as the last step has left them")
def adapters_gradients_at_the_end(place):
    model = adapted()
    engine = place.wrap(model, **SGD)
    found = steps(engine, model, 2)
    plain = engine.unwrap()
    if place.has_engine:
        place.left.remove(engine)
    return found, {name: p.grad for name, p in plain.named_parameters()}


@same_bits("two adapters in turn: `add_adapter` before wrapping, `set_adapter` in each step")
def adapters_in_turn(place):
    from peft import LoraConfig

    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, target_modules=TARGETS))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)  # the optimizer has both
    engine = place.wrap(model, **SGD)
    found = []
    for step in range(4):
        model.set_adapter("other" if step % 2 else "default")
        found.append(steps(engine, engine.module, 1, step))
    return found, values(model)


@same_bits("`disable_adapter()` around a reference in each step, as DPO does it")
def adapters_off(place):
    model = adapted()
    engine = place.wrap(model, **SGD)
    found = []
    for step in range(3):
        with model.disable_adapter(), torch.no_grad():
            aim = engine(batch(step))
        loss = F.mse_loss(engine(batch(step)), aim * 0.5)
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        found.append((loss.item(), aim))
    return found, values(model)


@family.works("`merge_adapter()` for an evaluation, `unmerge_adapter()` for the next step", rtol=1e-5, atol=1e-6)
def adapters_merged_between(place):
    model = adapted()

    def evaluated(model, step):
        model.merge_adapter()
        with torch.no_grad():
            found = model(batch(9))
        model.unmerge_adapter()
        return found

    return trained(place, model, evaluated)


@same_bits("an adapter's weights are read by `get_peft_model_state_dict`, and set by `set_peft_model_state_dict`")
def adapters_state(place):
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model = adapted()
    engine = place.wrap(model, **SGD)
    found = [steps(engine, model, 2)]
    kept = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
    found.append(steps(engine, model, 2, 2))
    set_peft_model_state_dict(model, kept)
    found.append(steps(engine, model, 2, 2))
    return found, kept, values(model)


@same_bits("`save_pretrained` in the middle of training, loaded into a fresh model")
def adapters_saved(place):
    from peft import PeftModel

    model = adapted(modules_to_save=["last"])
    engine = place.wrap(model, **SGD)
    found = [steps(engine, model, 2)]
    model.save_pretrained(place.folder / "adapter")
    found.append(steps(engine, model, 1, 2))
    torch.manual_seed(0)
    fresh = PeftModel.from_pretrained(Net(), place.folder / "adapter")
    return found, fresh(batch(5)).detach(), values(model)


@family.works_or_refused("`add_adapter` after two steps, trained from then on", "engine|made anew|wrap")
def adapters_added_late(place):
    from peft import LoraConfig

    model = adapted()
    engine = place.wrap(model, **SGD)
    found = [steps(engine, model, 2)]
    torch.manual_seed(3)
    model.add_adapter("late", LoraConfig(r=2, target_modules=TARGETS))
    model.set_adapter("late")
    late = [p for name, p in model.named_parameters() if ".late." in name]
    optimizer = torch.optim.SGD(late, lr=0.05)
    for step in range(2):
        loss = model(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, values(model)


@family.works_or_refused("`delete_adapter` of one of two, and training goes on", "engine|no longer")
def adapters_deleted(place):
    from peft import LoraConfig

    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, target_modules=TARGETS))
    engine = place.wrap(model, **SGD)
    found = [steps(engine, model, 2)]
    model.delete_adapter("other")
    found.append(steps(engine, model, 2, 2))
    return found, values(model)


@family.works_or_refused(
    "`add_weighted_adapter` of two, after training, for an evaluation", "engine", rtol=1e-5, atol=1e-6
)
def adapters_weighted(place):
    from peft import LoraConfig

    model = adapted()
    model.add_adapter("other", LoraConfig(r=4, target_modules=TARGETS))
    engine = place.wrap(model, **SGD)
    found = [steps(engine, model, 2)]
    model.add_weighted_adapter(["default", "other"], [0.7, 0.3], "both", combination_type="linear")
    model.set_adapter("both")
    with torch.no_grad():
        return found, model(batch(7))


@same_bits("the engine is unwrapped, merged by `merge_and_unload`, and wrapped again to be trained whole")
def adapters_merged_at_the_end(place):
    model = adapted()
    engine = place.wrap(model, **SGD)
    found = [steps(engine, model, 2)]
    plain = engine.unwrap()
    if place.has_engine:
        place.left.remove(engine)
    merged = plain.merge_and_unload()
    merged.requires_grad_(True)
    engine = place.wrap(merged, **SGD)
    found.append(steps(engine, merged, 2, 2))
    return found, values(merged)


@same_bits("LoRA+: the rate of B is 16 times that of A")
def lora_plus(place):
    model = adapted()
    groups = [
        {"params": [p for name, p in model.named_parameters() if "lora_A" in name], "lr": 0.01},
        {"params": [p for name, p in model.named_parameters() if "lora_B" in name], "lr": 0.16},
    ]
    engine = place.wrap(model, optimizer=Exact(groups, lr=0.01, momentum=0.9))
    return steps(engine, model), values(model)


@family.works("LoRA-FA: A is frozen after it was made, AdamW for B", rtol=1e-5, atol=1e-6)
def lora_fa(place):
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    engine = place.wrap(model)
    return steps(engine, model), values(model)


@same_bits("ReLoRA: every second step the adapter is merged by hand, and begins anew with its momentum gone")
def relora(place):
    model = adapted()
    engine = place.wrap(model, **SGD)
    found = []
    for step in range(6):
        found.append(steps(engine, model, 1, step))
        if step % 2:
            with torch.no_grad():
                for module in model.modules():
                    if hasattr(module, "lora_A"):
                        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
                        module.base_layer.weight.add_(b @ a, alpha=module.scaling["default"])
                        a.copy_(torch.randn(a.shape, generator=torch.Generator().manual_seed(step)) * 0.1)
                        b.zero_()
            engine.optimizer.state.clear()
    return found, values(model)


@same_bits("gradient accumulation, checkpoints around blocks, and `enable_input_require_grads` by a hook")
def adapters_with_checkpoints(place):
    from torch.utils.checkpoint import checkpoint

    model = adapted()
    net = model.base_model.model
    net.first.register_forward_hook(lambda module, args, out: out.requires_grad_(True))

    def forward(x):
        x = net.first(x)
        for block in net.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return net.last(x)

    net.forward = forward
    engine = place.wrap(model, **SGD)
    found = []
    for step in range(2):
        for part in range(3):
            loss = engine(batch(10 * step + part)).square().mean() / 3
            loss.backward()
            found.append(loss.item())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(model)


@same_bits("adapters go together: `engine.together` over micro-batches, two adapters, the second one in odd steps")
def adapters_together(place):
    from peft import LoraConfig

    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, target_modules=TARGETS))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    engine = place.wrap(model, **SGD)
    found = []

    def body(x):
        loss = engine(x).square().mean()
        loss.backward()
        return loss.item()

    for step in range(4):
        model.set_adapter("other" if step % 2 else "default")
        found.append(engine.together([batch(10 * step + index) for index in range(3)], body))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(model)


class ByHand(nn.Module):
    """A linear layer with several adapters of the user's own, one for each row of the batch."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, WIDTH, 4) * 0.1)
        self.b = nn.Parameter(torch.zeros(3, 4, WIDTH))

    def forward(self, x):
        chosen = (x[:, 0] * 10).long().remainder(3)
        return torch.tanh(self.base(x) + torch.bmm(torch.bmm(x[:, None], self.a[chosen]), self.b[chosen])[:, 0])


@same_bits("adapters in three-dimensional weights, one for each row of a batch (S-LoRA)")
def adapters_by_row(place):
    return trained(place, Net(ByHand))


class QuantisedBase(nn.Module):
    """The base in int8 with scales, in buffers; an adapter beside it."""

    def __init__(self):
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH) / 6
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(F.linear(x, self.codes.to(x.dtype) * self.scale) + self.b(self.a(x)))


@same_bits("QLoRA by hand: int8 codes and scales in buffers, adapters trained")
def adapters_over_codes(place):
    return trained(place, Net(QuantisedBase))


class Fn4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, scale, table):
        low, high = codes & 15, codes >> 4
        weight = table[torch.stack([low, high], -1).long().flatten(-2)] * scale
        ctx.save_for_backward(codes, scale, table)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, g):
        codes, scale, table = ctx.saved_tensors
        weight = table[torch.stack([codes & 15, codes >> 4], -1).long().flatten(-2)] * scale
        return g @ weight, None, None, None


class FourBit(nn.Module):
    """NF4-like codes are a frozen uint8 parameter, as bitsandbytes has them."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randint(0, 256, (WIDTH, WIDTH // 2), dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(WIDTH, 1) * 0.3, requires_grad=False)
        self.register_buffer("table", torch.linspace(-1, 1, 16))
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(Fn4Bit.apply(x, self.codes, self.scale, self.table) + self.b(self.a(x)))


@same_bits("QLoRA by hand: 4-bit codes are a frozen uint8 parameter, dequantised in a Function")
def adapters_over_4_bit(place):
    return trained(place, Net(FourBit))


@family.works(
    "`MultitaskPromptTuning` of PEFT, saved by `save_pretrained` after each step", needs=("transformers",), seconds=120
)
def prompts_of_many_tasks(place):
    from peft import MultitaskPromptTuningConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
    prompts = {"num_tasks": 3, "num_virtual_tokens": 4, "prompt_tuning_init": "RANDOM"}
    engine = place.wrap(get_peft_model(base, MultitaskPromptTuningConfig(task_type="CAUSAL_LM", **prompts)), **SGD)
    found, tokens = [], torch.arange(8)[None]
    for _ in range(2):
        loss = engine.module(input_ids=tokens, labels=tokens, task_ids=torch.tensor([1])).loss
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        engine.module.save_pretrained(place.folder)
        found += [loss.item(), load_file(place.folder / "adapter_model.safetensors")]
    return found


@family.refused(
    "`merge_and_unload()` into `Linear4bit` that was wrapped", r"engine\.unwrap\(\)", needs=("bitsandbytes",)
)
def merged_in_four_bits(place):
    import bitsandbytes

    class InFourBits(Net):
        is_loaded_in_4bit = True

        def __init__(self):
            super().__init__()
            for block in self.blocks:
                up = bitsandbytes.nn.Linear4bit(block.up.in_features, block.up.out_features, quant_type="nf4")
                up.load_state_dict(block.up.state_dict())
                block.up = up.to("cpu")

    from peft import LoraConfig, get_peft_model

    engine = place.wrap(get_peft_model(InFourBits(), LoraConfig(r=4, target_modules=TARGETS)), **SGD)
    steps(engine, engine.module)
    return engine.module.merge_and_unload()(batch(0)).sum().item()


@same_bits("soft prompts: rows in front of the input are all that is trained")
def soft_prompts(place):
    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net().requires_grad_(False)
            self.prompt = nn.Parameter(torch.randn(3, WIDTH) * 0.1)

        def forward(self, x):
            x = torch.cat([self.prompt.expand(1, -1, -1), x[None]], 1)
            return self.net(x).cumsum(1)

    return trained(place, Prompted())


@same_bits("BitFit: biases alone are trained, chosen by name")
def bitfit(place):
    model = Net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return trained(place, model)


@same_bits("side network: a small trained net reads the frozen one's states through hooks")
def side_network(place):
    class Side(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net().requires_grad_(False)
            self.side = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(5))
            self.up = nn.Linear(8, WIDTH)

        def forward(self, x):
            states = []
            handles = [b.register_forward_hook(lambda m, a, out: states.append(out)) for b in self.net.blocks]
            with torch.no_grad():
                out = self.net(x)
            for handle in handles:
                handle.remove()
            h = sum(torch.tanh(layer(state)) for layer, state in zip(self.side, states, strict=True))
            return out + self.up(h)

    return trained(place, Side())


@same_bits("an adapter is a parametrization of a frozen weight, and a mask of it is learnt, too")
def masked_parametrization(place):
    from torch.nn.utils import parametrize

    class LowRank(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(WIDTH, 2) * 0.1), nn.Parameter(torch.randn(2, WIDTH) * 0.1)
            self.gate = nn.Parameter(torch.zeros(WIDTH, 1))

        def forward(self, weight):
            return weight * torch.sigmoid(self.gate) + self.a @ self.b

    model = Net()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
        parametrize.register_parametrization(block.up, "weight", LowRank())
    return trained(place, model)


@same_bits("an optimizer for the adapters and another one for the head, in turn, over one engine")
def adapters_two_groups_in_turn(place):
    model = adapted(modules_to_save=["last"])
    lora = [p for name, p in model.named_parameters() if "lora_" in name]
    head = [p for name, p in model.named_parameters() if "modules_to_save" in name]
    engine = place.wrap(model, optimizer=Exact([{"params": lora}, {"params": head}], lr=0.05, momentum=0.9))
    found = []
    for step in range(4):
        for group, part in ((lora, 0), (head, 1)):
            for parameter in group:
                parameter.requires_grad_(step % 2 == part)
        found.append(steps(engine, model, 1, step))
    return found, values(model)
