"""What transformers, peft and accelerate do with a model and an optimizer."""

import torch
from torch import nn

from misuses.case import Family
from misuses.place import ADAMW, values
from misuses.schedulers import with_scheduler

family = Family(
    "libraries",
    needs=("transformers",),
    preload=(
        "transformers.models.llama.modeling_llama",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.trainer",
        "transformers.optimization",
    ),
)


def _llama(tied=False, layers=6):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def _tokens(seed=1):
    return torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(seed))


def _train(engine, steps=2, model=None):
    found = []
    for step in range(steps):
        tokens = _tokens(step)
        loss = (model or engine)(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


class _Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = _tokens(index)[0]
        return {"input_ids": tokens, "labels": tokens}


def _arguments(place, **options):
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(place.folder / "output-of-trainer"),
        per_device_train_batch_size=2,
        max_steps=3,
        learning_rate=1e-2,
        adam_epsilon=1e-4,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
        **options,
    )


@family.works("training a Llama")
def llama(place):
    engine = place.wrap(_llama())
    return _train(engine, 3), values(engine.module)


@family.works("training a Llama with tied embeddings")
def llama_tied(place):
    engine = place.wrap(_llama(tied=True))
    return _train(engine, 3), values(engine.module)


@family.refused(
    "`Trainer(model)` of a wrapped model, without `optimizers=`", r"engine\.optimizer|optimizers=", seconds=120
)
def trainer_without_optimizer(place):
    from transformers import Trainer

    engine = place.wrap(_llama())
    trainer = Trainer(engine.module, _arguments(place), train_dataset=_Tokens())
    trainer.train()
    return values(engine.module)


@family.works("`Trainer(model, optimizers=(engine.optimizer, None))`", seconds=120)
def trainer_with_optimizer(place):
    from transformers import Trainer

    engine = place.wrap(_llama())
    trainer = Trainer(engine.module, _arguments(place), train_dataset=_Tokens(), optimizers=(engine.optimizer, None))
    result = trainer.train()
    return result.training_loss, values(engine.module)


@family.works("`Trainer` with accumulation and clipping, `optimizers=(engine.optimizer, None)`", seconds=120)
def trainer_accumulates(place):
    from transformers import Trainer

    engine = place.wrap(_llama())
    arguments = _arguments(place, gradient_accumulation_steps=2, max_grad_norm=0.1)
    trainer = Trainer(engine.module, arguments, train_dataset=_Tokens(), optimizers=(engine.optimizer, None))
    result = trainer.train()
    return result.training_loss, values(engine.module)


@family.works("`Trainer.save_model`, `from_pretrained` of what it saved", seconds=120)
def trainer_saves(place):
    from transformers import LlamaForCausalLM, Trainer

    engine = place.wrap(_llama())
    trainer = Trainer(engine.module, _arguments(place), train_dataset=_Tokens(), optimizers=(engine.optimizer, None))
    trainer.train()
    trainer.save_model(str(place.folder / "saved"))
    return values(LlamaForCausalLM.from_pretrained(place.folder / "saved"))


@family.works("`Trainer` that saves checkpoints with the optimizer's state, and resumes", seconds=120)
def trainer_checkpoints(place):
    from transformers import Trainer

    engine = place.wrap(_llama())
    arguments = _arguments(place)
    arguments.save_strategy, arguments.save_steps = "steps", 2
    trainer = Trainer(engine.module, arguments, train_dataset=_Tokens(), optimizers=(engine.optimizer, None))
    trainer.train()
    engine = place.wrap(_llama())
    trainer = Trainer(engine.module, arguments, train_dataset=_Tokens(), optimizers=(engine.optimizer, None))
    trainer.train(resume_from_checkpoint=True)
    return values(engine.module)


@family.works("`Trainer.evaluate` with a wrapped model", seconds=120)
def trainer_evaluates(place):
    from transformers import Trainer

    engine = place.wrap(_llama())
    trainer = Trainer(engine.module, _arguments(place), eval_dataset=_Tokens(), optimizers=(engine.optimizer, None))
    return trainer.evaluate()["eval_loss"]


@family.works("`model.generate` between steps", seconds=90)
def generate(place):
    engine = place.wrap(_llama())
    found = []
    for _ in range(2):
        _train(engine, 1)
        engine.module.eval()
        found.append(engine.module.generate(_tokens(), max_new_tokens=5, do_sample=False))
        engine.module.train()
    return found, values(engine.module)


