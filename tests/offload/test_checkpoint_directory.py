"""The directory of checkpoints: which one is the latest, what retention removes, and what a dead process leaves."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from offload import ConfigError
from offload.checkpoint import locks, workplace
from offload.checkpoint.native import folder as folder_module
from offload.checkpoint.native.folder import CheckpointDirectory, SavingDirectory
from offload.checkpoint.native.mark import read_mark
from offload.checkpoint.native.other_ranks import what_is_there
from offload.checkpoint.native.run_identity import RunIdentity
from offload.checkpoint.publish import make_directory
from offload.checkpoint.workplace import Workplace, clear_left_over
from offload.ranks.ranks import Ranks
from swapper import StoreMissing, create_store
from swapper.files import Descriptor


@pytest.fixture
def run():
    """A run; the others of a test are made by ``RunIdentity()``."""
    identity = RunIdentity()
    yield identity
    identity.release()


def save(path: Path, identity: RunIdentity, step: int, tag: str | None = None, keep_last: int = 0) -> str:
    """Save an empty model. Returns the tag."""
    directory = SavingDirectory(path, tag, step, identity, Ranks.single())
    directory.make()
    with directory.unfinished() as folder:
        with create_store([folder], "copy", [4096]) as store:
            store.commit(b"")
        directory.publish(folder / "copy.store")
    directory.retain(keep_last, 0)
    return directory.tag


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))


def latest(path: Path) -> str:
    with CheckpointDirectory(path).open(None) as generation:
        return generation.folder.name


def test_retention_leaves_a_store_that_a_run_trains_with(tmp_path: Path, run):
    with create_store([tmp_path], "run-1", [4096]) as store:
        store.commit(b"")
        for step in (1, 2):
            save(tmp_path, run, step, keep_last=1)
    assert names(tmp_path) == ["latest", "run-1.store", "step2"]


def test_retention_removes_nothing_of_another_run_and_never_what_was_just_saved(tmp_path: Path, run):
    for step in (4, 8):
        save(tmp_path, run, step, keep_last=2)
    other = RunIdentity()
    save(tmp_path, other, 2, keep_last=1)
    assert (names(tmp_path), latest(tmp_path)) == (["latest", "step2", "step4", "step8"], "step2")
    save(tmp_path, other, 3, keep_last=1)
    assert (names(tmp_path), latest(tmp_path)) == (["latest", "step3", "step4", "step8"], "step3")
    other.release()


def test_after_a_rollback_the_abandoned_steps_are_the_older_ones(tmp_path: Path, run):
    for step in (4, 8, 12, 16):
        save(tmp_path, run, step)
    save(tmp_path, run, 9, keep_last=2)
    assert names(tmp_path) == ["latest", "step16", "step9"]
    (tmp_path / "latest").unlink()
    assert latest(tmp_path) == "step9"


def test_what_another_run_saves_under_the_tag_of_what_is_retained_away_stays(tmp_path: Path, run, monkeypatch):
    save(tmp_path, run, 1, "best")
    other, real = RunIdentity(), folder_module.take_unused

    def other_is_faster(mark: Path) -> Descriptor | None:
        if mark.parent.name == "best":
            save(tmp_path, other, 7, "best")
        return real(mark)

    with monkeypatch.context() as patched:
        patched.setattr(folder_module, "take_unused", other_is_faster)
        save(tmp_path, run, 2, keep_last=1)
    assert read_mark(tmp_path / "best").run == other.value and names(tmp_path) == ["best", "latest", "step2"]
    other.release()


def test_what_somebody_has_moved_or_copied_is_not_retentions(tmp_path: Path, run):
    save(tmp_path, run, 1)
    (tmp_path / "step1").rename(tmp_path / "keep_me")
    shutil.copytree(tmp_path / "keep_me", tmp_path / "copied", copy_function=os.link)
    for step in (2, 3):
        save(tmp_path, run, step, keep_last=1)
    assert names(tmp_path) == ["copied", "keep_me", "latest", "step3"]


def test_a_checkpoint_that_is_being_read_goes_at_the_next_save(tmp_path: Path, run):
    save(tmp_path, run, 1)
    with CheckpointDirectory(tmp_path).open("step1"):
        save(tmp_path, run, 2, keep_last=1)
        assert names(tmp_path) == ["latest", "step1", "step2"]
    save(tmp_path, run, 3, keep_last=1)
    assert names(tmp_path) == ["latest", "step3"]


def test_a_damaged_checkpoint_neither_counts_nor_goes(tmp_path: Path, run):
    for step in (1, 2):
        save(tmp_path, run, step)
    (tmp_path / "step2" / "data.0").unlink()
    save(tmp_path, run, 3, keep_last=2)
    assert names(tmp_path) == ["latest", "step1", "step2", "step3"]


def test_a_tag_that_nobody_chose_never_takes_the_place_of_another_run(tmp_path: Path, run):
    save(tmp_path, run, 2)
    other = RunIdentity()
    with pytest.warns(UserWarning, match="step2 is there and not of this run: it stays"):
        tag = save(tmp_path, other, 2)
    assert names(tmp_path) == sorted(["latest", "step2", tag]) and latest(tmp_path) == tag
    assert read_mark(tmp_path / "step2").run == run.value
    save(tmp_path, other, 3, "step2")  # by name
    assert read_mark(tmp_path / "step2").run == other.value
    other.release()


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path, run):
    (tmp_path / "thesis").mkdir()
    with pytest.raises(ConfigError, match="thesis is there and is no checkpoint"):
        save(tmp_path, run, 1, "thesis")
    with pytest.raises(ConfigError, match=r"no '\.store' at the end"):
        save(tmp_path, run, 1, "run-1.store")


def test_a_latest_that_is_a_directory_is_named_before_anything_is_written(tmp_path: Path, run):
    (tmp_path / "latest" / "kept").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"latest is a directory.*rename it.*Nothing was written"):
        save(tmp_path, run, 1)
    assert names(tmp_path) == ["latest"]
    assert (tmp_path / "latest" / "kept").is_dir()


def test_a_latest_that_names_nothing_is_said_and_the_last_one_saved_is_taken(tmp_path: Path, run):
    for step in (8, 2, 4):
        save(tmp_path, run, step)
    shutil.rmtree(tmp_path / "step4")
    with pytest.warns(UserWarning, match=r"latest names 'step4', which is not there. Of the rest step2 was saved last"):
        assert latest(tmp_path) == "step2"
    for step in (8, 2):
        shutil.rmtree(tmp_path / f"step{step}")
    with pytest.raises(StoreMissing, match="there is no checkpoint in"):
        latest(tmp_path)


def test_two_engines_that_go_on_from_one_checkpoint_are_two_runs(tmp_path: Path, run):
    save(tmp_path, run, 8)
    before, second = run.value, RunIdentity()
    second.go_on(before)
    with pytest.warns(UserWarning, match="step8 is there and not of this run"):
        save(tmp_path, second, 8, keep_last=1)
    assert second.value != before == run.value
    assert "step8" in names(tmp_path) and len(names(tmp_path)) == 3
    run.release()
    third = RunIdentity()
    third.go_on(before)
    save(tmp_path, third, 9, keep_last=1)
    assert third.value == before and "step8" not in names(tmp_path)
    third.release(), second.release()
    assert not list(tmp_path.glob(".run-*"))


def test_what_a_run_cannot_go_on_from_is_named(tmp_path: Path, run):
    assert what_is_there(tmp_path, 1) == ""
    for rank in (0, 2):
        (tmp_path / f"rank-{rank}-of-4").mkdir()
    save(tmp_path / "saved", run, 1)
    assert what_is_there(tmp_path, 1) == (
        f"ranks [0, 2] of a run of 4, and not the others; checkpoints: engine.load_checkpoint('{tmp_path / 'saved'}')"
    )


def test_of_two_runs_that_save_the_same_step_at_once_neither_replaces_the_other(tmp_path: Path, run):
    other = RunIdentity()
    both = [SavingDirectory(tmp_path, None, 4, identity, Ranks.single()) for identity in (run, other)]
    for directory in both:
        directory.make()  # there is no step4 yet
    with pytest.warns(UserWarning, match="step4 is there and not of this run"):
        for directory in both:
            with directory.unfinished() as folder:
                with create_store([folder], "copy", [4096]) as store:
                    store.commit(b"")
                directory.publish(folder / "copy.store")
    marks = [read_mark(directory.target) for directory in both]
    assert [(mark.run, mark.tag) for mark in marks if mark] == [(run.value, both[0].tag), (other.value, both[1].tag)]
    assert [directory.tag for directory in both] == ["step4", f"step4-{other.value[:8]}"]
    other.release()


def test_a_tag_that_another_run_takes_in_the_last_moment_stays_its(tmp_path: Path, run, monkeypatch):
    real, other = Path.rename, RunIdentity()

    def late(path: Path, target: Path) -> Path:
        if path.name == "new" and target.name == "step4":
            with monkeypatch.context() as once:
                once.setattr(Path, "rename", real)
                save(tmp_path, other, 4)
        return real(path, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.warns(UserWarning, match="step4 is there and not of this run"):
        assert save(tmp_path, run, 4) == f"step4-{run.value[:8]}"
    mark = read_mark(tmp_path / "step4")
    assert mark is not None and mark.run == other.value
    other.release()


def test_stores_that_nobody_goes_on_from_are_named(tmp_path: Path):
    for name in ("run-1", "mine", "empty"):
        with create_store([tmp_path], name, [4096]) as store:
            if name != "empty":
                store.commit(b"")
    assert what_is_there(tmp_path, 1) == (
        "mine.store under a name that is no run's: call it run-1.store to go on from it"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_store_of_another_user_is_named(tmp_path: Path):
    with create_store([tmp_path], "run-1", [4096]) as store:
        store.commit(b"")
    os.chown(tmp_path / "run-1.store", 12345, -1)
    assert what_is_there(tmp_path, 1) == "run-1.store of user 12345"


def test_who_gives_a_checkpoint_or_a_path_of_runs_is_told_what_to_give(tmp_path: Path, run):
    save(tmp_path / "saved", run, 1, "best")
    with (
        pytest.raises(StoreMissing, match=r"It is one itself: give its directory and its tag, '.*saved' and 'best'"),
        CheckpointDirectory(tmp_path / "saved" / "best").open(None),
    ):
        pass
    (tmp_path / "nvme").mkdir()
    create_store([tmp_path / "nvme"], "run-3", [4096]).close()
    with (
        pytest.raises(StoreMissing, match=r"stores of runs: give one of them \(run-3.store\) to offload inspect"),
        CheckpointDirectory(tmp_path / "nvme").open(None),
    ):
        pass


def test_damaged_checkpoints_are_not_named_as_a_way_out(tmp_path: Path, run, monkeypatch):
    monkeypatch.setattr(folder_module, "step_of", lambda folder: 1)
    for step in (1, 2, 3):
        save(tmp_path, run, step)
    for step in (2, 3):
        (tmp_path / f"step{step}" / "data.0").unlink()
    assert CheckpointDirectory(tmp_path).others("step3") == "These are there, too: step1 (step 1)."


@pytest.mark.parametrize("content", ["", "[" * 4000, '{"format": 1}', '{"format": 2, "run": "a"}', "\x00"])
def test_a_mark_that_makes_no_sense_belongs_to_no_run(tmp_path: Path, run, content: str):
    save(tmp_path, run, 1)
    (tmp_path / "step1" / "checkpoint.json").write_text(content)
    assert read_mark(tmp_path / "step1") is None
    for step in (2, 3):
        save(tmp_path, run, step, keep_last=1)
    assert names(tmp_path) == ["latest", "step1", "step3"]


# What a process leaves that dies.


def test_what_a_live_process_makes_stays_and_what_a_dead_one_made_goes(tmp_path: Path):
    """Whatever their process ids are: containers count their own."""
    live, dead = Workplace(tmp_path), Workplace(tmp_path)
    (dead.new / "data.0").touch()
    dead._lock.close()
    clear_left_over(tmp_path)
    assert list(tmp_path.iterdir()) == [live.folder]
    live.close()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_that_ends_leaves_the_run_of_its_parent_alone(tmp_path: Path, run):
    save(tmp_path, run, 1)
    held = list(tmp_path.glob(".run-*"))
    child = os.fork()
    if child == 0:
        run.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(held) == 1 and list(tmp_path.glob(".run-*")) == held


@pytest.mark.parametrize("left", [(), ("lock",), ("lock", "new"), ("lock", "new", "removed")])
def test_a_removal_that_is_killed_leaves_what_the_next_one_removes(tmp_path: Path, left):
    folder = tmp_path / ".unfinished-0123456789abcdef"
    folder.mkdir()
    for name in left:
        (folder / name).touch() if name == "lock" else (folder / name).mkdir()
    clear_left_over(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_earlier_versions_left_goes_unless_it_may_be_needed(tmp_path: Path, run):
    """They had no lock, and their process id in the name. A whole generation may have been a checkpoint."""
    dead, alive = 1 << 22, os.getppid()
    for name in (f"{dead}-01234567", f"{dead}-89abcdef.store", f"{os.getpid()}-01234567", f"{alive}-01234567"):
        (tmp_path / f".unfinished-{name}" / "copy.store").mkdir(parents=True)
        (tmp_path / f".unfinished-{name}" / "model.safetensors").touch()
    (tmp_path / f".unfinished-{dead}-00000000").symlink_to(tmp_path)
    in_use = tmp_path / f".unfinished-{dead}-11111111"
    in_use.mkdir()
    save(tmp_path / "elsewhere", run, 1)
    (tmp_path / "elsewhere" / "step1").rename(tmp_path / f".unfinished-{dead}-22222222")
    shutil.rmtree(tmp_path / "elsewhere")
    with create_store([in_use], "copy", [4096]):
        clear_left_over(tmp_path)
        left = [f"{dead}-00000000", f"{dead}-11111111", f"{dead}-22222222", f"{alive}-01234567"]
        assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(f".unfinished-{name}" for name in left)
    clear_left_over(tmp_path)
    assert not in_use.exists()


def test_the_name_of_what_was_to_be_replaced_is_given_back(tmp_path: Path, run, monkeypatch):
    """Where the file system cannot exchange two names, there is a moment in which the tag has none."""
    save(tmp_path, run, 1, "best")
    monkeypatch.setattr(folder_module, "exchange", lambda path, other: False)
    real = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name == "new" and target.name == "best":
            raise KeyboardInterrupt
        return real(path, target)

    with monkeypatch.context() as dying:
        dying.setattr(Path, "rename", killed)
        dying.setattr(Workplace, "close", lambda place: place._lock.close())
        with contextlib.suppress(KeyboardInterrupt):
            save(tmp_path, run, 2, "best")
    assert names(tmp_path) == ["latest"]
    CheckpointDirectory(tmp_path).recover()
    assert names(tmp_path) == ["best", "latest"] and read_mark(tmp_path / "best").step == 1
    save(tmp_path, run, 3, "best")
    assert names(tmp_path) == ["best", "latest"] and read_mark(tmp_path / "best").step == 3


def test_an_exchange_is_on_the_disk_before_what_was_there_goes(tmp_path: Path, run, monkeypatch):
    save(tmp_path, run, 1, "best")
    events = []
    real_exchange, real_sync, real_remove = folder_module.exchange, folder_module.sync_folder, workplace._remove
    monkeypatch.setattr(folder_module, "exchange", lambda a, b: (events.append("exchange"), real_exchange(a, b))[1])
    monkeypatch.setattr(folder_module, "sync_folder", lambda f: (events.append(f"sync {f.name}"), real_sync(f)))
    monkeypatch.setattr(workplace, "_remove", lambda f: (events.append("remove"), real_remove(f)))
    save(tmp_path, run, 2, "best")
    assert events == ["sync new", "sync new", "exchange", f"sync {tmp_path.name}", f"sync {tmp_path.name}", "remove"]


def test_a_new_directory_and_those_above_it_are_on_the_disk(tmp_path: Path, monkeypatch):
    synced = []
    monkeypatch.setattr("offload.checkpoint.publish.sync_folder", synced.append)
    make_directory(tmp_path / "a" / "b")
    assert synced == [tmp_path / "a", tmp_path]


def test_a_folder_that_cannot_be_looked_into_hides_no_checkpoint(tmp_path: Path, run, monkeypatch):
    for step in (1, 2):
        save(tmp_path, run, step)
    (tmp_path / "a-private-one").mkdir()
    real = Path.exists

    def exists(path: Path) -> bool:
        if path.parent.name == "a-private-one":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "exists", exists)
    assert [saved.name for saved in CheckpointDirectory(tmp_path).saved()] == ["step1", "step2"]


def test_a_checkpoint_whose_place_could_not_be_taken_has_its_name_again(tmp_path: Path, run, monkeypatch):
    save(tmp_path, run, 1, "best")
    monkeypatch.setattr(folder_module, "exchange", lambda path, other: False)
    real = Path.rename

    def full(path: Path, target: Path) -> Path:
        if path.name == "new" and target.name == "best":
            raise OSError(28, "No space left on device")
        return real(path, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "rename", full)
        save(tmp_path, run, 2, "best")
    mark = read_mark(tmp_path / "best")
    assert mark is not None and mark.step == 1 and not list(tmp_path.glob(".unfinished-*"))


def test_all_that_a_workplace_holds_goes_and_its_lock_stays_with_what_does_not(tmp_path: Path, monkeypatch):
    with Workplace(tmp_path) as place:
        (place.folder / "latest").write_bytes(b"step1")
        (place.new / "data.0").write_bytes(b"half of it")
    assert list(tmp_path.iterdir()) == []
    with Workplace(tmp_path) as place, monkeypatch.context() as patched:
        patched.setattr(workplace, "_remove_one", lambda entry: place.folder.rmdir())
        place.close()
        assert (place.folder / "lock").exists()


def test_a_folder_that_cannot_be_made_leaves_no_workplace_in_use(tmp_path: Path, monkeypatch):
    real = Path.mkdir

    def mkdir(path: Path, *given, **named) -> None:
        if path.name == "new":
            raise OSError(28, "No space left on device")
        real(path, *given, **named)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(Path, "mkdir", mkdir)
        Workplace(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_made_leaves_no_folder(tmp_path: Path, monkeypatch):
    def take(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(workplace, "take", take)
        Workplace(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_who_comes_to_read_what_was_removed_is_told(tmp_path: Path):
    file = tmp_path / "mark"
    file.touch()
    number = os.open(file, os.O_RDONLY)
    real = os.fstat
    with pytest.MonkeyPatch.context() as patched, pytest.raises(FileNotFoundError):
        patched.setattr(locks.os, "fstat", lambda descriptor: file.unlink(missing_ok=True) or real(descriptor))
        locks.share(file)
    os.close(number)
