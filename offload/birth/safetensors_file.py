"""Weights files in the safetensors format.

A file is 8 bytes with the length of a header, the header (JSON: for each tensor dtype, shape, and where its bytes begin
and end), and the bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import xxhash

from offload.birth.weights_file import StoredTensor, WeightsFile
from swapper.checked import TEXT, Cursor, Int, MapOf, OneOf, Record, Refused, Shape, Text, Tuple, text_of, within

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_HEADER_BYTES_MAX = 100 << 20


class _Entry(NamedTuple):
    """Entry of a tensor in a header; offsets are from the header's end."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_ENTRY = Record(_Entry, {"dtype": OneOf(_DTYPES), "shape": Shape(), "data_offsets": Tuple(Int(), Int())})
_METADATA = MapOf(Text(_HEADER_BYTES_MAX))


class SafetensorsFile(WeightsFile):
    """One such file."""

    def _read_header(self, nbytes: int) -> tuple[dict[str, StoredTensor], int]:
        if nbytes < 8:
            raise Refused(f"it has {nbytes} bytes: that is no safetensors file")
        length = int.from_bytes(self.content(0, 8), "little")
        if length > min(_HEADER_BYTES_MAX, nbytes - 8):
            raise Refused(
                f"it is cut off, or no safetensors file: its header would have {length} bytes, and the file has "
                f"{nbytes}"
            )
        header = self.content(8, length)
        cursor, tensors = Cursor(text_of(header)), {}
        with within("header"):
            for name in cursor.members():
                with within(name):
                    if name == "__metadata__":
                        _METADATA.read(cursor)
                    else:
                        tensors[TEXT.take(name)] = self._tensor(name, _ENTRY.read(cursor), 8 + length)
            cursor.end()
        reached = 8 + length
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
            if tensor.start != reached:
                raise Refused(f"its tensors overlap, or leave bytes out, at byte {reached}")
            reached += tensor.nbytes
        if reached != nbytes:
            raise Refused(f"it is cut off, or too long: it should have {reached} bytes, and has {nbytes}")
        return tensors, xxhash.xxh3_64_intdigest(header)

    def _tensor(self, name: str, entry: _Entry, base: int) -> StoredTensor:
        start, end = entry.data_offsets
        tensor = StoredTensor(self, name, entry.dtype, torch.Size(entry.shape), base + start)
        if end - start != tensor.nbytes:
            raise Refused(f"it has {end - start} bytes, which is not its shape")
        return tensor