@family.works("`model.generate` with beams and a sampled one", seconds=90)
def generate_with_beams(place):
    engine = place.wrap(_llama())
    _train(engine, 1)
    engine.module.eval()
    beams = engine.module.generate(_tokens(), max_new_tokens=5, num_beams=3, do_sample=False)
    torch.manual_seed(5)
    return beams, engine.module.generate(_tokens(), max_new_tokens=5, do_sample=True)


@family.works("`gradient_checkpointing_enable()` after wrapping")
def gradient_checkpointing(place):
    engine = place.wrap(_llama())
    engine.module.gradient_checkpointing_enable()
    engine.module.train()
    return _train(engine, 3), values(engine.module)


@family.works("`gradient_checkpointing_enable({'use_reentrant': True})` with `enable_input_require_grads`")
def gradient_checkpointing_reentrant(place):
    engine = place.wrap(_llama())
    engine.module.gradient_checkpointing_enable({"use_reentrant": True})
    engine.module.enable_input_require_grads()
    engine.module.train()
    return _train(engine, 3), values(engine.module)


@family.works_or_refused(
    "`resize_token_embeddings` after wrapping", r"Resize it before, or in the model that engine\.unwrap"
)
def resized_embeddings(place):
    model = _llama()
    engine = place.wrap(model)
    _train(engine, 1)
    torch.manual_seed(4)
    model.resize_token_embeddings(70, mean_resizing=False)
    found = _train(engine, 2)
    return found, values(model)


@family.works("`resize_token_embeddings` to the same size")
def resized_to_same(place):
    model = _llama()
    engine = place.wrap(model)
    model.resize_token_embeddings(64)
    return _train(engine, 2), values(model)


@family.works("`model.save_pretrained` between steps, loaded again")
def save_pretrained(place):
    from transformers import LlamaForCausalLM

    engine = place.wrap(_llama())
    _train(engine, 2)
    engine.module.save_pretrained(place.folder / "saved")
    return values(LlamaForCausalLM.from_pretrained(place.folder / "saved")), _train(engine, 1)


@family.works("`model.save_pretrained` of tied embeddings")
def save_pretrained_tied(place):
    from safetensors import safe_open
    from transformers import LlamaForCausalLM

    engine = place.wrap(_llama(tied=True))
    _train(engine, 2)
    engine.module.save_pretrained(place.folder / "saved")
    with safe_open(place.folder / "saved" / "model.safetensors", "pt") as saved:
        keys = sorted(saved.keys())
    return keys, values(LlamaForCausalLM.from_pretrained(place.folder / "saved"))


@family.works("`model.save_pretrained(max_shard_size='20KB')`")
def save_pretrained_sharded(place):
    from transformers import LlamaForCausalLM

    engine = place.wrap(_llama())
    _train(engine, 1)
    engine.module.save_pretrained(place.folder / "saved", max_shard_size="20KB")
    return values(LlamaForCausalLM.from_pretrained(place.folder / "saved"))


@family.works("a model loaded by `from_pretrained` is wrapped")
def from_pretrained(place):
    from transformers import LlamaForCausalLM

    _llama().save_pretrained(place.folder / "saved")
    model = LlamaForCausalLM.from_pretrained(place.folder / "saved").train()
    engine = place.wrap(model)
    return _train(engine, 2), values(model)


@family.works("`model.tie_weights()` after wrapping, tied before")
def tie_weights_again(place):
    model = _llama(tied=True)
    engine = place.wrap(model)
    model.tie_weights()
    return _train(engine, 2), model.lm_head.weight is model.model.embed_tokens.weight, values(model)


@family.works_or_refused("`model.tie_weights()` after wrapping, not tied before", "engine|wrap")
def tie_weights_first(place):
    model = _llama()
    engine = place.wrap(model)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return _train(engine, 2), values(model)


@family.works("`model.num_parameters()`, `model.get_memory_footprint()`, `model.dtype`, `model.device`")
def properties(place):
    model = place.wrap(_llama()).module
    return model.num_parameters(only_trainable=True), str(model.dtype), str(model.device), model.get_memory_footprint()


