"""Trains, saves and resumes a model in a process of its own, and prints by how many bytes its memory grew, and the
bytes of weights and optimizer states."""

import sys
from pathlib import Path

from lightning_modules import loader, module_over, trainer_over

# isort: split
import lightning.pytorch as package
import torch
from tiny import Tiny

from offload import deferred_init
from offload.integrations.lightning import OffloadStrategy
from offload.train.process import peak_rss_bytes

WIDTH, BLOCKS, VOCAB = 256, 24, 64


def __init__(self) -> None:
    package.LightningModule.__init__(self)
    self.dropout, self.losses = torch.nn.Dropout(0.2), []
    torch.manual_seed(0)
    self.net = deferred_init(Tiny, width=WIDTH, num_blocks=BLOCKS, vocab=VOCAB)


def run(root: Path, epochs: int, ckpt_path: Path | None) -> int:
    strategy = OffloadStrategy(nvme_path=root, host_memory="24MiB")
    trainer = trainer_over(package, root, strategy, max_epochs=epochs)
    module = module_over(package, __init__=__init__)
    trainer.fit(module, loader(2), ckpt_path=ckpt_path)
    trainer.save_checkpoint(root / "saved.ckpt")
    strategy.engine.close(discard=True)
    return sum(parameter.numel() for parameter in module.parameters())


root = Path(sys.argv[1])
small = module_over(package)
warm = OffloadStrategy(nvme_path=root, host_memory="1MiB")
trainer_over(package, root, warm).fit(small, loader(1))  # libraries are loaded
warm.close()
before = peak_rss_bytes()
run(root, 1, None)
numel = run(root, 2, root / "saved.ckpt")
print(peak_rss_bytes() - before, 12 * numel)
