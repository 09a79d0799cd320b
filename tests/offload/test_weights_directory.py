"""A directory of weights files and what lies beside them, cut off at any moment, with changes of names in any order."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from offload.checkpoint import publish
from offload.checkpoint.publish import Unfinished, write_synced
from swapper import StorageFull

Names = dict[str, bytes]
Change = Callable[[Names], None]
INDEX = "model.safetensors.index.json"


class Recorded:
    """Changes of names in a directory, and which of them are certain to be on the disk."""

    def __init__(self, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._target = target
        self._certain = contents(target)
        self._changes: list[Change] = []
        self.states: list[Names] = []
        replace, unlink, link, sync = Path.replace, Path.unlink, os.link, publish.sync_folder

        def replaced(path: Path, new: Path) -> Path:
            self._put(new, path.read_bytes())
            return replace(path, new)

        def unlinked(path: Path, missing_ok: bool = False) -> None:
            if path.exists() and path.parent == target:
                self._changes.append(lambda names: names.pop(path.name, None))
            unlink(path, missing_ok=missing_ok)

        def linked(path: Path, new: Path) -> None:
            self._put(new, path.read_bytes())
            link(path, new)

        def synced(folder: Path) -> None:
            if folder == target:
                self.cut()
                for change in self._changes:
                    change(self._certain)
                self._changes.clear()
            sync(folder)

        monkeypatch.setattr(Path, "replace", replaced)
        monkeypatch.setattr(Path, "unlink", unlinked)
        monkeypatch.setattr(os, "link", linked)
        monkeypatch.setattr(publish, "sync_folder", synced)

    def _put(self, new: Path, content: bytes) -> None:
        if new.parent == self._target:
            self._changes.append(lambda names: names.__setitem__(new.name, content))

    def cut(self) -> None:
        """Take down all that may be on the disk after a power cut in this moment."""
        for number in range(len(self._changes) + 1):
            for some in itertools.combinations(self._changes, number):
                names = dict(self._certain)
                for change in some:
                    change(names)
                self.states.append(names)


def contents(target: Path) -> Names:
    return {entry.name: entry.read_bytes() for entry in target.iterdir() if entry.is_file()}


def write(target: Path, version: str, num_shards: int, others: Names) -> None:
    """Publish weights that say which version they are."""
    with Unfinished(target) as unfinished:
        for name, content in others.items():
            write_synced(unfinished.folder / name, content)
        shards = ["model.safetensors"]
        if num_shards > 1:
            shards = [f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]
            index = {"weight_map": {f"{number}": shard for number, shard in enumerate(shards)}}
            write_synced(unfinished.folder / INDEX, json.dumps(index).encode())
        for shard in shards:
            write_synced(unfinished.folder / shard, version.encode())
        unfinished.publish("model", tuple(others))


def seen(names: Names) -> tuple[bytes | None, Sequence[bytes]] | None:
    """The config and the weights that a reader finds; None if it finds no weights."""
    if "model.safetensors" in names:
        return names.get("config.json"), [names["model.safetensors"]]
    if INDEX not in names:
        return None
    shards = json.loads(names[INDEX])["weight_map"].values()
    return names.get("config.json"), sorted({names.get(shard, b"gone") for shard in shards})


@pytest.mark.parametrize("config", ["same", "new"])
@pytest.mark.parametrize(("before", "after"), [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3)])
def test_weights_are_seen_whole_and_with_what_belongs_to_them(tmp_path, monkeypatch, before, after, config):
    configs = {"old": b"config", "new": b"config" if config == "same" else b"another"}
    if before:
        write(tmp_path, "old", before, {"config.json": configs["old"]})
    old = (configs["old"], [b"old"]) if before else None
    with monkeypatch.context() as patch:
        recorded = Recorded(tmp_path, patch)
        write(tmp_path, "new", after, {"config.json": configs["new"]})
        recorded.cut()
    allowed = [old, (configs["new"], [b"new"])]
    if config == "new":
        allowed.append(None)  # no name can stand for a config and weights
    wrong = [state for state in recorded.states if seen(state) not in allowed]
    assert not wrong and seen(recorded.states[-1]) == (configs["new"], [b"new"])
    assert seen(recorded.states[0]) == old
    fresh = tmp_path / "fresh"
    write(fresh, "new", after, {"config.json": configs["new"]})
    assert contents(tmp_path) == contents(fresh)


def test_new_weights_are_on_the_disk_before_old_ones_go_out_of_sight(tmp_path, monkeypatch):
    write(tmp_path, "old", 1, {"config.json": b"old"})
    events: list[str] = []
    sync, unlink = publish.sync_folder, Path.unlink
    monkeypatch.setattr(publish, "sync_folder", lambda folder: (events.append(f"sync {folder.name}"), sync(folder)))
    monkeypatch.setattr(Path, "unlink", lambda path, **options: (events.append(path.name), unlink(path, **options)))
    write(tmp_path, "new", 1, {"config.json": b"new"})
    gone = events.index("model.safetensors")
    assert events[0] == "sync new" and events[1].startswith("sync .unfinished-")
    assert events[2:gone] == [f"sync {tmp_path.name}"]


def test_what_is_left_is_said_when_new_weights_cannot_get_their_names(tmp_path, monkeypatch):
    write(tmp_path, "old", 1, {"config.json": b"old"})
    replace = Path.replace

    def full(path: Path, target: Path) -> Path:
        if path.name == "model.safetensors":
            raise OSError(28, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageFull, match="What was there is whole"):
        write(tmp_path, "new", 1, {"config.json": b"old"})
    with pytest.raises(StorageFull, match="The old weights had made way"):
        write(tmp_path, "new", 1, {"config.json": b"new"})
