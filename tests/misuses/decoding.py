"""Language models of ``transformers`` at inference, between steps and beside them: caches, beams, assistants,
processors of logits and hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from misuses.case import Family
from misuses.place import values
from misuses.strangers import Exact

family = Family(
    "decoding", needs=("transformers",), preload=("transformers", "transformers.models.llama.modeling_llama")
)

SGD: dict[str, Any] = {"optimizer": Exact, "lr": 0.05, "optimizer_options": {"momentum": 0.9}}
PROMPT = torch.tensor([[5, 9, 2, 7, 1, 3], [4, 4, 8, 6, 2, 9]])


def same_bits(title, **options):
    return family.works(title, rtol=0.0, atol=0.0, **{"seconds": 120.0, **options})


def llama(seed=0, layers=3):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=63, bos_token_id=1,
        )
    )  # fmt: skip


def step(engine, index):
    ids = torch.randint(1, 60, (2, 10), generator=torch.Generator().manual_seed(index))
    engine.optimizer.zero_grad()
    loss = engine(input_ids=ids, labels=ids).loss
    loss.backward()
    engine.optimizer.step()
    return loss.item()


def _generates(name, title, **options):
    def case(place):
        engine = place.wrap(llama(), **SGD)
        found = []
        for index in range(2):
            found.append(step(engine, index))
            torch.manual_seed(index)
            engine.module.eval()
            found.append(engine.module.generate(PROMPT, max_new_tokens=6, pad_token_id=0, **options))
            engine.module.train()
        return found, values(engine.module)

    case.__name__ = f"decoding_{name}"
    same_bits(title)(case)


_generates("greedy", "greedy, between steps", do_sample=False)
_generates(
    "sampled", "sampled with top-k, top-p and a temperature", do_sample=True, top_k=9, top_p=0.8, temperature=1.3
)
_generates(
    "beams",
    "four beams, a length penalty, two sequences of each",
    num_beams=4,
    num_return_sequences=2,
    length_penalty=0.7,
)
_generates("sampled_beams", "beams that are sampled", num_beams=3, do_sample=True)
_generates("static", "a static cache", cache_implementation="static", do_sample=False, disable_compile=True)
_generates("offloaded", "no cache at all", use_cache=False, do_sample=False)
_generates(
    "penalised",
    "penalties for repetition, and n-grams that may not come again",
    repetition_penalty=1.5,
    no_repeat_ngram_size=2,
)
_generates("looked_up", "prompt lookup: tokens of the prompt are proposed", prompt_lookup_num_tokens=3, do_sample=False)
_generates(
    "min_p", "min-p, typical and epsilon sampling", do_sample=True, min_p=0.05, typical_p=0.9, epsilon_cutoff=1e-3
)
_generates(
    "bad_words",
    "words that are forbidden, forced, or suppressed at the beginning",
    bad_words_ids=[[7], [3, 2]],
    begin_suppress_tokens=[9],
)


@same_bits("assisted decoding: a small engine proposes for the large one, both are trained")
def decoding_assisted(place):
    large, small = place.wrap(llama(), **SGD), place.wrap(llama(3, 1), **SGD)
    found = []
    for index in range(2):
        found += [step(large, index), step(small, index)]
        for each in (large, small):
            each.module.eval()
        found.append(large.module.generate(PROMPT[:1], max_new_tokens=8, assistant_model=small.module, do_sample=False))
        for each in (large, small):
            each.module.train()
    return found, values(large.module), values(small.module)


@same_bits("`output_scores`, `output_hidden_states` and `output_attentions` are read after generation")
def decoding_with_states(place):
    model = llama()
    model.set_attn_implementation("eager")
    engine = place.wrap(model, **SGD)
    found = [step(engine, 0)]
    engine.module.eval()
    out = engine.module.generate(
        PROMPT, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_scores=True,
        output_hidden_states=True, output_attentions=True, pad_token_id=0,
    )  # fmt: skip
    return found, out.sequences, list(out.scores), [list(each) for each in out.hidden_states], list(out.attentions[0])


@same_bits("a processor of logits that asks another engine (contrastive), and a criterion that stops")
def decoding_processors(place):
    from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

    large, small = place.wrap(llama(), **SGD), place.wrap(llama(3, 1), **SGD)

    class Contrast(LogitsProcessor):
        def __call__(self, ids, scores):
            return scores - 0.5 * small.module(ids).logits[:, -1]

    class Stop(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            return torch.full((len(ids),), ids.shape[1] > 9)

    found = []
    for index in range(2):
        found += [step(large, index), step(small, index)]
        found.append(
            large.module.generate(
                PROMPT, max_new_tokens=9, do_sample=False, pad_token_id=0,
                logits_processor=LogitsProcessorList([Contrast()]), stopping_criteria=StoppingCriteriaList([Stop()]),
            )
        )  # fmt: skip
    return found, values(large.module)


@same_bits("a streamer gets tokens one by one, and raises in the middle; then training goes on")
def decoding_streamed(place):
    engine = place.wrap(llama(), **SGD)
    got = []

    class Streamer:
        def put(self, value):
            got.append(value.clone())
            if len(got) == 4:
                raise InterruptedError("the user has left")

        def end(self):
            pass

    found = [step(engine, 0)]
    found.append(
        place.attempt(
            lambda: engine.module.generate(PROMPT[:1], max_new_tokens=8, do_sample=False, streamer=Streamer())
        )
    )
    return found, got, step(engine, 1), values(engine.module)


@same_bits("a cache is kept over two calls of `generate`, cropped, and goes on in a training forward")
def decoding_kept_cache(place):
    from transformers import DynamicCache

    engine = place.wrap(llama(), **SGD)
    found = [step(engine, 0)]
    cache = DynamicCache(config=engine.module.config)
    with torch.no_grad():
        out = engine.module(PROMPT, past_key_values=cache, use_cache=True)
        cache.crop(4)
        again = engine.module(PROMPT[:, 4:], past_key_values=cache, use_cache=True)
    found += [out.logits[:, -1], again.logits[:, -1]]
    cache.crop(4)
    loss = engine.module(PROMPT[:, 4:], past_key_values=cache, use_cache=True).logits.square().mean()
    engine.optimizer.zero_grad()
    loss.backward()
    engine.optimizer.step()
    return found, loss.item(), values(engine.module)


@same_bits("hooks on the head change logits in generation, and on layers write down norms")
def decoding_hooks(place):
    engine = place.wrap(llama(), **SGD)
    norms = []
    for layer in engine.module.model.layers:
        layer.register_forward_hook(
            lambda m, a, out: norms.append((out[0] if isinstance(out, tuple) else out).detach().norm().clone())
        )
    handle = engine.module.lm_head.register_forward_hook(lambda m, a, out: out.roll(1, -1))
    found = [step(engine, 0), engine.module.generate(PROMPT, max_new_tokens=4, do_sample=False, pad_token_id=0)]
    handle.remove()
    return found, step(engine, 1), norms, values(engine.module)


@same_bits("embeddings are given instead of tokens, a soft prompt is trained with the model frozen")
def decoding_soft_prompt(place):
    engine = place.wrap(llama(), **SGD)
    prompt = torch.zeros(1, 3, 32, requires_grad=True)
    optimizer, found = torch.optim.SGD([prompt], lr=0.5), []
    engine.module.requires_grad_(False)
    for _ in range(3):
        embedded = engine.module.get_input_embeddings()(PROMPT[:1])
        logits = engine.module(inputs_embeds=torch.cat([prompt, embedded], 1)).logits[:, 3:]
        loss = F.cross_entropy(logits[0, :-1], PROMPT[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, prompt


@same_bits("perplexity by strides, scores of choices by sums of log-probabilities, in the middle of accumulation")
def decoding_scores(place):
    engine = place.wrap(llama(), **SGD)
    ids = torch.randint(1, 60, (1, 24), generator=torch.Generator().manual_seed(8))
    found = []
    for index in range(2):
        loss = engine(input_ids=ids[:, index:], labels=ids[:, index:]).loss
        loss.backward()
        with torch.no_grad():
            for begin in range(0, 16, 8):
                out = engine.module(ids[:, begin : begin + 12]).logits.log_softmax(-1)
                found.append(out[0, :-1].gather(-1, ids[0, begin + 1 : begin + 12, None]).sum().item())
    engine.optimizer.step()
    return found, values(engine.module)


@same_bits("generation within the training loss: REINFORCE on what was sampled, and again with gradients")
def decoding_reinforced(place):
    engine = place.wrap(llama(), **SGD)
    found = []
    for index in range(2):
        torch.manual_seed(index)
        with torch.no_grad():
            ids = engine.module.generate(PROMPT, max_new_tokens=5, do_sample=True, pad_token_id=0)
        logits = engine(input_ids=ids).logits[:, 5:-1].log_softmax(-1)
        chosen = logits.gather(-1, ids[:, 6:, None]).squeeze(-1)
        loss = -(chosen.sum(1) * (ids[:, 6:] % 2 == 0).float().mean(1)).mean()
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        found.append((ids, loss.item()))
    return found, values(engine.module)


@same_bits(
    "the vocabulary grows before wrapping, by `resize_token_embeddings`, tied; new rows alone are trained by a hook"
)
def decoding_new_tokens(place):
    model = llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    torch.manual_seed(4)
    model.resize_token_embeddings(70, mean_resizing=False)
    mask = (torch.arange(70) >= 64).float()[:, None]
    engine = place.wrap(model, **SGD)
    engine.module.get_input_embeddings().weight.register_hook(lambda g: g * mask)
    return [step(engine, index) for index in range(2)], values(engine.module)
