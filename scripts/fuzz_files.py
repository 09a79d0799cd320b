#!/usr/bin/env python3
"""Changes files of tiny checkpoints and models at random, and reads them: a typed error, or the right bytes.

Manifests (mostly with a good checksum), descriptions and run states in them, headers and indices of safetensors, GGUF
files, the metadata of `torch.distributed.checkpoint`, and the small files beside them. Whatever the bytes: an
`OffloadError`, or a value that holds; every so often a checkpoint that was taken for whole is loaded and exported. No
crash, no file written outside of the directory, no wait beyond 20 s, and memory below 100 MiB and 8 times the file.
Input number I of seed S is always the same (`--first I --count 1`).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _fuzz_changes import Change, bytewise, in_fields, in_header, in_json, in_numbers, in_part, in_text_of, sealed
from run_kill import start
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offload import OffloadEngine
from offload.birth.weights import Weights
from offload.checkpoint.dcp.reader import DistributedReader
from offload.checkpoint.native.folder import CheckpointDirectory
from offload.checkpoint.native.inspection import inspect
from offload.checkpoint.native.opened import open_checkpoint
from offload.checkpoint.native.parts import description_of
from offload.checkpoint.native.saved_weights import SavedWeights
from offload.checkpoint.safetensors.export import export_safetensors
from swapper import OffloadError
from swapper.manifest import Manifest
from swapper.owner import read_owner

SECONDS_MAX = 20
MEMORY_BYTES_MAX = 100 << 20
WRONG_MAX = 20

Read = Callable[[bytes, int], bool]
"""Reads bytes that were changed; whether they were taken. The number says which input it is."""


class Wrong(AssertionError):
    """Something happened that may not."""


@dataclass(frozen=True)
class Format:
    """A file as it is when it is whole, ways to change it, and who reads it."""

    name: str
    whole: bytes
    changes: tuple[Change, ...]
    read: Read
    weight: int


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))
    model[0].bias.requires_grad_(False)
    return model


def make_engine(seed: int, optimizer: Any = "adamw", **options: Any) -> OffloadEngine:
    engine = OffloadEngine(make_model(seed), lr=1e-3, optimizer=optimizer, precision="bf16", **options)
    engine.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(engine.optimizer, 3))
    return engine


def backward(engine: OffloadEngine) -> None:
    engine.backward(engine(torch.ones(4, 32)).float().square().mean())


def make_gguf() -> bytes:
    """A GGUF file with a list of words, and tensors of two types."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    words = struct.pack("<IIQ", 9, 8, 5) + b"".join(map(text, ["a", "bc", "", "def", "g"]))
    keys = [("general.architecture", struct.pack("<I", 8) + text("llama")), ("words", words)]
    keys += [("general.alignment", struct.pack("<II", 4, 32)), ("scale", struct.pack("<If", 6, 0.5))]
    tensors = [("norm.weight", (32,), 0, 0), ("up.weight", (64, 3), 8, 128)]
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys))
    header += b"".join(text(key) + value for key, value in keys)
    for name, sizes, kind, offset in tensors:
        header += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return header.ljust(-(-len(header) // 32) * 32, b"\0") + bytes(128) + bytes(range(204))


def save_of_ranks(folder: Path) -> None:
    """Two ranks save a checkpoint together. To be called in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}

    def save(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with make_engine(0) as engine:
            backward(engine)
            engine.step()
            engine.save_checkpoint(folder, "t", client_state={"a": [1, (2, torch.ones(3))]})

    other = start(lambda: save(1))
    save(0)
    end_of(other)


def end_of(process: int) -> None:
    if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        raise SystemExit("a rank has failed")


# Who reads.


class Files:
    """Whole files of every format, in ``folder``, and readers of what is put in their place."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self._every = every
        self._num_taken: Counter[str] = Counter()
        self.weights: dict[str, torch.Tensor] = {}
        end_of(start(lambda: save_of_ranks(folder / "ranks")))  # first of all: it forks, before torch has threads
        for name, optimizer in (("kernel", "adamw"), ("torch", torch.optim.RAdam)):
            with make_engine(0, optimizer) as engine:
                backward(engine)
                engine.step()
                backward(engine)
                engine.save_checkpoint(folder / name, "t", client_state={"a": [1, (2, torch.ones(3))]})
                engine.save_model(folder / "safetensors", max_shard_bytes=3000)
                engine.save_dcp(folder / "dcp")
                self.weights[name] = engine.module[0].weight.detach().clone()
        self._save_log(folder / "logged" / "t")
        index = folder / "safetensors" / "model.safetensors.index.json"
        shard = folder / "safetensors" / next(iter(json.loads(index.read_text())["weight_map"].values()))
        self.formats = [
            *self._of_checkpoint("kernel", "adamw"), *self._of_checkpoint("torch", torch.optim.RAdam),
            *self._of_checkpoint("logged", "adamw", "updates"), *self._of_ranks(),
            Format("header", shard.read_bytes(), (in_header(in_json), in_header(bytewise), bytewise), self._shard, 8),
            Format("gguf", make_gguf(), (bytewise, in_numbers), self._gguf, 6),
            Format("index", index.read_bytes(), (in_json, bytewise), self._index, 4),
            Format("dcp", (folder / "dcp/.metadata").read_bytes(), (bytewise,), self._distributed, 2),
            Format("latest", b"t", (bytewise,), self._latest, 1),
            Format("owner", b'{"pid":1,"host":"h","boot":"b","started":"s","ticks":5}', (in_json,), self._owner, 1),
        ]  # fmt: skip

    def _save_log(self, folder: Path) -> None:
        """The store of a durable run as a checkpoint, as it is beside the run, with updates in its log."""
        nvme = self.folder / "nvme"
        nvme.mkdir()
        with make_engine(0, nvme_path=nvme, durable=1) as engine:
            for _ in range(3):
                backward(engine)
                engine.step()
            engine._session.checkpoints.pass_boundary()
            engine._session.checkpoints.generations.wait()
            shutil.copytree(nvme / "run-1.store", folder, ignore=shutil.ignore_patterns("owner*"))
            shutil.copy(self.folder / "kernel" / "t" / "checkpoint.json", folder)
            engine.close(discard=True)

    def _of_checkpoint(self, name: str, optimizer: Any, *parts: str) -> Iterator[Format]:
        """``parts``: members of the description that are changed beside those that each has."""
        (file,) = (self.folder / name / "t").glob("generation.*")
        whole = file.read_bytes()
        manifest = Manifest.decode(whole)
        with open_checkpoint(self.folder / name, to_read=True) as opened:
            source: Any = opened.generation

        def description(data: bytes, number: int) -> bool:
            source._manifest = replace(manifest, metadata=data)
            description_of(source, "it")
            if self._is_turn(name):
                self._use(name, optimizer, number, source._manifest.encode())
            return True

        def whole_manifest(data: bytes, number: int) -> bool:
            found = Manifest.decode(data)
            if found.encode() != data:
                raise Wrong("a manifest was taken that is encoded otherwise")
            if self._is_turn("manifest"):
                self._use(name, optimizer, number, data)
            return True

        metadata = manifest.metadata
        yield Format(f"manifest, {name}", whole, (sealed(in_fields), sealed(bytewise), bytewise), whole_manifest, 4)
        units, run = in_text_of(in_part("units")), in_text_of(in_part("run"))
        others = (in_text_of(in_part(part)) for part in parts for _ in range(4))
        changes = units, units, in_text_of(bytewise), bytewise, *others
        yield Format(f"description, {name}", metadata, changes, description, 5)
        yield Format(f"run state, {name}", metadata, (run, run, in_text_of(in_json)), description, 5)

    def _of_ranks(self) -> Iterator[Format]:
        """The part of one rank, changed, beside the other's as it is."""
        part = "rank-1-of-2"
        (file,) = (self.folder / "ranks" / "t" / part).glob("generation.*")
        whole = file.read_bytes()
        manifest = Manifest.decode(whole)

        def read(data: bytes) -> bool:
            tag = self._changed("ranks", part, data)
            with open_checkpoint(tag, to_read=True) as opened:
                assert opened.description.units
            if self._is_turn("ranks"):
                self._use_all(tag, "adamw")
            return True

        def part_of(data: bytes, number: int) -> bool:
            return read(data)

        def description(data: bytes, number: int) -> bool:
            return read(replace(manifest, metadata=data).encode())

        yield Format("manifest, ranks", whole, (sealed(in_fields), sealed(bytewise), bytewise), part_of, 2)
        units, run = in_text_of(in_part("units")), in_text_of(in_part("run"))
        yield Format("description, ranks", manifest.metadata, (units, run, in_text_of(in_json)), description, 3)

    def _changed(self, name: str, part: str, manifest: bytes) -> Path:
        """A checkpoint with this manifest in the place of its own, or of that of a ``part``."""
        tag = self.folder / "changed" / "t"
        shutil.rmtree(tag.parent, ignore_errors=True)
        shutil.copytree(self.folder / name / "t", tag, copy_function=os.link)
        for file in (tag / part).glob("generation.*"):
            file.unlink()
        generation = struct.unpack_from("<Q", manifest.ljust(40, b"\0"), 32)[0]
        (tag / part / f"generation.{generation:016x}").write_bytes(manifest)
        return tag

    def _is_turn(self, name: str) -> bool:
        self._num_taken[name] += 1
        return self._num_taken[name] % self._every == 0

    def _use(self, name: str, optimizer: Any, number: int, manifest: bytes) -> None:
        """All that is done with a checkpoint, with this manifest in the place of its own."""
        self._use_all(self._changed(name, "", manifest), optimizer)

    def _use_all(self, tag: Path, optimizer: Any) -> None:
        out = self.folder / "out"
        with _typed():
            json.dumps(inspect(tag, verify=True, check=lambda: None))
        with _typed(), open_checkpoint(tag, to_read=True) as opened:
            with SavedWeights(opened.generation, opened.description) as weights:
                export_safetensors(weights, out, None, "1MB")
            Weights(out).close()
        shutil.rmtree(out, ignore_errors=True)
        engine = make_engine(1, optimizer)
        before = engine.module[0].weight.detach().clone()
        try:
            engine.load_checkpoint(tag.parent, "t")
        except OffloadError as error:
            if "Nothing has changed" in str(error) and not engine.module[0].weight.equal(before):
                raise Wrong(f"weights have changed in spite of: {error}") from error
        else:
            backward(engine)
            with _typed():
                engine.step()
        with _typed():
            engine.close()

    def _shard(self, data: bytes, number: int) -> bool:
        return self._tensors("changed.safetensors", data)

    def _gguf(self, data: bytes, number: int) -> bool:
        return self._tensors("changed.gguf", data)

    def _tensors(self, name: str, data: bytes) -> bool:
        path = self.folder / name
        path.write_bytes(data)
        weights = Weights(path)
        try:
            for tensor in weights.tensors.values():
                found = tensor.whole(tensor.dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                if found != data[tensor.start : tensor.start + tensor.nbytes]:
                    raise Wrong(f"{tensor.name} has other bytes than the file")
        finally:
            weights.close()
        return True

    def _index(self, data: bytes, number: int) -> bool:
        path = self.folder / "safetensors" / "changed.index.json"
        path.write_bytes(data)
        Weights(path).close()
        return True

    def _distributed(self, data: bytes, number: int) -> bool:
        (self.folder / "dcp" / ".metadata").write_bytes(data)
        reader = DistributedReader(self.folder / "dcp")
        try:
            for name, entry in reader.tensors.items():
                if entry.size.numel() < 1 << 20:
                    with _typed():
                        reader.value(name)
        finally:
            reader.close()
        return True

    def _latest(self, data: bytes, number: int) -> bool:
        (self.folder / "kernel" / "latest").write_bytes(data)
        with CheckpointDirectory(self.folder / "kernel").open(None):
            pass
        return True

    def _owner(self, data: bytes, number: int) -> bool:
        (self.folder / "owner").write_bytes(data)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            str(read_owner(folder))
        finally:
            os.close(folder)
        return True


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    with contextlib.suppress(OffloadError):
        yield


def writes_only_in(folder: Path) -> None:
    """From now on a file that is opened for writing elsewhere ends the program."""
    allowed = (str(folder), "/dev/", "/proc/")

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str) or not arguments[0].startswith("/"):
            return
        if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not arguments[0].startswith(allowed):
            raise Wrong(f"{arguments[0]} was opened to be written to")

    sys.addaudithook(watch)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _late(*_: object) -> None:
    faulthandler.dump_traceback()
    raise Wrong(f"it took more than {SECONDS_MAX} s")


def run(seed: int, first: int, count: int, every: int, folder: Path, told: Callable[[int], None]) -> dict[str, Any]:
    """Try so many inputs; how many of each kind, and ``wrong``: what happened and may not."""
    files = Files(folder, every)
    tries, taken, wrong = Counter[str](), Counter[str](), list[str]()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _late)
    largest = max(len(of.whole) for of in files.formats)
    before = peak_bytes()
    for number in range(first, first + count):
        rng = random.Random(f"{seed} {number}")
        of = rng.choices(files.formats, [of.weight for of in files.formats])[0]
        data = rng.choice(of.changes)(rng, of.whole)
        tries[of.name] += 1
        signal.alarm(SECONDS_MAX)
        try:
            taken[of.name] += of.read(data, number)
        except OffloadError as error:
            if len(str(error)) > 3000:
                wrong.append(f"input {number}, {of.name}: a message of {len(str(error))} letters: {str(error)[:200]!r}")
        except Exception as error:
            wrong.append(f"input {number}, {of.name}: {type(error).__name__}: {error}"[:500])
            traceback.print_exc(limit=-6)
        finally:
            signal.alarm(0)
        if len(wrong) == WRONG_MAX:
            break
        told(number - first + 1)
    grown = peak_bytes() - before
    if grown > MEMORY_BYTES_MAX + 8 * largest:
        wrong.append(f"memory has grown by {grown:,} bytes")
    return {"inputs": tries.total(), "tries": dict(tries), "taken": dict(taken), "grown_bytes": grown, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=100, help="of checkpoints that are taken, one in so many is used")
    arguments = parser.parse_args()
    sys.dont_write_bytecode = True  # of what is imported late: nothing but the files may be written to
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        writes_only_in(Path(folder))

        def told(done: int) -> None:
            if done % 5000 == 0:
                print(f"{done:,} inputs, {peak_bytes() >> 20} MiB", file=sys.stderr, flush=True)

        found = run(arguments.seed, arguments.first, arguments.count, arguments.every, Path(folder), told)
    print(json.dumps(found))
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
