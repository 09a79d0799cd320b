import contextlib
import json
import os
from pathlib import Path

import pytest
from store_helpers import fill

from swapper import PAGE_BYTES, Arena, create_store, open_store, remove_store, remove_unfinished
from swapper.__main__ import main
from swapper.directory import RealDirectory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A path with a store that has a retained and a last generation."""
    arena = Arena(2 * PAGE_BYTES)
    lease = arena.lease(2 * PAGE_BYTES)
    with create_store([tmp_path], "run", [2 * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES], retained_max=1) as store:
        for step in (1, 2, 3):
            for extent in store.extents[:2]:
                fill(lease, 16 * step + extent.index)
                store.write(extent, lease.address, extent.nbytes).wait()
            store.commit(b"step")
            if step == 1:
                store.retain()
    arena.close()
    return tmp_path


def run(capsys, *arguments: str | Path) -> tuple[int, list[dict]]:
    status = main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_inspect_tells_what_is_there_and_whose(path: Path, capsys):
    (path / "file.store").touch()
    (path / "link.store").symlink_to(path / "run.store")
    status, [found] = run(capsys, "inspect", path)
    assert status == 0
    assert found["store"] == str(path / "run.store")
    assert found["owner"]["pid"] == os.getpid() and not found["in_use"] and not found["damage"]
    shown = [(g["generation"], g["retained"], g["extents"], g["bytes_written"]) for g in found["generations"]]
    assert shown == [(1, True, 3, 3 * PAGE_BYTES), (3, False, 3, 3 * PAGE_BYTES)]
    with open_store([path], "run"):
        assert run(capsys, "inspect", path)[1][0]["in_use"]
    assert main(["inspect", str(path)]) == 0
    assert f"{path}/run.store\n  owner" in capsys.readouterr().out


def test_scrub_finds_a_store_whole_whose_space_is_taken_when_it_is_needed(tmp_path: Path, capsys):
    arena = Arena(PAGE_BYTES)
    lease = arena.lease(PAGE_BYTES)
    with create_store([tmp_path], "run", [PAGE_BYTES] * 2, reserved=()) as store:
        store.write(store.extents[0], lease.address, PAGE_BYTES).wait()
        store.commit()
    arena.close()
    status, [found] = run(capsys, "scrub", tmp_path)
    assert (status, found["damage"], found["extents"]) == (0, [], 1)


def test_scrub_finds_the_extent_that_is_damaged(path: Path, capsys):
    status, [found] = run(capsys, "scrub", path)
    assert (status, found["generations"], found["extents"], found["bytes"]) == (0, 2, 4, 6 * PAGE_BYTES)
    data = path / "run.store" / "data.0"
    content = bytearray(data.read_bytes())
    content[content.index(bytes([17]) * PAGE_BYTES)] ^= 1  # extent 1 of the retained generation
    data.write_bytes(content)
    status, [found] = run(capsys, "scrub", path)
    assert status == 1 and len(found["damage"]) == 1
    assert found["damage"][0].startswith("generation 1: read of extent 1, generation 1 gave wrong bytes, twice")


def test_scrub_and_inspect_find_a_damaged_manifest(path: Path, capsys):
    manifest = path / "run.store" / f"generation.{3:016x}"
    manifest.write_bytes(manifest.read_bytes()[:-3])
    for command in ("inspect", "scrub"):
        status, [found] = run(capsys, command, path)
        assert status == 1 and "is damaged" in found["damage"][0]


def test_scrub_does_not_disturb_an_owner(path: Path, capsys):
    with open_store([path], "run"):
        assert main(["scrub", str(path), "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["error"] == "StoreLocked"


def test_gc_removes_what_dead_owners_left_and_only_that(path: Path, capsys):
    folder = path / "run.store"
    (folder / "new").write_bytes(b"half a manifest")
    (folder / f"generation.{2:016x}").write_bytes(b"replaced")
    (folder / "of somebody else").touch()
    create_store([path], "unfinished", [PAGE_BYTES]).close()
    (path / "unfinished.store" / f"generation.{0:016x}").unlink()
    create_store([path], "strange", [PAGE_BYTES]).close()
    (path / "strange.store" / f"generation.{0:016x}").rename(path / "strange.store" / "notes")
    dead = f".offload-{_dead_pid()}-{'0' * 16}"
    alive = f".offload-{os.getpid()}-{'0' * 16}"
    for name in (dead, alive, ".offload-mine"):
        (path / name).touch()
    with create_store([path], "busy", [PAGE_BYTES]):
        (path / "busy.store" / "new").touch()
        status, found = run(capsys, "gc", path)
        assert (path / "busy.store" / "new").exists()
    assert status == 0
    removed = {name for store in found for name in store["removed"]}
    assert removed == {
        str(folder / "new"),
        str(folder / f"generation.{2:016x}"),
        str(path / "unfinished.store"),
        str(path / dead),
    }
    assert {e.name for e in path.iterdir()} == {"run.store", "strange.store", "busy.store", alive, ".offload-mine"}
    assert run(capsys, "scrub", path)[0] == 0
    assert (folder / "of somebody else").exists()


def test_a_path_that_is_not_there_is_one_clear_line(tmp_path: Path, capsys):
    assert main(["inspect", str(tmp_path / "missing")]) == 1
    assert capsys.readouterr().err.startswith("StoreUnsafe: ")


def _dead_pid() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


class Cut(BaseException):
    pass


@pytest.mark.parametrize("cut", range(8))
def test_a_removal_that_was_interrupted_is_brought_to_its_end(cut: int, tmp_path: Path, monkeypatch):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    create_store(paths, "other", [PAGE_BYTES]).close()
    with create_store(paths, "run", [PAGE_BYTES]) as store:
        store.commit(b"step")
    left = [cut]

    def cutting(call):
        def maybe(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Cut
            return call(*arguments, **options)

        return maybe

    with monkeypatch.context() as patched:
        patched.setattr(RealDirectory, "remove", cutting(RealDirectory.remove))
        patched.setattr(Path, "rmdir", cutting(Path.rmdir))
        with contextlib.suppress(Cut):
            remove_store(paths, "run")
    assert left[0] < 0, "nothing was cut"
    remove_unfinished(paths, "run")
    if cut < 2:  # the manifest was there still
        open_store(paths, "run").close()
        remove_store(paths, "run")
    assert [[entry.name for entry in path.iterdir()] for path in paths] == [["other.store"], ["other.store"]]


def test_what_is_not_a_stores_stays(tmp_path: Path):
    (tmp_path / "run.store").mkdir()
    (tmp_path / "run.store" / "notes").touch()
    remove_unfinished([tmp_path], "run")
    assert [entry.name for entry in (tmp_path / "run.store").iterdir()] == ["notes"]
