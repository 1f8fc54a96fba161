# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A process and its descendants: their processor time, their memory, their end."""

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TICK = 1 / os.sysconf("SC_CLK_TCK")
# Seconds after SIGTERM until SIGKILL.
GRACE = 5.0


def raise_descriptor_limit() -> int:
    """Raises the limit for this process and those it starts; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on, see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def tree(root: int) -> Iterator[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parent = int(stat_fields(int(name))[1])
            except OSError:
                continue  # It has ended meanwhile.
            children.setdefault(parent, []).append(int(name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
        yield pid


class Usage(NamedTuple):
    """Processor time of a tree of processes so far, in seconds."""

    # In clock ticks, of threads that have ended too.
    coarse: float
    # In nanoseconds, of each thread that is there.
    threads: dict[str, float]

    @classmethod
    def of(cls, root: int) -> "Usage":
        """Reads it."""
        coarse, threads = 0.0, {}
        for pid in tree(root):
            try:
                coarse += sum(map(int, stat_fields(pid)[11:15])) * TICK
                for task in Path(f"/proc/{pid}/task").iterdir():
                    run = (task / "schedstat").read_text().split()[0]
                    threads[task.name] = int(run) / 1e9
            except OSError:
                continue
        return cls(coarse, threads)

    def since(self, before: "Usage") -> float:
        """What was used since then.

        The sum over threads is exact but misses those that have ended; the ticks
        miss none and are off by one or two.
        """
        fine = sum(
            used - before.threads.get(thread, 0.0)
            for thread, used in self.threads.items()
        )
        return max(fine, self.coarse - before.coarse - 2 * TICK)


def resident_bytes(root: int) -> int:
    """Resident memory of a tree; pages that processes share count in each."""
    total = 0
    for pid in tree(root):
        try:
            pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        except OSError:
            continue
        total += int(pages) * resource.getpagesize()
    return total


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process that leads its own group."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
