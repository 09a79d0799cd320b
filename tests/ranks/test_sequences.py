"""The script of docs/recipes/long-sequences.md on two ranks beside one, and in one process beside no engine."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import jobs
from ranks.pool import Pool
from tiny import least_budget

from offload import OffloadEngine

_PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "long-sequences.md"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    found = re.search(r'^```python title="sequences.py"\n(.*?)^```$', _PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    (tmp_path / "sequences.py").write_text(found[1])
    return tmp_path / "sequences.py"


def test_masks_by_blocks_have_the_bits_of_the_loop_in_memory_with_activations_on_nvme(script: Path, tmp_path: Path):
    page = SimpleNamespace(**runpy.run_path(str(script)))
    rules: list[Callable] = [page.window, page.documents(torch.arange(64) // 24), page.big_bird]
    plain, offloaded = page.build(), page.build()
    of_plain = torch.optim.NAdam(plain.parameters(), lr=1e-3)
    options = {"activations": "nvme", "activation_memory": 256 << 10}
    optimizer = torch.optim.NAdam(offloaded.parameters(), lr=1e-3)
    least = least_budget(offloaded, tmp_path, optimizer=optimizer, **options)
    with OffloadEngine(offloaded, optimizer=optimizer, nvme_path=tmp_path, host_memory=least, **options) as engine:
        for rule in rules:
            page.train(plain, of_plain, rule, steps=1)
            page.train(offloaded, engine.optimizer, rule, steps=1)
        assert engine.plan.nvme_bytes["states"] > 0 and engine.report().activations.write_bytes > 0
    assert all(torch.equal(one, other) for one, other in zip(offloaded.parameters(), plain.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_mask_on_the_cpu_is_the_rule_of_flex_attention(script: Path):
    page = SimpleNamespace(**runpy.run_path(str(script)))
    q, k, v = torch.randn(3, 2, 4, 64, 16, generator=torch.Generator().manual_seed(0))
    for rule in (page.window, page.documents(torch.arange(64) // 24), page.big_bird):
        blocks = page.create_block_mask(rule, None, None, 64, 64, device="cpu")
        torch.testing.assert_close(page.attend(q, k, v, rule), page.flex_attention(q, k, v, block_mask=blocks))


@pytest.mark.parametrize("shard", ["states", "weights"])
def test_ranks_with_a_part_of_the_sequence_each_train_as_one_process_with_all_of_it(
    two: Pool, script: Path, tmp_path: Path, shard: str
):
    first, second = two(jobs.sequence_in_parts, script, tmp_path, shard)
    alone = jobs.sequence_in_parts(0, 1, script, tmp_path, shard)
    before = SimpleNamespace(**runpy.run_path(str(script))).build().state_dict()
    for name, value in alone.items():
        assert torch.equal(first[name], second[name])
        moved = (value - before[name]).norm()
        assert (first[name] - value).norm() <= 1e-4 * moved + 1e-7, name
