"""``offload doctor`` on machines that lack something: the line that says so, the repair, and the exit status."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest

from aio_ext.profile import IoProfile, save_profile
from offload.cli import main
from offload.doctor import Finding, Status, device, drive, examination, examine, memory, pci, software, storage
from offload.ranks import topology
from swapper import paths as swapper_paths

RESTRICT = Path(__file__).parent.parent / "aio_ext"


def restricted(restriction: str, code: str) -> str:
    """What a program prints that knows the modules of the doctor, under a restriction."""
    begin = (
        f"import sys; sys.path.insert(0, {str(RESTRICT)!r}); from restrict import restrict; restrict({restriction!r})"
    )
    return forked.run_well(f"{begin}\nfrom offload.doctor import memory, software\n{code}")


def in_a_child(code: str, *starter: str, hidden: str = "", **environment: str) -> str:
    """What a program prints that knows the modules of the doctor, begun by another, or in an environment, or without a
    module."""
    code = f"import sys; sys.modules[{hidden!r}] = None; from offload.doctor import memory, software\n{code}"
    command = [*starter, sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


SHOW = "\nprint(*(f'{found.status.value} | {found.says} | {found.repair}' for found in checked()), sep='\\n')"


def only(findings: Iterator[Finding], subject: str) -> Finding:
    (found,) = [finding for finding in findings if finding.subject == subject]
    return found


# Software.


@pytest.mark.parametrize(
    ("restriction", "says", "repair"),
    [
        ("setup", "a seccomp filter forbids io_uring", "allow io_uring_setup, io_uring_enter and io_uring_register"),
        ("enter", "a seccomp filter forbids io_uring", "allow io_uring_setup, io_uring_enter and io_uring_register"),
        ("hidden", "this kernel has no io_uring, or a seccomp filter hides it", "Linux 5.6 or newer has it"),
    ],
)
def test_io_uring_that_is_forbidden_could_be_better(restriction: str, says: str, repair: str):
    status, said, fix = restricted(restriction, f"checked = software.io_uring{SHOW}").split(" | ")
    assert status == "could be better" and fix.startswith(repair) and ": Op" not in fix
    assert said.startswith(says) and said.endswith("I/O goes by threads")


def test_little_locked_memory_could_be_better():
    shown = in_a_child(
        f"checked = memory.locked_memory{SHOW}", sys.executable, str(RESTRICT / "restrict.py"), "memlock"
    )
    if "without io_uring" in shown:
        pytest.skip("io_uring does not work here")
    assert shown.startswith("could be better | a limit of 65.5 kB: memory is not registered with the ring")
    assert "ulimit -l unlimited" in shown


@pytest.mark.parametrize(("module", "check"), [("aio_ext._aio", "queues"), ("offload.kernels._kernels", "kernels")])
def test_a_native_part_that_is_missing_is_broken(module: str, check: str):
    shown = in_a_child(f"checked = software.{check}{SHOW}", hidden=module)
    assert shown.startswith("broken | ") and "pip install . in the project's folder" in shown


def test_a_kernel_chosen_by_hand_could_be_better():
    shown = in_a_child(f"checked = software.kernels{SHOW}", OFFLOAD_ISA="scalar")
    assert shown == "could be better | scalar, because OFFLOAD_ISA says so | unset OFFLOAD_ISA\n"


# Cores.


def test_a_cpu_quota_could_be_better_and_slow_cores_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(software, "_ROOT", tmp_path)
    fake(tmp_path, {"proc/thread-self/status": "Cpus_allowed_list:\t0-23\n", "proc/self/cgroup": "0::/\n"})
    fake(tmp_path / "sys", {"devices/system/cpu/online": "0-23\n", "devices/cpu_atom/cpus": "16-23\n"})
    for cpu in range(0, 16, 2):
        for each in (cpu, cpu + 1):
            fake(tmp_path / f"sys/devices/system/cpu/cpu{each}/topology", {"core_cpus_list": f"{cpu}-{cpu + 1}\n"})
    (found,) = software.cores()
    assert found.status is Status.GOOD and found.says.startswith("16 cores with 24 threads, 8 of them slower")
    fake(tmp_path, {"sys/fs/cgroup/cpu.max": "350000 100000\n"})
    (found,) = software.cores()
    assert found.status is Status.BETTER and found.says.startswith("3.5 of 16 cores, by a CPU quota")
    assert found.repair.startswith("docker run --cpus")
    fake(tmp_path, {"proc/version": "Linux version 6.6.87-microsoft-standard-WSL2\n"})
    assert only(software.cores(), "pinned memory").status is Status.BETTER


@pytest.mark.parametrize(("allowed", "status"), [("0-63", Status.BETTER), ("32-63", Status.GOOD)])
def test_a_process_on_the_cores_of_two_nodes_could_be_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, status: Status
):
    monkeypatch.setattr(memory, "_SYS", tmp_path / "sys")
    fake(tmp_path, {"proc/thread-self/status": f"Cpus_allowed_list:\t{allowed}\n"})
    fake(tmp_path / "sys/devices/system", {"cpu/online": "0-63\n", "node/node0/cpulist": "0-31\n"})
    fake(tmp_path / "sys/devices/system", {"node/node1/cpulist": "32-63\n"})
    (found,) = memory.numa()
    assert found.status is status and found.says.startswith("2 nodes: node0 with cores 0-31, node1 with cores 32-63")
    assert ("comes from each by turns" in found.says) == (status is Status.BETTER)


def test_one_memory_of_cpu_and_gpu_and_one_queue_are_told(monkeypatch: pytest.MonkeyPatch):
    properties = SimpleNamespace(name="GB10", is_integrated=1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (100, 128))
    monkeypatch.setattr("offload.device.cuda.CudaDevice.__init__", lambda self, device: None)
    monkeypatch.setattr("offload.device.cuda.CudaDevice.kernels_unsupported_reason", lambda self: None)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = {finding.subject: finding for finding in device.gpus()}
    assert found["one memory"].status is found["GPU queues"].status is Status.BETTER
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    properties.is_integrated = 0
    assert not {"one memory", "GPU queues"} & {finding.subject for finding in device.gpus()}


# Memory.


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A group with a limit, under either version of cgroups. Skips where it cannot be made."""
    for root, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"offload-doctor-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit))
            yield group
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("needs the right to make a memory cgroup")


