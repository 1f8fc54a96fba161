# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`make demo`: what it prints, and that it leaves nothing behind."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import HANG_GUARD, ROOT

# Every process of a demo has this variable, with a value of its own.
MARK = "PD_PROXY_DEMO_TEST"
DIGITS = str.maketrans("123456789", "000000000")
CURL = shutil.which("curl")


class Demo:
    """A running demo, in a terminal's stead."""

    def __init__(self, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "demo.py"), *arguments],
            env={**os.environ, MARK: self.mark},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        self.output = self.process.stdout

    def read_until(self, text: str) -> str:
        """What it prints, up to a text."""
        read = ""
        while text not in read:
            piece = self.output.read(1)
            assert piece, read
            read += piece
        return read

    def interrupt(self) -> tuple[str, int]:
        """Ctrl-C; returns what it still prints, and its status."""
        self.process.send_signal(signal.SIGINT)
        rest = self.output.read()
        return rest, self.process.wait(HANG_GUARD)

    def left(self) -> list[str]:
        """The command lines of its processes that are still there."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (directory / "environ").read_bytes():
                    found.append((directory / "cmdline").read_text())
        return found


@contextlib.contextmanager
def demo(*arguments: str) -> Iterator[Demo]:
    """Runs a demo; its end is part of the test."""
    running = Demo(*arguments)
    guard = threading.Timer(HANG_GUARD, running.process.kill)
    guard.start()
    try:
        yield running
    finally:
        guard.cancel()
        running.process.terminate()
        running.process.wait(HANG_GUARD)
        running.output.close()


def shell(command: str) -> str:
    """What a command prints; fails unless it succeeds."""
    return subprocess.run(
        command, shell=True, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def in_the_readme() -> str:
    """The output that the README shows."""
    readme = (ROOT / "README.md").read_text()
    [shown] = [block for block in readme.split("```") if "24 tokens" in block]
    return shown.lstrip("\n")


def test_it_prints_what_the_readme_shows_and_keeps_on_until_ctrl_c() -> None:
    with demo("--keep") as running:
        shown = running.read_until("another terminal:\n\n    ")
        command = running.read_until("\n")
        answer = shell(command) if CURL else ""
        rest, status = running.interrupt()
        assert (running.left(), status) == ([], 0)
    output = shown.partition("Everything goes on")[0] + rest.lstrip("\n")
    assert output.translate(DIGITS) == in_the_readme().translate(DIGITS)
    if not CURL:
        pytest.skip("its curl line was not tried: no curl here")
    assert answer.count('"content":') > 24
    assert answer.endswith("data: [DONE]\n\n")


def test_ctrl_c_in_the_middle_of_the_answer_leaves_nothing() -> None:
    with demo() as running:
        running.read_until(".3 ")
        rest, status = running.interrupt()
        assert (running.left(), status) == ([], 130)
        assert "Traceback" not in rest
