"""The optimizers that scripts import by name."""

from offload.compat.deepspeed.ops import adam as adam
