"""docs/recipes/serving.md, beside the same in memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("torchao")


def test_batches_have_the_tokens_of_memory_and_read_what_one_sequence_reads(recipe, tight):
    page = recipe("serving.md")
    for quantised in (False, True):
        with torch.no_grad():
            expected = [page.generate(page.build(quantised), batch) for batch in (1, 8)]
        with tight(page.build(quantised), optimizer=None) as engine:
            read = []
            for batch, tokens in zip((1, 8), expected, strict=True):
                page.generate(engine.module, batch)  # the order of uses is learnt
                assert torch.equal(page.generate(engine.module, batch), tokens)
                read.append(engine.report().nvme_read_bytes)
            engine.close(discard=True)
        assert 0 < read[1] <= read[0] * 1.05
