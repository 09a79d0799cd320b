#!/usr/bin/env python3
"""Changes files of tiny checkpoints and models at random, and reads them: a typed error, or the right bytes.

Manifests (mostly with a good checksum), descriptions and run states in them, headers and indices of safetensors, the
metadata of `torch.distributed.checkpoint`, and the small files beside them. Whatever the bytes: an `OffloadError`, or a
value that holds; every so often a checkpoint that was taken for whole is loaded and exported. No crash, no file written
outside of the directory, no wait beyond 20 s, and memory below 100 MiB and 8 times the file. Input number I of seed S
is always the same (`--first I --count 1`).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
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
import xxhash
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offload import OffloadEngine
from offload.birth.weights_file import Weights
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

Change = Callable[[random.Random, bytes], bytes]
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


def make_engine(seed: int, optimizer: Any = "adamw") -> OffloadEngine:
    engine = OffloadEngine(make_model(seed), lr=1e-3, optimizer=optimizer, precision="bf16")
    engine.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(engine.optimizer, 3))
    return engine


def backward(engine: OffloadEngine) -> None:
    engine.backward(engine(torch.ones(4, 32)).float().square().mean())


# Ways to change bytes.

_JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, 256, 4096, 1 << 31, 1 << 32, (1 << 53) + 1, 1 << 63, 1 << 64, 10**40, 0.5,
    -0.0, 1e308, float("inf"), float("nan"), "", "a", "..", "../x", "/etc/passwd", "a/b", "\0", "\ud800", "é", "😀",
    "$tensor", "__metadata__", "x" * 300, [], {}, [[]], [0], ["a"], {"a": 1}, {"$tensor": ["float32", [2], 0, 8]},
    {"$tensor": ["quint8", [4], 0, 4]}, {"$tensor": ["float32", [1 << 40, 0], 0, 0]}, {"$bytes": [0, 4]},
    {"$dict": [[[], 1]]}, {"$dict": [[1, 2]]}, {"$set": [[1]]}, {"$tuple": [1, 2]}, {"$array": ["<f4", [1], 0, 4]},
    {"$scalar": ["|O", 0, 8]}, {"$dtype": "quint8"}, {"$dtype": "bool"}, {"$device": "cuda:99"}, {"$complex": [1]},
    {"$none": 1}, {"$deque": []}, [0] * 100, [[[[[[[[[[]]]]]]]]]],
)  # fmt: skip


def bytewise(rng: random.Random, data: bytes) -> bytes:
    """Flip, insert, delete, cut, repeat."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, kind = rng.randrange(len(changed) + 1), rng.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
        elif kind == 2:
            del changed[at : at + rng.choice((1, 4, 100))]
        elif kind == 3 and rng.random() < 0.3:
            del changed[at:]
        elif kind == 4:
            changed[at:at] = changed[at : at + rng.choice((1, 16, 200))]
        elif at < len(changed):
            changed[at : at + 1] = rng.choice((b"[", b"{", b"]", b'"', b"9", b",", b"-", b"\xff", b"\\"))
    return bytes(changed)


def in_json(rng: random.Random, data: bytes) -> bytes:
    """Change some values of a text, wherever they are in it."""
    try:
        root = [json.loads(data)]
    except (ValueError, RecursionError):
        return bytewise(rng, data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, root)
    return json.dumps(root[0], separators=(",", ":")).encode()


