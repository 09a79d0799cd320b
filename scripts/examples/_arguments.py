"""Arguments that the examples share, and batches of tokens from a text file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer


def arguments(what: str, **defaults: object) -> argparse.Namespace:
    """Those of the command line."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--model", required=True, help="a name on the hub, or a folder")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a file to learn from, or to begin with")
    parser.add_argument("--nvme-path", type=Path, default=Path(), help="a folder on a local SSD")
    parser.add_argument("--host-memory", default="auto", help="such as 48GiB")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda, which has never run")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.set_defaults(**defaults)
    return parser.parse_args()


def batches(given: argparse.Namespace, begin: int = 0) -> Iterator[torch.Tensor]:
    """Of ``given.steps`` batches those from number ``begin`` on: each is that of its number, whoever draws it."""
    tokens = AutoTokenizer.from_pretrained(given.model)(given.text.read_text(), return_tensors="pt").input_ids[0]
    for number in range(begin, given.steps):
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(tokens) - given.length, (given.batch,), generator=generator)
        yield torch.stack([tokens[start : start + given.length] for start in starts]).to(given.device)