def test_the_limit_of_a_memory_cgroup_is_told():
    with memory_cgroup(1_500_000_000) as group:
        enter = f"open('{group}/cgroup.procs', 'w').write(str(__import__('os').getpid()))"
        told = f"checked = memory.cgroup{SHOW}\nchecked = memory.host_memory{SHOW}"
        shown, available = forked.run_well(f"from offload.doctor import memory\n{enter}\n{told}").splitlines()
    assert shown.startswith("could be better | 1.5 GB of the machine's ") and f"used, by {group}" in shown
    assert "docker run --memory" in shown
    assert available.startswith("good | 1.") and " of 1.5 GB can be taken" in available


def test_without_huge_pages_the_switch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "kernel/mm/transparent_hugepage/enabled"
    file.parent.mkdir(parents=True)
    file.write_text("always madvise [never]\n")
    monkeypatch.setattr(memory, "_SYS", tmp_path)
    monkeypatch.setattr(memory.Memory, "huge_bytes", lambda self: 0)
    (found,) = memory.huge_pages()
    assert found.status is Status.BETTER and found.repair == f"echo madvise | sudo tee {file}"
    file.write_text("always [madvise] never\n")
    (found,) = memory.huge_pages()
    assert found.status is Status.BETTER and "compact_memory" in found.repair


# Storage.


def test_a_directory_in_memory_could_be_better_and_is_not_measured(capsys: pytest.CaptureFixture[str]):
    if swapper_paths.file_system("/dev/shm") != "tmpfs":
        pytest.skip("needs a tmpfs")
    assert [check.__name__ for check in storage.checks_of(Path("/dev/shm"))] == ["directory", "free_space", "direct_io"]
    (found,) = storage.directory(Path("/dev/shm"))
    assert found.status is Status.BETTER and found.repair == "nvme_path on a local SSD"
    assert found.says == "tmpfs: what is stored there takes memory, and host_memory does not count it"


@contextlib.contextmanager
def ext4(image: Path, at: Path) -> Iterator[None]:
    """An ext4 of 320 MiB in a file. Skips where nobody may mount one."""

    def works(*command: str) -> bool:
        with contextlib.suppress(FileNotFoundError):  # often in /usr/sbin, which not everybody looks into
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        return False

    with image.open("wb") as file:
        file.truncate(320 << 20)
    at.mkdir()
    if not (works("mkfs.ext4", "-q", str(image)) and works("mount", "-o", "loop", str(image), str(at))):
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True)