def _change(rng: random.Random, root: list[Any]) -> None:
    holder, key = root, 0
    while isinstance(holder[key], (list, dict)) and holder[key] and (holder is root or rng.random() < 0.85):
        holder = holder[key]
        key = rng.randrange(len(holder)) if isinstance(holder, list) else rng.choice(list(holder))
    value, kind = holder[key], rng.randrange(8)
    if kind == 0 and len(holder) > 1:
        del holder[key]
    elif kind == 1 and isinstance(holder, list) and holder is not root:
        holder.insert(key, copy.deepcopy(value))
    elif kind == 2 and isinstance(holder, dict):
        holder[str(rng.choice(_JUNK))] = holder.pop(key)
    elif kind == 3 and isinstance(holder, list) and len(holder) > 1:
        rng.shuffle(holder)
    elif kind in (4, 5) and type(value) is int:
        holder[key] = rng.choice((value + 1, value - 1, -value, value * 2, value << 20, value // 2, value + 4096))
    else:
        holder[key] = copy.deepcopy(rng.choice(_JUNK))


def in_text_of(change: Change) -> Change:
    """The same in the text that a description begins with; the memory behind it stays."""

    def changed(rng: random.Random, data: bytes) -> bytes:
        (length,) = struct.unpack_from("<Q", data)
        text = change(rng, data[8 : 8 + length])
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return changed


def in_part(name: str) -> Change:
    """Changes values of one member of an object."""

    def changed(rng: random.Random, data: bytes) -> bytes:
        content = json.loads(data)
        content[name] = json.loads(in_json(rng, json.dumps(content[name]).encode()))
        return json.dumps(content, separators=(",", ":")).encode()

    return changed


def sealed(change: Change) -> Change:
    """The change of a manifest's body, with a good checksum, and most often a good size."""

    def changed(rng: random.Random, data: bytes) -> bytes:
        body = bytearray(change(rng, data[:-16]))
        if len(body) >= 64 and rng.random() < 0.9:
            struct.pack_into("<Q", body, 56, len(body) + 16)
        return bytes(body) + xxhash.xxh3_128_digest(bytes(body))

    return changed


def in_fields(rng: random.Random, data: bytes) -> bytes:
    """Change numbers of the header of a manifest, and of its extents."""
    body = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.choice((8, 12, 32, 40, 44, 48, 52, 56, *(64 + 4 * rng.randrange(8 * 8) for _ in range(8))))
        value = rng.choice((0, 1, 2, 7, 255, 4096, 8192, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1))
        if at + 4 <= len(body):
            struct.pack_into("<I", body, at, value)
    return bytes(body)


def in_header(change: Change) -> Change:
    """The change of a safetensors header, with its length most often put right."""

    def changed(rng: random.Random, data: bytes) -> bytes:
        (length,) = struct.unpack_from("<Q", data)
        text = change(rng, data[8 : 8 + length])
        told = len(text) if rng.random() < 0.95 else rng.choice((0, 1, len(text) + 1, 1 << 40, (1 << 64) - 1))
        return struct.pack("<Q", told) + text + data[8 + length :]

    return changed


# Who reads.


class Files:
    """Whole files of every format, in ``folder``, and readers of what is put in their place."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self._every = every
        self._num_taken: Counter[str] = Counter()
        self.weights: dict[str, torch.Tensor] = {}
        for name, optimizer in (("kernel", "adamw"), ("torch", torch.optim.RAdam)):
            with make_engine(0, optimizer) as engine:
                backward(engine)
                engine.step()
                backward(engine)
                engine.save_checkpoint(folder / name, "t", client_state={"a": [1, (2, torch.ones(3))]})
                engine.save_model(folder / "safetensors", max_shard_bytes=3000)
                engine.save_dcp(folder / "dcp")
                self.weights[name] = engine.module[0].weight.detach().clone()
        index = folder / "safetensors" / "model.safetensors.index.json"
        shard = folder / "safetensors" / next(iter(json.loads(index.read_text())["weight_map"].values()))
        self.formats = [
            *self._of_checkpoint("kernel", "adamw"), *self._of_checkpoint("torch", torch.optim.RAdam),
            Format("header", shard.read_bytes(), (in_header(in_json), in_header(bytewise), bytewise), self._shard, 8),
            Format("index", index.read_bytes(), (in_json, bytewise), self._index, 4),
            Format("dcp", (folder / "dcp/.metadata").read_bytes(), (bytewise,), self._distributed, 2),
            Format("latest", b"t", (bytewise,), self._latest, 1),
            Format("owner", b'{"pid":1,"host":"h","boot":"b","started":"s","ticks":5}', (in_json,), self._owner, 1),
        ]  # fmt: skip

    def _of_checkpoint(self, name: str, optimizer: Any) -> Iterator[Format]:
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
        yield Format(f"description, {name}", metadata, (units, units, in_text_of(bytewise), bytewise), description, 5)
        yield Format(f"run state, {name}", metadata, (run, run, in_text_of(in_json)), description, 5)

    def _is_turn(self, name: str) -> bool:
        self._num_taken[name] += 1
        return self._num_taken[name] % self._every == 0

    def _use(self, name: str, optimizer: Any, number: int, manifest: bytes) -> None:
        """All that is done with a checkpoint, with this manifest in the place of its own."""
        tag = self.folder / "changed" / "t"
        shutil.rmtree(tag.parent, ignore_errors=True)
        tag.mkdir(parents=True)
        os.link(self.folder / name / "t" / "data.0", tag / "data.0")
        generation = struct.unpack_from("<Q", manifest, 32)[0]
        (tag / f"generation.{generation:016x}").write_bytes(manifest)
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
        path = self.folder / "changed.safetensors"
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