@family.refused("`model.half()`, `model.to(torch.bfloat16)` of a transformers model", r"precision=")
def converted(place):
    model = place.wrap(_llama()).module
    model.to(torch.bfloat16)
    return str(model.dtype)


@family.works("`model.get_input_embeddings()`, `set_input_embeddings` with the same")
def input_embeddings(place):
    model = _llama()
    engine = place.wrap(model)
    model.set_input_embeddings(model.get_input_embeddings())
    return _train(engine, 2), values(model)


@family.works("`model.config.use_cache`, past key values carried over two forwards")
def past_key_values(place):
    engine = place.wrap(_llama())
    engine.module.eval()
    with torch.no_grad():
        first = engine(input_ids=_tokens(), use_cache=True)
        second = engine(input_ids=_tokens()[:, :1], past_key_values=first.past_key_values)
    return second.logits


@family.works("`inputs_embeds` that want a gradient (prompt tuning)")
def inputs_embeds(place):
    engine = place.wrap(_llama())
    prompt = nn.Parameter(torch.zeros(1, 4, 32))
    beside = torch.optim.AdamW([prompt], **ADAMW)
    for step in range(2):
        embeds = engine.module.get_input_embeddings()(_tokens(step))
        embeds = torch.cat([prompt.expand(2, -1, -1), embeds], 1)
        labels = torch.cat([torch.full((2, 4), -100), _tokens(step)], 1)
        engine(inputs_embeds=embeds, labels=labels).loss.backward()
        for optimizer in (engine.optimizer, beside):
            optimizer.step()
            optimizer.zero_grad()
    return prompt, values(engine.module)


@family.works("LoRA by peft before wrapping", needs=("peft",), seconds=120)
def lora_before(place):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    engine = place.wrap(model)
    return _train(engine, 2), values(model)


