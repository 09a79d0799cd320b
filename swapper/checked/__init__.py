"""Bytes that anybody may have written, turned into checked values: the one room where files are opened and parsed.

A format is a table of fields (``kinds``), and whoever reads one says what error its refusals are (``refusals``).
[Note: What a reader may trust] Nothing, before it was checked: not that a name is that of a file (``files``), not that
text is as deep, or as cheap to hold, as it is long (``text``), and no number, name or size in it (``kinds``). So a
value that comes out of here is whole and within its bounds, and nothing was allocated, replaced or written before.
Reading takes less than 100 MiB and eight times the bytes that are read.
"""

from swapper.checked.files import open_regular, read_all, read_regular
from swapper.checked.kinds import (
    ANY,
    FLAG,
    TEXT,
    FileName,
    Int,
    Kind,
    ListOf,
    MapOf,
    OneOf,
    Optional,
    Real,
    Record,
    Shape,
    Text,
    Tuple,
)
from swapper.checked.packed import PackedCursor, width_of
from swapper.checked.refused import Refused, refusals, within
from swapper.checked.text import SLACK_BYTES, Cursor, cost_of, once, require_held, text_of

__all__ = [
    "ANY",
    "FLAG",
    "SLACK_BYTES",
    "TEXT",
    "Cursor",
    "FileName",
    "Int",
    "Kind",
    "ListOf",
    "MapOf",
    "OneOf",
    "Optional",
    "PackedCursor",
    "Real",
    "Record",
    "Refused",
    "Shape",
    "Text",
    "Tuple",
    "cost_of",
    "once",
    "open_regular",
    "read_all",
    "read_regular",
    "refusals",
    "require_held",
    "text_of",
    "width_of",
    "within",
]
