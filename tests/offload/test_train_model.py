"""The model of ``offload train``, without an engine."""

from __future__ import annotations

import torch

from offload.train.model import GPT, generate

_SHAPE = {"layers": 2, "width": 32, "heads": 4}


def test_the_untrained_model_guesses():
    torch.manual_seed(0)
    tokens = torch.randint(256, (4, 16))
    loss = GPT(**_SHAPE)(tokens, tokens.roll(-1, 1))
    assert loss.dtype == torch.float32
    assert 5.3 < loss.item() < 6.2  # ln 256 is 5.545


def test_no_position_sees_what_comes_after_it():
    model = GPT(**_SHAPE)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (tokens[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10], after[:, 10])


def test_a_model_filled_module_by_module_is_the_model_built_at_once():
    torch.manual_seed(7)
    built = GPT(**_SHAPE)
    with torch.device("meta"):
        filled = GPT(**_SHAPE)
    torch.manual_seed(7)
    for module in filled.modules():
        if module._parameters:
            module.to_empty(device="cpu", recurse=False).reset_parameters()
    for (name, one), (_, other) in zip(built.named_parameters(), filled.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_generated_text_continues_the_prompt_and_is_the_same_again():
    model = GPT(**_SHAPE)
    texts = [generate(model, b"def ", length=30, context=16, seconds_max=60) for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith(b"def ") and len(texts[0]) == 34


def test_generation_ends_when_its_time_is_over():
    assert len(generate(GPT(**_SHAPE), b"a", length=1000, context=16, seconds_max=0.0)) == 2
