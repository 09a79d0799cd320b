"""Trains, saves and resumes a model in a process of its own, and prints by how many bytes its memory grew, and the
bytes of weights and optimizer states."""

import sys
from functools import partial
from pathlib import Path

from accelerate_script import Noisy, Script

from offload import deferred_init
from offload.integrations.accelerate import OffloadAccelerator
from offload.train.process import peak_rss_bytes


def script(root: Path, host_memory: str, **sizes: int) -> Script:
    accelerator = OffloadAccelerator(cpu=True, offload={"nvme_path": root, "host_memory": host_memory})
    return Script(accelerator, 2, partial(deferred_init, Noisy, **sizes))


root = Path(sys.argv[1])
script(root, "1MiB").train()  # libraries are loaded
before = peak_rss_bytes()
first = script(root, "24MiB", width=256, num_blocks=24)
first.train()
first.accelerator.save_state(root / "saved")
numel = sum(parameter.numel() for parameter in first.model.parameters())
first.accelerator.engine.close(discard=True)
first.accelerator.free_memory()
second = script(root, "24MiB", width=256, num_blocks=24)
second.accelerator.load_state(root / "saved")
second.train()
second.accelerator.save_model(second.model, root / "model")
print(peak_rss_bytes() - before, 12 * numel)
