"""Weights files in the GGUF format.

A file is a header, and the bytes of tensors, each at a multiple of an alignment. The header has pairs of a key and a
value, of any length (a tokenizer's words are there), and then for each tensor its name, dimensions (the last one
first), type and offset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import xxhash

from offload.birth.weights_file import StoredTensor, WeightsFile
from offload.quantised import GGML_TYPES
from swapper import align
from swapper.checked import PackedCursor, Refused, width_of, within

_HEADER_BYTES_MAX = 100 << 20
_DIMENSIONS_MAX = 4
_STRING, _ARRAY = 8, 9
_INTEGERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 7: "B", 10: "Q", 11: "q"}
_FRACTIONS = {6: "f", 12: "d"}
"""Values of a fixed length, by the numbers of their types."""

_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
"""Names of the types of tensors."""


@dataclass(frozen=True, eq=False, slots=True)
class GgufTensor(StoredTensor):
    """The bytes of a tensor, a row for each of its rows; one of one dimension whose numbers are stored one by one has a
    row for each of them."""

    kind: str
    """Type of its numbers, of ``GGML_TYPES``."""
    numbers: torch.Size
    """Their shape."""


class GgufFile(WeightsFile):
    """One such file."""

    tensors: dict[str, GgufTensor]
    architecture: str

    def _read_header(self, nbytes: int) -> tuple[dict[str, GgufTensor], int]:
        cursor = PackedCursor(self.content, min(nbytes, _HEADER_BYTES_MAX))
        with within("header"):
            if cursor.take(4) != b"GGUF":
                raise Refused("that is no GGUF file")
            version = cursor.number("I")
            if version not in (2, 3):
                raise Refused(f"version {version} of the format is not read (2 and 3 are, little-endian)")
            num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
            self.architecture, alignment = "", 32
            for _ in range(num_keys):
                key, value = cursor.text(), _value(cursor, cursor.number("I"))
                if key == "general.architecture":
                    self.architecture = str(value)
                elif key == "general.alignment":
                    alignment = value if isinstance(value, int) else 0
                elif key == "split.count" and value != 1:
                    raise self._error(f"is one of {value} parts: join them (llama-gguf-split --merge)")
            if alignment < 1 or alignment % 8:
                raise Refused(f"an alignment of {alignment} bytes", "general.alignment")
            entries = [_entry(cursor) for _ in range(num_tensors)]
        self._refuse_types([(name, kind) for name, _, kind, _ in entries])
        base = align(cursor.at, alignment)
        tensors: dict[str, GgufTensor] = {}
        for name, numbers, kind, offset in entries:
            with within(name):
                if name in tensors:
                    raise Refused("it is there twice")
                tensors[name] = self._tensor(name, numbers, _TYPES[kind], base + offset)
        reached = base
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
            with within(tensor.name):
                if tensor.start % alignment or tensor.start < reached:
                    raise Refused(f"its bytes begin at {tensor.start}, which is within others, or not aligned")
                reached = tensor.start + tensor.nbytes
        if reached > nbytes:
            raise Refused(f"it is cut off: it should have {reached} bytes, and has {nbytes}")
        return tensors, xxhash.xxh3_64_intdigest(cursor.taken)

    def _tensor(self, name: str, numbers: tuple[int, ...], kind: str, start: int) -> GgufTensor:
        of = GGML_TYPES[kind]
        rows, width = (numbers, 1) if len(numbers) == 1 and of.numel == 1 else (numbers[:-1], numbers[-1])
        if width % of.numel:
            raise Refused(f"its rows have {width} numbers, which is no multiple of the {of.numel} of a block of {kind}")
        shape = torch.Size((*rows, width // of.numel * of.nbytes))
        return GgufTensor(self, name, torch.uint8, shape, start, kind, torch.Size(numbers))

    def _refuse_types(self, kinds: list[tuple[str, int]]) -> None:
        unknown = [(name, kind) for name, kind in kinds if _TYPES.get(kind) not in GGML_TYPES]
        if unknown:
            shown = ", ".join(f"{name} ({_TYPES.get(kind, f'type {kind}')})" for name, kind in unknown[:3])
            raise self._error(
                f"has {len(unknown)} tensors of types that are not read: {shown}{', ...' if len(unknown) > 3 else ''}. "
                f"{', '.join(GGML_TYPES)} are: take a file with those (llama-quantize makes one)."
            )


def _value(cursor: PackedCursor, kind: int) -> int | str | None:
    """The next value of a type; None for a number with a fraction and for an array, which are passed over."""
    if kind in _INTEGERS:
        return cursor.number(_INTEGERS[kind])
    if kind == _STRING:
        return cursor.text()
    if kind == _ARRAY:
        _pass_array(cursor)
    elif kind in _FRACTIONS:
        cursor.skip(width_of(_FRACTIONS[kind]))
    else:
        raise Refused(f"a value of type {kind}")
    return None


def _pass_array(cursor: PackedCursor) -> None:
    of, count = cursor.number("I"), cursor.number("Q")
    form = (_INTEGERS | _FRACTIONS).get(of)
    if form is not None:
        cursor.skip(count * width_of(form))
        return
    for _ in range(count):
        if of == _STRING:  # which need be no UTF-8: the pieces of words that a tokenizer has
            cursor.skip(cursor.number("Q"))
        else:
            _value(cursor, of)


def _entry(cursor: PackedCursor) -> tuple[str, tuple[int, ...], int, int]:
    """What the header says of the next tensor: its name, shape, type and offset."""
    name = cursor.text()
    with within(name):
        count = cursor.number("I")
        if not 1 <= count <= _DIMENSIONS_MAX:
            raise Refused(f"it has {count} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(count))[::-1]
        if not 0 < math.prod(shape) < 1 << 62:
            raise Refused(f"its shape is {shape}")
        return name, shape, cursor.number("I"), cursor.number("Q")