def test_a_full_disk_is_broken_and_leaves_the_other_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "mounted"
    monkeypatch.setattr(examination, "_OF_THE_MACHINE", {})
    with ext4(tmp_path / "image", place):
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
        with (place / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - (1 << 20))
        (section,) = examine([place], lambda: None)
        found = {finding.subject: finding for finding in section.findings}
    assert found["directory"].says == "ext4, on a local disk, can be written"
    assert found["free space"].status is Status.BROKEN and "too little for a store" in found["free space"].says
    assert found["free space"].repair == f"free some: du -xh --max-depth=2 {place} | sort -h | tail"
    assert "bandwidth" not in found
    assert "through the file" in found["drive"].says and str(tmp_path / "image") in found["drive"].says


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_network_is_refused_with_the_words_of_the_engine(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(swapper_paths, "file_system", lambda _: kind)
    monkeypatch.setattr(examination, "_OF_THE_MACHINE", {})
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    (broken,) = [finding for finding in facts["findings"] if finding["status"] == "broken"]
    with pytest.raises(swapper_paths.StoreUnsafe) as refused:
        swapper_paths.look_at(tmp_path)
    assert broken["says"] == refused.value.args[0] and f"of type {kind}" in broken["says"]
    assert broken["repair"] == "Give a directory of your own on a local SSD."
    assert facts["counts"]["broken"] == 1


def test_a_path_that_is_not_there_is_one_broken_line(tmp_path: Path):
    (check,) = storage.checks_of(tmp_path / "nothing")
    (found,) = check(tmp_path / "nothing")
    assert found.status is Status.BROKEN and found.repair == f"Create it: mkdir -p {tmp_path / 'nothing'}"


PROFILE = IoProfile(
    backend="threads", block_bytes=1 << 20, queue_depth=16, num_threads=4,
    read_bytes_per_s=1.0, write_bytes_per_s=1.0, mixed_bytes_per_s=1.0, mixed_q=1.0,
)  # fmt: skip


def test_bandwidth_is_held_against_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(storage, "_rates", lambda path, backend: (3e9, 2e9))
    (found,) = storage.bandwidth(tmp_path)
    assert found.status is Status.BETTER and "has no I/O profile" in found.says
    assert found.repair == f"offload bench {tmp_path}"
    for read, status in ((3.1e9, Status.GOOD), (6.1e9, Status.BETTER)):
        save_profile(tmp_path, replace(PROFILE, read_bytes_per_s=read, write_bytes_per_s=2e9))
        (found,) = storage.bandwidth(tmp_path)
        assert found.status is status and f"its profile says {read / 1e9:.1f} GB/s and 2.0 GB/s" in found.says
    assert "iostat" in found.repair


def test_the_quick_look_moves_bytes_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage, "_SECONDS", 0.01)
    read, write = storage._rates(tmp_path, PROFILE)
    assert read > 1e6 and write > 1e6 and list(tmp_path.iterdir()) == []


