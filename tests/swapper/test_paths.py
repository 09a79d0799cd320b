"""Which directories can hold a store, and what is said of the others."""

import errno
import os
import re
from pathlib import Path

import pytest

import aio_ext
from swapper import StorageIOError, StoreUnsafe, create_store, readable_bytes
from swapper import paths as swapper_paths
from swapper.paths import Medium, look_at, medium_of


@pytest.mark.parametrize(
    ("file_system", "medium"),
    [
        *((name, Medium.DISK) for name in ("ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "fuse.fuse-overlayfs")),
        *((name, Medium.DISK) for name in ("unknown", "")),
        *((name, Medium.MEMORY) for name in ("tmpfs", "ramfs", "devtmpfs")),
        *((name, Medium.ELSEWHERE) for name in ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre")),
        *((name, Medium.ELSEWHERE) for name in ("fuse", "fuse.sshfs", "fuse.s3fs", "fuseblk")),
    ],
)
def test_a_type_of_file_system_says_where_its_bytes_are(file_system: str, medium: Medium):
    assert medium_of(file_system) is medium


def test_a_directory_is_the_same_by_all_its_names(tmp_path: Path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "link").symlink_to("one")
    names = ["one", "one/", "two/../one", "link", "./link"]
    assert len({look_at(tmp_path / name) for name in names}) == 1
    assert look_at(tmp_path / "two") != look_at(tmp_path / "one")
    assert list((tmp_path / "one").iterdir()) == []


def test_a_store_can_be_on_a_link_to_a_directory(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with create_store([tmp_path / "link"], None, [4096]):
        assert list((tmp_path / "real").iterdir()) == []


def refusal(path: Path) -> str:
    """What is said of a path that cannot hold a store: one line, and the same that a store says."""
    with pytest.raises(StoreUnsafe) as caught:
        look_at(path)
    with pytest.raises(StoreUnsafe) as from_store:
        create_store([path], None, [4096])
    assert str(caught.value) == str(from_store.value)
    assert "\n" not in caught.value.args[0]
    return str(caught.value)


def test_what_is_no_directory_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    assert "missing does not exist" in refusal(tmp_path / "missing") and "mkdir -p" in refusal(tmp_path / "missing")
    assert "file is not a directory" in refusal(tmp_path / "file")
    assert "fifo is not a directory" in refusal(tmp_path / "fifo")
    assert "dangling is a link to nowhere, which does not exist" in refusal(tmp_path / "dangling")
    assert "too long" in refusal(tmp_path / ("x" * 300))
    assert r"two\nlines' does not exist" in refusal(tmp_path / "two\nlines")
    assert "cannot create a file in /proc" in refusal(Path("/proc"))


def test_a_queue_that_cannot_be_made_is_an_error_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(**_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(aio_ext, "Queue", fail)
    with pytest.raises(StorageIOError, match=r"making a queue for .* failed: .*Too many open files"):
        create_store([tmp_path], None, [4096])


def test_a_directory_that_may_not_be_written_is_refused(tmp_path: Path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    assert "Permission denied" in refusal(tmp_path)


def test_a_network_is_refused_before_anything_is_made_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(swapper_paths, "file_system", lambda _: "nfs4")
    monkeypatch.setattr(swapper_paths, "open_nameless", lambda *_: pytest.fail("a file was made"))
    with pytest.raises(StoreUnsafe, match=f"{re.escape(str(tmp_path))} is on a file system of type nfs4.* local disk"):
        look_at(tmp_path)


def test_looking_leaves_no_descriptor_open(tmp_path: Path):
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    look_at(tmp_path)
    before = num_open()
    for path in (tmp_path, tmp_path / "missing", Path("/proc")):
        for _ in range(5):
            try:
                look_at(path)
            except StoreUnsafe:
                continue
    assert num_open() == before


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1,024 bytes (1.0 KiB)"),
        (227_278_848, "227,278,848 bytes (216.8 MiB)"),
        (3 << 30, "3,221,225,472 bytes (3.0 GiB)"),
        (1 << 62, "4,611,686,018,427,387,904 bytes (4,194,304.0 TiB)"),
    ],
)
def test_a_size_is_said_exactly_and_as_people_read_it(nbytes: int, text: str):
    assert readable_bytes(nbytes) == text
