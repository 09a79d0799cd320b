"""Weights and optimizer states of a checkpoint, read a few MiB at a time, without the model's class or an engine.

Memory: the weights of one unit, one tile, and the part that is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

import aio_ext
from offload.checkpoint.description import Description, SavedParameter, SavedTile, SavedUnit
from offload.checkpoint.load import Source
from offload.checkpoint.safetensors_writer import Entry, Part
from offload.dtypes import BY_PRECISION
from offload.errors import ConfigError
from offload.memory import passing_tensor, tensor_at
from offload.optim.formats import Formats
from offload.optim.kernel_rule import KERNELS, KernelRule
from offload.optim.moments import read_moments
from offload.units import Tile
from swapper import StorageCorrupt

PART_NUMEL = 1 << 20
"""Elements that are read in one go."""


@dataclass(frozen=True)
class SavedTensor:
    """A parameter as the model has it: from one piece, or from several in order."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[SavedUnit, SavedParameter], ...]

    @property
    def trainable(self) -> bool:
        return self.pieces[0][1].trainable

    def origin(self, piece: SavedParameter) -> int:
        """The first of the flat elements that the piece has."""
        return piece.start * math.prod(self.shape[1:]) + piece.begin


class SavedWeights:
    """See the module's docstring. Used in ``with``."""

    def __init__(self, source: Source, description: Description, check: Callable[[], None] = lambda: None) -> None:
        """``check`` is called now and then, and may raise to end the work."""
        self.description = description
        self._check = check
        self.dtype = BY_PRECISION[description.precision]
        trained = description.optimizer is not None
        master = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 0}[self.dtype] if trained else 0
        self._formats = Formats(self.dtype.itemsize, master, 0)
        self._rule = None if description.optimizer is None else _rule(description.optimizer, self._formats)
        self._source = source
        self._values = passing_tensor(PART_NUMEL * 4).view(torch.float32)
        """Masters on the way to another dtype."""
        self._read_extents: dict[str, tuple[int, aio_ext.Memory]] = {}
        """What was read last, by kind."""
        self.tensors = {tensor.name: tensor for tensor in _tensors(description)}
        self.buffers: dict[str, torch.Tensor] = description.run.get("buffers", {})
        self.configs: dict[str, dict[str, Any]] = description.run.get("configs", {})

    def __enter__(self) -> SavedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for _, memory in self._read_extents.values():
            memory.close()
        self._read_extents.clear()

    # Weights.

    def entries(self, dtype: torch.dtype) -> list[Entry]:
        """All tensors that ``parts`` gives."""
        weights = [Entry(tensor.name, dtype, tensor.shape) for tensor in self.tensors.values()]
        return weights + [Entry(name, value.dtype, tuple(value.shape)) for name, value in self.buffers.items()]

    def parts(self, dtype: torch.dtype) -> Generator[Part, None, None]:
        """All weights, cast to ``dtype`` from the fp32 master where there is one, and all buffers as they are. All
        parts are in the same memory, one after the other."""
        buffer = passing_tensor(PART_NUMEL * dtype.itemsize).view(dtype)
        for tensor in self.tensors.values():
            numel = math.prod(tensor.shape)
            for start in range(0, numel, PART_NUMEL):
                values = buffer[: min(PART_NUMEL, numel - start)]
                self.read(tensor, start, values)
                yield Part(tensor.name, start, values)
        for name, value in self.buffers.items():
            yield Part(name, 0, value)

    def read(self, tensor: SavedTensor, start: int, target: torch.Tensor) -> None:
        """Fill ``target``, flat, with the elements from ``start`` on, cast to its dtype."""
        for unit, piece, begin, end, at in _overlaps(tensor, start, start + target.numel()):
            self._read(unit, piece, begin, end, target[at : at + end - begin])

    def _read(self, unit: SavedUnit, parameter: SavedParameter, start: int, stop: int, target: torch.Tensor) -> None:
        """Fill ``target`` with elements of the parameter."""
        begin, end = parameter.offset + start, parameter.offset + stop
        weights = self._weights(unit, parameter.trainable)
        if not parameter.trainable or not self._formats.master or not unit.tiles or target.dtype == self.dtype:
            width = self._formats.weights
            target.copy_(tensor_at(weights + begin * width, end - begin, self.dtype))
            return
        for tile in unit.tiles:
            first, last = max(begin, tile.start), min(end, tile.stop)
            if first < last:
                master = self._tile(unit, tile) + self._master_offset(tile, parameter, first)
                self._copy_master(target[first - begin : last - begin], weights + first * self._formats.weights, master)

    def _copy_master(self, target: torch.Tensor, weights: int, master: int) -> None:
        formats = self._formats
        for start in range(0, target.numel(), PART_NUMEL):
            part = target[start : start + PART_NUMEL]
            values = part if part.dtype == torch.float32 else self._values[: part.numel()]
            formats.copy_master(values, weights + start * formats.weights, master + start * formats.master)
            if values is not part:
                part.copy_(values)

    def _weights(self, unit: SavedUnit, trainable: bool) -> int:
        """The address that the unit's weights would have if those of this kind are part of all of them."""
        index = unit.weights[0 if trainable else -1]
        address = self._extent(f"weights {trainable}", index)
        return address if trainable else address - unit.trainable_numel * self._formats.weights

    def _master_offset(self, tile: SavedTile, parameter: SavedParameter, element: int) -> int:
        if isinstance(self._rule, KernelRule):
            return self._rule.master_offset(_tile(tile), element)
        for part in tile.parts:
            if part.parameter == parameter.name and part.state == "":
                return part.offset + (element - parameter.offset) * self._formats.master
        raise StorageCorrupt(f"the master of {parameter.name} is in no tile of its unit.")

    # States.

    def check_states(self) -> None:
        """Raise ``ConfigError`` if there are no states that a stranger can read."""
        optimizer = self.description.optimizer
        if optimizer is None:
            raise ConfigError("the checkpoint is that of a model that is not trained: it has no optimizer states")
        if self._rule is None and not any(tile.parts for unit in self.description.units for tile in unit.tiles):
            raise ConfigError(f"how states of {optimizer['optimizer']} lie in the checkpoint is not written there")

    def state_entries(self, tensor: SavedTensor) -> list[Entry]:
        """The states of one parameter that have a value for each element, or lie in tiles otherwise."""
        if not tensor.trainable or self.num_steps(tensor) == 0:
            return []
        if isinstance(self._rule, KernelRule):
            optimizer = self.description.optimizer or {}
            dtype = torch.bfloat16 if optimizer["moments"] == "bf16" else torch.float32  # codes become numbers
            return [Entry(name, dtype, tensor.shape) for name in optimizer["states"]]
        unit, parameter = tensor.pieces[0]
        parts = (part for tile in unit.tiles for part in tile.parts)
        return [Entry(p.state, p.dtype, p.shape) for p in parts if p.parameter == parameter.name and p.state]

    def read_state(self, tensor: SavedTensor, name: str, start: int, target: torch.Tensor) -> None:
        """Fill ``target``, flat, with the elements of a state from ``start`` on."""
        stop = start + target.numel()
        if not isinstance(self._rule, KernelRule):
            ((unit, parameter),) = tensor.pieces
            for tile in unit.tiles:
                for part in tile.parts:
                    if (part.parameter, part.state) == (parameter.name, name):
                        address = self._tile(unit, tile) + part.offset
                        target.copy_(tensor_at(address, math.prod(part.shape), part.dtype)[start:stop])
            return
        for unit, piece, first, last, at in _overlaps(tensor, start, stop):
            for tile in unit.tiles:
                begin = max(piece.offset + first, tile.start)
                end = min(piece.offset + last, tile.stop)
                if begin < end:
                    states = self._rule.states(_tile(tile), self._tile(unit, tile), _flat(piece))
                    origin = max(piece.offset, tile.start)
                    into = at + begin - piece.offset - first
                    target[into : into + end - begin].copy_(read_moments(name, states, begin - origin, end - origin))

    def num_steps(self, tensor: SavedTensor) -> int:
        """Steps that the parameter has taken."""
        return int(self._of_run(tensor).get("steps", 0))

    def loose_states(self, tensor: SavedTensor) -> dict[str, Any]:
        """States that lie in no tile: the number of steps and the like."""
        return {name: value for name, value in self._of_run(tensor).items() if name != "steps"}

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups, as ``torch.optim`` has them, with names for parameters."""
        whole = {piece.name: tensor.name for tensor in self.tensors.values() for _, piece in tensor.pieces}
        return [
            {**group["options"], "params": list(dict.fromkeys(whole[name] for name in group["parameters"]))}
            for group in self.description.run.get("groups", [])
        ]

    def _of_run(self, tensor: SavedTensor) -> dict[str, Any]:
        found: dict[str, Any] = self.description.run.get("states", {}).get(tensor.pieces[0][1].name, {})
        return found

    # Reading.

    def _tile(self, unit: SavedUnit, tile: SavedTile) -> int:
        address = self._extent("tile", tile.extent)
        if isinstance(self._rule, KernelRule):
            expected = self._rule.tile_between(None, tile.start, tile.stop).nbytes  # type: ignore[arg-type]
            if tile.nbytes != expected:
                raise StorageCorrupt(
                    f"states of unit {unit.name} take {tile.nbytes} bytes there, {expected} were expected."
                )
        return address

    def _extent(self, kind: str, index: int) -> int:
        """Where the extent has been read to. One of each kind is held."""
        known, memory = self._read_extents.get(kind, (-1, None))
        if known == index and memory is not None:
            return memory.address
        self._check()
        extents = self._source.extents
        if not 0 <= index < len(extents):
            raise StorageCorrupt(f"extent {index} is none of the {len(extents)} that are there.")
        extent = extents[index]
        if memory is None or memory.nbytes < extent.nbytes:
            self._read_extents.pop(kind, None)
            if memory is not None:
                memory.close()
            memory = aio_ext.Memory(extent.nbytes)
        self._read_extents[kind] = -1, memory
        self._source.read(extent, memory.address, extent.nbytes).wait()
        self._read_extents[kind] = index, memory
        return memory.address


def _tensors(description: Description) -> Iterator[SavedTensor]:
    """The parameters, with pieces joined."""
    pieces: dict[str, list[tuple[SavedUnit, SavedParameter]]] = {}
    for unit in description.units:
        for parameter in unit.parameters:
            if parameter.packing is not None:
                raise ConfigError(
                    f"parameter {parameter.name} is quantised, and ordinary numbers are exported. Load the checkpoint "
                    "into an engine over the same model, and save what was trained: engine.save_model(dir) of peft."
                )
            pieces.setdefault(parameter.whole or parameter.name, []).append((unit, parameter))
    for name, found in pieces.items():
        parts = [part for part in found if part[1].numel] or found[:1]
        parts.sort(key=lambda part: (part[1].start, part[1].begin))
        first = parts[0][1]
        rows = {part.start: part.model_shape[0] for _, part in parts if part.whole is not None}
        shape = (sum(rows.values()), *first.model_shape[1:]) if rows else first.model_shape
        tensor = SavedTensor(name, shape, tuple(parts))
        reached = 0
        for _, part in parts:
            if tensor.origin(part) != reached:
                raise StorageCorrupt(f"the checkpoint lacks elements from {reached} on of {name}.")
            reached += part.numel
        if reached != math.prod(shape):
            raise StorageCorrupt(f"the checkpoint has {reached} elements of {name}, not {math.prod(shape)}.")
        yield tensor


def _overlaps(tensor: SavedTensor, start: int, stop: int) -> Iterator[tuple[SavedUnit, SavedParameter, int, int, int]]:
    """The pieces that have some of the elements ``[start, stop)``: which of theirs, and where these are among them."""
    for unit, piece in tensor.pieces:
        origin = tensor.origin(piece)
        begin, end = max(start, origin), min(stop, origin + piece.numel)
        if begin < end:
            yield unit, piece, begin - origin, end - origin, begin - start


def _rule(optimizer: dict[str, Any], formats: Formats) -> KernelRule | None:
    """How states lie in tiles, for an optimizer with a kernel."""
    kernel = KERNELS.get(optimizer["optimizer"])
    if kernel is None:
        return None
    states = optimizer["states"]
    group = {
        **kernel.defaults,
        "amsgrad": "max_exp_avg_sq" in states,
        "momentum": float("momentum_buffer" in states),
    }
    rule = KernelRule(kernel, [group], formats, (torch.float32, torch.float32), optimizer["moments"])
    if rule.identity["states"] != states:
        raise StorageCorrupt(f"{optimizer['optimizer']} has states {states} there, which it cannot have.")
    return rule


def _tile(saved: SavedTile) -> Tile:
    return Tile(saved.start, saved.stop, saved.nbytes)


def _flat(parameter: SavedParameter) -> Any:
    """As a rule for kernels wants it, which looks at ``offset`` and ``numel`` alone."""
    return parameter
