"""Memory of this process, as the kernel counts it."""

from pathlib import Path


def rss_bytes() -> int:
    """Memory in use now, huge pages of hugetlbfs included, which the kernel leaves out of the resident set."""
    return _status("VmRSS") + _status("HugetlbPages")


def peak_rss_bytes() -> int:
    """The most that ``rss_bytes`` has been since the process started."""
    return _status("VmHWM") + _status("HugetlbPages")


def available_bytes() -> int:
    """Memory of the machine that can be taken without swapping."""
    return _field(Path("/proc/meminfo"), "MemAvailable")


def _status(name: str) -> int:
    return _field(Path("/proc/self/status"), name)


def _field(path: Path, name: str) -> int:
    """The value of ``name: 123 kB`` in bytes; 0 if there is no such line."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
