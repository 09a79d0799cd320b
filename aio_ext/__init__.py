"""A fast file queue: reads and writes of any size, at a constant depth, with a ticket each and every result checked.

>>> with Memory(1 << 20) as memory, Queue() as queue:
...     file = queue.register_file(fd)
...     queue.write(file, 0, memory.address, memory.nbytes).wait()

Knows buffers, files, offsets and queues; never sees a tensor. Addresses are plain integers.
"""

from ._core import core
from .errors import QueueError
from .memory import Memory, Pattern, share
from .queue import Queue, available_backends, unavailable_backends
from .statistics import DirectionStatistics, Statistics
from .striped import StripedFile, StripedTicket, StripePath
from .ticket import Ticket

direct_io_alignment = core.direct_io_alignment

__all__ = [
    "DirectionStatistics",
    "Memory",
    "Pattern",
    "Queue",
    "QueueError",
    "Statistics",
    "StripePath",
    "StripedFile",
    "StripedTicket",
    "Ticket",
    "available_backends",
    "direct_io_alignment",
    "share",
    "unavailable_backends",
]
