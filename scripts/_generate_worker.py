"""One system of ``bench_generate.py`` in a process of its own: asked for turns on stdin, it answers on stdout."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import accelerate
import torch
from accelerate.utils import offload_state_dict
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from aio_ext import Memory, Queue
from aio_ext.measure import REQUEST_BYTES, Range
from aio_ext.profile import load_profile
from offload import BudgetError, OffloadEngine

_DEPTH, _BLOCK_BYTES = 32, 1 << 20
"""Of the raw read, where no profile of the path says better: what the store takes, too."""


class System(Protocol):
    def turn(self, request: dict[str, Any]) -> dict[str, Any]: ...

    def facts(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Clock(LogitsProcessor):  # type: ignore[misc]
    """Is called once a token, when its logits are there. The time that ``between`` takes does not count."""

    def __init__(self, between: Any) -> None:
        self.seconds: list[float] = []
        self._between = between
        self._left: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        now = time.perf_counter()
        if self._left is not None:
            self.seconds.append(now - self._left)
        self._between()
        self._left = time.perf_counter()
        return scores


class Generating:
    """What all systems that generate have in common."""

    def __init__(self, model: Any, between: Any = lambda: None) -> None:
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None
        self._between = between

    def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate ``tokens`` for every prompt, ``batch`` of them at a time. The first token, whose forward is that of
        the prompt, is not timed."""
        drawn = torch.randint(3, self._model.config.vocab_size, (request["prompts"], request["length"]),
                              generator=torch.Generator().manual_seed(0))  # fmt: skip
        seconds, found, before = [], [], _read_bytes()
        for prompts in drawn.split(request["batch"]):
            clock = Clock(self._between)
            out = self._model.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=request["tokens"], do_sample=False,
                pad_token_id=0, logits_processor=LogitsProcessorList([clock]),
            )  # fmt: skip
            seconds += clock.seconds
            found += out.tolist()
        num_sweeps = request["tokens"] * len(drawn.split(request["batch"]))
        return {"seconds": seconds, "read_bytes": (_read_bytes() - before) / num_sweeps, "tokens": found}

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class InMemory(Generating):
    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(LlamaForCausalLM.from_pretrained(request["folder"], dtype=torch.bfloat16))


class Engine(Generating):
    def __init__(self, request: dict[str, Any]) -> None:
        budget = request["host_memory"]
        try:
            self._engine = self._made(request, budget or 1)
        except BudgetError as error:
            if budget:
                raise
            self._engine = self._made(request, error.needed_bytes)
        super().__init__(self._engine.module)

    def facts(self) -> dict[str, Any]:
        plan = self._engine.plan
        return {"host_bytes": plan.host_bytes, "nvme_bytes": plan.nvme_bytes["weights"]}

    def close(self) -> None:
        self._engine.close()

    def _made(self, request: dict[str, Any], budget: int) -> OffloadEngine:
        return OffloadEngine.from_pretrained(
            LlamaForCausalLM, request["folder"], optimizer=None, precision="bf16", nvme_path=request["nvme_path"],
            host_memory=budget,
        )  # fmt: skip


class DiskOffload(Generating):
    """``accelerate.disk_offload`` on the CPU. ``evict``: its files leave the page cache after each token."""

    def __init__(self, request: dict[str, Any]) -> None:
        folder = Path(request["offload_folder"])
        torch.set_default_dtype(torch.bfloat16)
        with accelerate.init_empty_weights(include_buffers=False):
            model = LlamaForCausalLM(LlamaConfig.from_pretrained(request["folder"]))
        torch.set_default_dtype(torch.float32)
        model = accelerate.disk_offload(model.eval(), folder, execution_device=torch.device("cpu"))
        files = list(folder.glob("*.dat"))
        super().__init__(model, (lambda: _evict(files)) if request["evict"] else (lambda: None))


class RawRead:
    """Reads as many bytes as the engine has on NVMe, with the same queue and nothing else to do."""

    def __init__(self, request: dict[str, Any]) -> None:
        path = Path(request["nvme_path"])
        nbytes = -(-request["nbytes"] // REQUEST_BYTES) * REQUEST_BYTES
        profile = load_profile(path)
        backend, depth, block = ("auto", _DEPTH, _BLOCK_BYTES)
        if profile is not None:
            backend, depth, block = profile.backend, profile.queue_depth, profile.block_bytes
        self._name = path / "raw"
        self._fd = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, nbytes)
        self._memory = Memory((2 + -(-depth * block // REQUEST_BYTES)) * REQUEST_BYTES)
        self._memory.populate()
        self._queue = Queue(backend, depth, block)
        self._queue.register_memory(self._memory.address, self._memory.nbytes)
        self._range = Range(self._queue, self._queue.register_file(self._fd), nbytes, self._memory, depth, block)
        self._range.measure("write", nbytes)  # what was never written is not read from the disk

    def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        rates = []
        for nbytes in request["sizes"]:
            rates.append(self._range.measure("read", nbytes).bytes_per_s if nbytes else 0.0)
        return {"rates": rates}

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._queue.close()
        os.close(self._fd)
        self._name.unlink()


class Prepare:
    """Draws the model, and writes it for all others: safetensors, and the files of ``disk_offload`` twice, since what
    one process has in the page cache would serve the other one."""

    def __init__(self, request: dict[str, Any]) -> None:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        width = request["width"]
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=width, intermediate_size=-(-8 * width // 3 // 64) * 64, num_hidden_layers=request["layers"],
                num_attention_heads=width // 64, num_key_value_heads=width // 64, vocab_size=32_000,
            )
        )  # fmt: skip
        self._numel = sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(request["folder"])
        for folder in request["offload_folders"]:
            offload_state_dict(folder, model.state_dict())
            os.sync()
            _evict(list(Path(folder).glob("*.dat")))

    def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        return {}

    def facts(self) -> dict[str, Any]:
        return {"parameters": self._numel}

    def close(self) -> None:
        pass


SYSTEMS: dict[str, type[System]] = {
    "prepare": Prepare,
    "raw": RawRead,
    "in memory": InMemory,
    "engine": Engine,
    "accelerate": DiskOffload,
}


def _evict(files: list[Path]) -> None:
    """Take the files out of the page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _read_bytes() -> int:
    """What this process has read from disks, by the kernel's count: what came from the page cache is not in it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def main() -> None:
    request = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr: stdout is for answers alone

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    answer({})  # imports are done: from now on a limit counts
    sys.stdin.readline()
    system = SYSTEMS[request["system"]](request)  # type: ignore[call-arg]
    answer(system.facts())
    with torch.inference_mode():
        for line in sys.stdin:
            answer(system.turn(json.loads(line)))
    system.close()


if __name__ == "__main__":
    main()
