"""The ``Trainer`` of ``transformers``, and every trainer derived from it, over an engine.

``OffloadTrainer`` is the ready class, ``OffloadTrainerMixin`` makes one of any other trainer (``SFTTrainer``,
``DPOTrainer``, ``Seq2SeqTrainer``), ``OffloadCallback`` logs what a step took. ``OffloadedCache`` is a cache of
keys and values that is stored in memory and on NVMe.
"""

from offload.integrations.transformers.cache import OffloadedCache
from offload.integrations.transformers.callback import OffloadCallback
from offload.integrations.transformers.trainer import OffloadTrainer, OffloadTrainerMixin

__all__ = ["OffloadCallback", "OffloadTrainer", "OffloadTrainerMixin", "OffloadedCache"]