@family.works_or_refused(
    "LoRA by peft after wrapping, trained by AdamW over the adapters", "engine|wrap", needs=("peft",)
)
def lora_after(place):
    from peft import LoraConfig, get_peft_model

    engine = place.wrap(_llama())
    torch.manual_seed(3)
    model = get_peft_model(engine.module, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    found = []
    for step in range(2):
        loss = model(input_ids=_tokens(step), labels=_tokens(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, values(model)


@family.works_or_refused("`merge_and_unload()` of LoRA that was wrapped", "unwrap|engine", needs=("peft",))
def lora_merged(place):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    engine = place.wrap(model)
    _train(engine, 2)
    merged = model.merge_and_unload()
    with torch.no_grad():
        return merged(input_ids=_tokens()).logits, values(merged)


@family.works("`unwrap()`, then `merge_and_unload()`", needs=("peft",))
def lora_unwrapped_and_merged(place):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    engine = place.wrap(model)
    _train(engine, 2)
    merged = engine.unwrap().merge_and_unload()
    with torch.no_grad():
        return merged(input_ids=_tokens()).logits, values(merged)


@family.works("`merge_adapter()` and `unmerge_adapter()` between steps", rtol=1e-4, atol=1e-5, needs=("peft",))
def lora_merged_and_unmerged(place):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    engine = place.wrap(model)
    _train(engine, 1)
    model.merge_adapter()
    with torch.no_grad():
        found = model(input_ids=_tokens()).logits
    model.unmerge_adapter()
    return found, _train(engine, 1), values(model)


@family.works("`with model.disable_adapter():` (a reference model for DPO)", needs=("peft",))
def lora_disabled(place):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    engine = place.wrap(model)
    found = []
    for step in range(2):
        with torch.no_grad(), model.disable_adapter():
            found.append(model(input_ids=_tokens(step)).logits)
        found.append(torch.tensor(_train(engine, 1)))
    return found


@family.works("`save_pretrained` of a LoRA, loaded into a new model", needs=("peft",))
def lora_saved(place):
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    engine = place.wrap(model)
    _train(engine, 2)
    model.save_pretrained(place.folder / "adapter")
    return values(PeftModel.from_pretrained(_llama(), place.folder / "adapter"))


@family.works_or_refused(
    "a second adapter is added after wrapping: `add_adapter`, `set_adapter`", "engine|wrap", needs=("peft",)
)
def lora_second_adapter(place):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(_llama(), config)
    engine = place.wrap(model)
    _train(engine, 1)
    model.add_adapter("second", config)
    model.set_adapter("second")
    return _train(engine, 1), values(model)


@family.works_or_refused(
    "`Accelerator().prepare(model, engine.optimizer)`", "accelerate|Accelerator", needs=("accelerate",), seconds=90
)
def accelerator(place):
    from accelerate import Accelerator

    engine = place.wrap(_llama())
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(engine.module, engine.optimizer)
    found = []
    for step in range(3):
        loss = model(input_ids=_tokens(step), labels=_tokens(step)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, values(engine.module)


@family.works_or_refused(
    "`Accelerator(gradient_accumulation_steps=2)`, `accelerator.accumulate`",
    "ccelerat",
    needs=("accelerate",),
    seconds=90,
)
def accelerator_accumulates(place):
    from accelerate import Accelerator

    engine = place.wrap(_llama())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(engine.module, engine.optimizer)
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=_tokens(step), labels=_tokens(step)).loss)
            optimizer.step()
            optimizer.zero_grad()
    return values(engine.module)


@family.works_or_refused("`accelerator.save_state()` and `load_state()`", "ccelerat", needs=("accelerate",), seconds=90)
def accelerator_saves(place):
    from accelerate import Accelerator

    engine = place.wrap(_llama())
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(engine.module, engine.optimizer)

    def step(index):
        accelerator.backward(model(input_ids=_tokens(index), labels=_tokens(index)).loss)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    accelerator.save_state(str(place.folder / "state"))
    step(1)
    accelerator.load_state(str(place.folder / "state"))
    step(2)
    return values(engine.module)


@family.works_or_refused(
    "`accelerator.unwrap_model(model)`, `accelerator.get_state_dict(model)`", needs=("accelerate",), seconds=90
)
def accelerator_unwraps(place):
    from accelerate import Accelerator

    engine = place.wrap(_llama())
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(engine.module)
    return accelerator.unwrap_model(model) is engine.module, accelerator.get_state_dict(model)


@family.works_or_refused(
    "accelerate's `cpu_offload(model)` of a wrapped model", "engine|offload", needs=("accelerate",), seconds=90
)
def accelerate_offloads(place):
    from accelerate import cpu_offload

    engine = place.wrap(_llama())
    cpu_offload(engine.module, execution_device=torch.device("cpu"))
    with torch.no_grad():
        return engine.module(input_ids=_tokens()).logits


@family.works_or_refused(
    "a model with accelerate's hooks (`dispatch_model`) is wrapped",
    "accelerate|hook",
    needs=("accelerate",),
    seconds=90,
)
def accelerate_dispatched(place):
    from accelerate import dispatch_model

    model = dispatch_model(_llama(), device_map={"": "cpu"})
    engine = place.wrap(model)
    return _train(engine, 2), values(model)


@family.works("GPT-2 with its `Conv1D`, dropout on")
def gpt2(place):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=6, n_head=4))
    engine = place.wrap(model)
    torch.manual_seed(6)
    return _train(engine, 2), values(model)


@family.works_or_refused(
    "`torch.optim.AdamW` made by transformers' `Trainer.create_optimizer`", r"engine\.optimizer", seconds=90
)
def create_optimizer(place):
    from transformers import Trainer

    engine = place.wrap(_llama())
    trainer = Trainer(engine.module, _arguments(place), train_dataset=_Tokens())
    optimizer = trainer.create_optimizer()
    loss = engine(input_ids=_tokens(), labels=_tokens()).loss
    loss.backward()
    optimizer.step()
    return values(engine.module)


@family.works("transformers' `Adafactor` class as `optimizer=`", rtol=1e-4, atol=1e-4)
def adafactor_of_transformers(place):
    from transformers import Adafactor

    engine = place.wrap(
        _llama(), optimizer=Adafactor, lr=1e-2, optimizer_options={"scale_parameter": False, "relative_step": False}
    )
    return _train(engine, 2), values(engine.module)


_KINDS = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt")


def _of_transformers(kind):
    def make(optimizer):
        from transformers import get_scheduler

        return get_scheduler(kind, optimizer, num_warmup_steps=1, num_training_steps=5)

    return make


for _kind in _KINDS:
    _case = with_scheduler(_of_transformers(_kind))
    _case.__name__ = f"scheduler_of_transformers_{_kind}"
    family.works(f"transformers' `get_scheduler({_kind!r})`")(_case)
