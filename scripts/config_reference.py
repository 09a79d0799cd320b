#!/usr/bin/env python3
"""The page of options, docs/configuration.md, from the fields and docstrings of ``OffloadConfig``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
PAGE = _ROOT / "docs" / "configuration.md"
_SOURCE = _ROOT / "offload" / "config.py"

_GROUPS = {
    "Where bytes are stored": ("nvme_path", "host_memory", "nvme_capacity", "device", "device_memory"),
    "The model": ("weights", "precision", "experts"),
    "The optimizer": (
        *("optimizer", "lr", "betas", "eps", "weight_decay", "optimizer_options", "moments_dtype", "master_dtype"),
    ),
    "Activations": ("activations", "activation_memory"),
    "A step": ("gradient_clipping", "gradient_accumulation_steps"),
    "Checkpoints and records": ("durable", "keep_last", "keep_every", "run_dir"),
    "Several ranks": ("mesh", "shard", "exchange_dtype", "rank_timeout"),
    "How bytes move": ("io_backend", "tile_bytes", "prefetch"),
}
_HEAD = """\
# Configuration

<!-- made by scripts/config_reference.py from offload/config.py -->

Options are given to the engine by name, `OffloadEngine(model, nvme_path="/mnt/nvme", lr=1e-4)`, or as one object,
`OffloadEngine(model, OffloadConfig(nvme_path="/mnt/nvme", lr=1e-4))`. They are checked before anything is allocated: an
unknown name or a value that cannot work is a [`ConfigError`](troubleshooting.md#configerror) that names the option, the
value and the way out.

Sizes are a number of bytes or a text: `"10GiB"`, `"512MiB"`, `"1.5TB"`. [Tuning](tuning.md) says which options matter
when.
"""


@dataclass(frozen=True)
class Option:
    """One field: its type and default as they are written, and its docstring in Markdown."""

    name: str
    type: str
    default: str
    text: str


def options() -> dict[str, Option]:
    """Every option, by name, in the order of the source."""
    tree = ast.parse(_SOURCE.read_text())
    (config,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "OffloadConfig")
    return {option.name: option for option in _options(config)}


def _options(config: ast.ClassDef) -> Iterator[Option]:
    """Each field is followed by its docstring."""
    for field, docstring in zip(config.body, config.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or field.value is None:
            continue
        if not isinstance(docstring, ast.Expr) or not isinstance(docstring.value, ast.Constant):
            raise SystemExit(f"{_SOURCE}:{field.lineno}: this option has no docstring")
        text = " ".join(str(docstring.value.value).split()).replace("``", "`")
        kind, default = (ast.unparse(part).replace("'", '"') for part in (field.annotation, field.value))
        yield Option(ast.unparse(field.target), kind, default.replace("field(default_factory=dict)", "{}"), text)


def page() -> str:
    """The page as it must be now."""
    known = options()
    grouped = [name for names in _GROUPS.values() for name in names]
    if sorted(grouped) != sorted(known):
        odd = sorted(set(grouped) ^ set(known))
        raise SystemExit(
            f"each option of OffloadConfig belongs to one group of {Path(__file__).name}: look at {', '.join(odd)}"
        )
    lines = [_HEAD.rstrip()]
    for title, names in _GROUPS.items():
        lines += [f"## {title}", *(_section(known[name]) for name in names)]
    return "\n\n".join(lines) + "\n"


def _section(option: Option) -> str:
    return f"### {option.name}\n\n`{option.type}`, default `{option.default}`\n\n{option.text}"


if __name__ == "__main__":
    import _written_page

    sys.exit(_written_page.main(__doc__, PAGE, page))
