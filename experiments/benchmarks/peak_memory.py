"""What a piece of work adds to this process's resident memory, by Linux's own high-water mark.

`ru_maxrss` won't do: a child process starts with the peak of the process that started it, so the same work looked
ten times larger when a large test runner launched it.
"""

from pathlib import Path

PROCESS = Path("/proc/self")


def _status(key: str) -> float:
    line = next(
        line
        for line in (PROCESS / "status").read_text(encoding="utf-8").splitlines()
        if line.startswith(key + ":")
    )
    return int(line.split()[1]) / 1024


def start() -> float:
    """Set the high-water mark to what is resident now, and return that, in MiB. Linux only."""
    (PROCESS / "clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def peak_above(baseline: float) -> float:
    """MiB between `baseline` and the highest resident memory since `start`."""
    return _status("VmHWM") - baseline
