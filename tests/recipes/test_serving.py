"""docs/recipes/serving.md, beside the same in memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("torchao")


def test_a_cache_on_nvme_has_the_tokens_of_one_in_memory(recipe, tight):
    page = recipe("serving.md")
    with torch.no_grad():
        expected = page.generate_with(None, page.build(False))
    options = {"optimizer": None, "activations": "nvme", "activation_memory": "256KiB"}
    with tight(page.build(False), **options) as engine:
        assert torch.equal(page.generate_with(page.OffloadedCache(engine), engine.module), expected)
        assert engine.report().activations.read_bytes > 0
        engine.close(discard=True)


def test_batches_have_the_tokens_of_memory_and_read_what_one_sequence_reads(recipe, tight):
    page = recipe("serving.md")
    for quantised in (False, True):
        with torch.no_grad():
            expected = [page.generate(page.build(quantised), batch) for batch in (1, 8)]
        with tight(page.build(quantised), optimizer=None) as engine:
            reads, read = page.Reads(), []
            engine.add_observer(reads)
            for batch, tokens in zip((1, 8), expected, strict=True):
                page.generate(engine.module, batch)  # the order of uses is learnt
                reads.of_tokens.clear()
                assert torch.equal(page.generate(engine.module, batch, 8)[:, :10], tokens)
                assert len(reads.of_tokens) == 8
                read.append(reads.mean())
            sweep = engine.plan.step_read_bytes
            engine.close(discard=True)
        assert all(0 < each < 2 * sweep for each in read)  # units may be on their way for the token before or after
