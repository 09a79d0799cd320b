"""A cache of keys and values that is stored in the engine's memory of activations and on NVMe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from offload.engine import OffloadEngine

_PART = 64
"""Tokens that go there in one go; fewer than that stay where the model computes."""


class OffloadedCache(Cache):
    """A dynamic cache for ``generate(past_key_values=...)``, whose layers are stored in ``activation_memory``, and on
    NVMe where that has no room (``activations="nvme"``).

    A layer's keys and values are where the model computes for as long as that layer does; those of the next layers are
    read meanwhile. Each is written once. The tokens are those of a ``DynamicCache``. It ends before its engine does.
    Raises ``ConfigError`` if nothing was set aside for activations.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        make_layer = partial(_Layer, engine.activation_pool, _Turns())  # it is called, and nothing else
        super().__init__(layer_class_to_replicate=make_layer)  # type: ignore[arg-type]


@dataclass
class _Turns:
    """The order in which layers are used. (No layer refers to the cache: what it has goes back with its last user.)"""

    num_layers: int = 0
    num_updates: int = 0

    def next(self) -> int:
        """A number for the update of a layer that is under way: smaller where that layer is used again sooner."""
        self.num_updates += 1
        return self.num_updates + self.num_layers


class _Layer(CacheLayerMixin):
    """``[keys, values]`` of all sequences, in parts of tokens, and the last tokens."""

    is_sliding = False
    is_croppable = True

    def __init__(self, pool: Any, turns: _Turns) -> None:
        super().__init__()
        self._pool, self._turns = pool, turns
        turns.num_layers += 1
        self._parts: list[tuple[Any, torch.Size]] = []
        self._tail: torch.Tensor | None = None
        self._length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, use = torch.stack((key_states, value_states)), self._turns.next()
        whole = torch.cat((*self._bring(use), new), dim=-2)
        self._tail = new if self._tail is None else torch.cat((self._tail, new), dim=-2)
        self._length += key_states.shape[-2]
        self._keep(use)
        return whole[0], whole[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its older name

    def reset(self) -> None:
        self._parts, self._tail, self._length = [], None, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change(lambda whole: whole[:, indices.to(whole.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda whole: whole.repeat_interleave(repeats, dim=1))

    def crop(self, tokens_to_remove: int) -> None:
        """Of a number above 0 so many tokens stay, as in older releases; else that many are removed."""
        stay = tokens_to_remove if tokens_to_remove > 0 else self._length + tokens_to_remove
        if stay < self._length:
            self._change(lambda whole: whole[..., :stay, :])

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self._length:
            use = self._turns.next()
            whole = change(torch.cat(self._bring(use), dim=-2))
            self._parts, self._tail, self._length = [], whole, whole.shape[-2]
            self._keep(use)

    def _bring(self, use: int) -> list[torch.Tensor]:
        """All that was there, in order; those parts are used next when ``use`` says."""
        found = [] if self._tail is None else [self._tail]
        for kept, shape in reversed(self._parts):  # the pool reads the last one ahead first
            flat = torch.empty(0, dtype=self.dtype, device=self.device)
            found.append(flat.set_(kept.bring(), 0, shape))  # type: ignore[call-overload]
        for kept, _ in self._parts:
            kept.renew((-use, 0))
        return found[::-1]

    def _keep(self, use: int) -> None:
        """Have whole parts of the last tokens away."""
        assert self._tail is not None
        away = self._tail.shape[-2] // _PART * _PART
        if not away:
            return
        part = self._tail[..., :away, :].clone(memory_format=torch.contiguous_format)
        spills = self._pool.scratch is not None
        kept = self._pool.keep(part.untyped_storage(), 0, part.nbytes, (-use, 0), spills=spills)
        if kept is None:
            self._pool.check()  # which says how much is needed
        self._parts.append((kept, part.shape))
        self._tail = self._tail[..., away:, :].clone()