def fake(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


DISK = {"size": "2000409264\n", "queue/rotational": "0\n", "queue/scheduler": "[none] mq-deadline\n"}


def tree(root: Path) -> Path:
    """An encrypted RAID 0 of two NVMe drives, one of them in a slot that gives it half of its lanes."""
    for number, width in (("1", 4), ("2", 2)):
        slot = root / f"devices/pci0000:00/0000:0{number}:00.0"
        fake(slot, {"current_link_speed": "16.0 GT/s PCIe\n", "max_link_speed": "16.0 GT/s PCIe\n",
                    "current_link_width": f"{width}\n", "max_link_width": "4\n", "numa_node": "1\n"})  # fmt: skip
        name = f"nvme{number}n1"
        fake(slot / name, {**DISK, "device/model": "Samsung SSD 990 PRO 1TB  \n", f"{name}p1/partition": "1\n"})
    fake(root / "block/md0", {"md/level": "raid0\n"})
    fake(root / "block/dm-0", {"dm/uuid": "CRYPT-LUKS2-aa\n", "dm/name": "vault\n"})
    fake(root / "devices/system/node/node1", {"cpulist": "8-15\n"})
    for above, below in (("dm-0", "block/md0"), ("md0", "devices/pci0000:00/0000:01:00.0/nvme1n1/nvme1n1p1"),
                         ("md0", "devices/pci0000:00/0000:02:00.0/nvme2n1/nvme2n1p1")):  # fmt: skip
        (root / "block" / above / "slaves").mkdir(exist_ok=True)
        (root / "block" / above / "slaves" / Path(below).name).symlink_to(root / below)
    (root / "dev/block").mkdir(parents=True)
    (root / "dev/block/252:0").symlink_to(root / "block/dm-0")
    return root


@pytest.fixture
def drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (drive, storage):
        monkeypatch.setattr(module, "_SYS", tree(tmp_path / "sys") if module is drive else tmp_path / "sys")
    monkeypatch.setattr(topology, "block_device_number", lambda path: os.makedev(252, 0))
    return tmp_path


def test_drives_are_found_below_encryption_raid_and_partitions(drives: Path):
    first, second = drive.drives_under(drives)
    assert (first.name, second.name) == ("nvme1n1", "nvme2n1")
    assert first.through == ("LUKS vault", "RAID 0 md0") and first.medium == "solid state"
    says = "nvme1n1: Samsung SSD 990 PRO 1TB, 1.0 TB, solid state, through LUKS vault, RAID 0 md0"
    found = list(storage.drive(drives))
    assert found[0].says.startswith(says) and found[0].repair.startswith("cryptsetup refresh")
    (drives / "sys/devices/pci0000:00/0000:02:00.0/nvme2n1/queue/scheduler").write_text("none [bfq]\n")
    slow = only(storage.drive(drives), "I/O scheduler")
    assert slow.repair == "echo none | sudo tee /sys/block/nvme2n1/queue/scheduler"


def test_a_link_with_half_of_its_lanes_and_the_node_are_told(drives: Path):
    found = list(storage.pcie(drives))
    assert [(finding.status, finding.says) for finding in found if finding.subject == "PCIe link"] == [
        (Status.GOOD, "nvme1n1: PCIe 16 GT/s x4"),
        (Status.BETTER, "nvme2n1: PCIe 16 GT/s x2 of 16 GT/s x4"),
    ]
    assert "node 1: numactl --cpunodebind=1" in found[1].says


def test_a_virtual_disk_is_no_rotating_one(tmp_path: Path):
    folder = fake(tmp_path / "vda", {**DISK, "queue/rotational": "1\n"})
    assert drive._drive(folder, ()).medium == "virtual"
    folder = fake(tmp_path / "sda", {**DISK, "queue/rotational": "1\n", "device/model": "ST8000\n"})
    assert "every step waits for its head" in storage._drive(drive._drive(folder, ())).says


# GPUs.


@pytest.mark.parametrize(
    ("driver", "status", "says"),
    [(False, Status.BROKEN, "1 of NVIDIA on the bus, and no driver"), (True, Status.BETTER, "driver 570.86.15, but")],
)
def test_a_gpu_that_torch_cannot_use(
    driver: bool, status: Status, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake(tmp_path / "bus/pci/devices/0000:01:00.0", {"vendor": "0x10de\n", "class": "0x030200\n"})
    if driver:
        fake(tmp_path, {"driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\n"})
    monkeypatch.setattr(device, "_SYS", tmp_path)
    monkeypatch.setattr(device, "_PROC", tmp_path)
    monkeypatch.setattr("torch.version.cuda", None)
    (found,) = device.driver()
    assert found.status is status and found.says.startswith(says) and found.repair


# The command.


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch):
    def of_the_moon() -> Iterator[Finding]:
        raise PermissionError("it is far")
        yield

    monkeypatch.setattr(examination, "_OF_THE_MACHINE", {"all": (of_the_moon, memory.numa)})
    (section,) = examine([], lambda: None)
    assert section.findings[0] == Finding(
        "of the moon", Status.BETTER, "it could not be checked: PermissionError: it is far"
    )
    assert section.findings[1].subject == "NUMA"


def test_lines_are_aligned_and_the_status_is_that_of_the_worst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(storage, "_SECONDS", 0.01)
    monkeypatch.setattr(storage, "_LEAST_FREE_BYTES", 1)
    status = main(["doctor", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    num_broken = sum(line.startswith("  broken  ") for line in lines)  # as a driver may be
    assert status == (num_broken > 0)
    found = [line for line in lines if line.startswith(("  good  ", "  could be better  ", "  broken  "))]
    assert len(found) >= 15 and {line[17:19] for line in found} == {"  "}
    starts = {line[19:].split("  ")[0]: line for line in found}
    assert {"offload", "torch", "io_uring", "memlock", "directory", "drive", "free space", "bandwidth"} <= starts.keys()
    assert lines[-1].endswith(f" {num_broken} broken") and f"storage {tmp_path}" in lines
    assert main(["doctor", str(tmp_path / "nothing")]) == 1


def test_links_come_from_the_nearest_device_of_pci_express(tmp_path: Path):
    assert pci.link_of(tmp_path) is None
    values: dict[str, Any] = {"current_link_speed": "Unknown\n", "max_link_speed": "Unknown\n",
                              "current_link_width": "0\n", "max_link_width": "255\n"}  # fmt: skip
    assert pci.link_of(fake(tmp_path / "slot", values) / "nvme0") is None
