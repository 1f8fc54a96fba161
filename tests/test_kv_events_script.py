# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""kv_events.sh with a stub `vllm` on PATH, and the real subscriber and curl."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from kv_publisher import HOST, free_ports, session_members
from rig import HANG_GUARD, ROOT, poll
from stub_vllm import LAST_WORDS

SCRIPT = ROOT / "kv_events.sh"
STUB = ROOT / "tests" / "stub_vllm.py"
# Seconds; the script waits for several interpreters one after the other.
PATIENCE = 3 * HANG_GUARD
MODEL = 'org/a "quoted" model'
# What the script needs apart from what it looks for.
COMMANDS = "bash basename cat dirname grep mktemp readlink rm sleep tail wc xargs"


def command(directory: Path, name: str, *words: str) -> None:
    """Puts a command on a PATH that calls another with its arguments."""
    directory.mkdir(exist_ok=True)
    path = directory / name
    quoted = " ".join(f"'{word}'" for word in words)
    path.write_text(f'#!/bin/sh\nexec {quoted} "$@"\n')
    path.chmod(0o755)


class Run:
    """kv_events.sh as a process, in a session of its own.

    Args:
        folder: of the test.
        script: what to run.
        mode: of the stub, see stub_vllm.py.
        cwd: where to run it.
        env: additional environment variables.

    """

    def __init__(
        self,
        folder: Path,
        script: Path = SCRIPT,
        mode: str = "fine",
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.port, self.live_port, self.replay_port = (free_ports() for _ in range(3))
        self._listener = socket.create_server((HOST, 0))
        self._listener.settimeout(HANG_GUARD)
        self._reports: Any = None
        command(folder / "bin", "vllm", sys.executable, str(STUB))
        command(folder / "bin", "python3", sys.executable)
        self._process = subprocess.Popen(
            ["bash", str(script)],
            cwd=cwd,
            env={
                **os.environ,
                "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
                "TMPDIR": str(self.temporary),
                "HF_MODEL_NAME": MODEL,
                "PORT": str(self.port),
                "KV_EVENTS_PORT": str(self.live_port),
                "KV_REPLAY_PORT": str(self.replay_port),
                "STUB_MODE": mode,
                "STUB_REPORTS": str(self._listener.getsockname()[1]),
                **(env or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def report(self) -> Any:
        """The next thing that the stub engine says."""
        if self._reports is None:
            connection, _ = self._listener.accept()
            connection.settimeout(HANG_GUARD)
            self._reports = connection.makefile()
            connection.close()
        return json.loads(self._reports.readline())

    def started_an_engine(self) -> bool:
        self._listener.settimeout(0)
        try:
            self.report()
        except BlockingIOError:
            return False
        return True

    def finish(self) -> tuple[int, str, str]:
        """Its status, output and errors; nothing of it may be left."""
        out, err = self._process.communicate(timeout=PATIENCE)
        poll(lambda: not session_members(self.pid), "no process is left")
        assert list(self.temporary.iterdir()) == []
        return self._process.returncode, out, err

    def close(self) -> None:
        """Kills what a failed test has left."""
        for pid in session_members(self.pid):
            os.kill(pid, signal.SIGKILL)
        self._process.communicate()
        if self._reports is not None:
            self._reports.close()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def scaled(folder: Path, **limits: int) -> Path:
    """A copy of the script with other limits, and its subscriber beside it."""
    text = SCRIPT.read_text()
    for name, value in limits.items():
        head, found, tail = text.partition(f"\n{name}=")
        assert found, name
        text = f"{head}{found}{value}{tail.lstrip('0123456789')}"
    shutil.copy(ROOT / "kv_events_subscriber.py", folder)
    script = folder / SCRIPT.name
    script.write_text(text)
    return script


@pytest.fixture
def bystanders() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Unrelated processes of the same user: a `python3`, and one called `vllm`."""
    code = "import sys; sys.stdin.read()"
    sleepers = [
        subprocess.Popen([name, "-c", code], executable=sys.executable, stdin=-1)
        for name in ("python3", "vllm")
    ]
    yield sleepers
    alive = [sleeper.poll() is None for sleeper in sleepers]
    for sleeper in sleepers:
        sleeper.communicate()
    assert alive == [True, True]


# --- It works -------------------------------------------------------------------------


def answered(out: str) -> list[str]:
    """The prompts that were printed, each of which must be answered."""
    lines = out.splitlines()
    prompts = [line.removeprefix("Prompt: ") for line in lines if "Prompt: " in line]
    answers = [line for line in lines if line.startswith("Answer: ")]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert json.loads(answer.removeprefix("Answer: "))["choices"] == [
            {"text": f"to {prompt}"}
        ]
    return prompts


@pytest.mark.usefixtures("bystanders")
def test_b83_it_works_through_a_symlink_from_a_path_with_blanks(tmp_path: Path) -> None:
    home = tmp_path / "a home"
    home.mkdir()
    for name in SCRIPT.name, "kv_events_subscriber.py":
        shutil.copy(ROOT / name, home)
    link = tmp_path / "a link"
    link.symlink_to(home / SCRIPT.name)
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    with Run(tmp_path, link, cwd=elsewhere) as run:
        status, out, err = run.finish()
        assert (status, err) == (0, "")
        assert len(answered(out)) == 2
        events = out.partition("Events:\n")[2]
        assert [f'"block_hashes":[{n}]' in events for n in (1000, 1001, 1002)] == [
            True,
            True,
            False,
        ]


@pytest.mark.usefixtures("bystanders")
def test_b83_the_engine_gets_valid_json_with_a_replay_endpoint(tmp_path: Path) -> None:
    env = {
        "VLLM_ARGS": "--dtype float32 --template 'a \"b\" c'",
        "http_proxy": "http://x",
    }
    with Run(tmp_path, cwd=tmp_path, env=env) as run:
        argv, *requests = (run.report() for _ in range(3))
        assert run.finish()[0] == 0
        config = json.loads(argv.pop(argv.index("--kv-events-config") + 1))
        assert config == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "topic": "kv-events",
            "endpoint": f"tcp://*:{run.live_port}",
            "replay_endpoint": f"tcp://127.0.0.1:{run.replay_port}",
        }
        start = ["serve", MODEL, "--host", HOST, "--port", str(run.port)]
        rest = ["--dtype", "float32", "--template", 'a "b" c']
        assert argv == [*start, "--kv-events-config", *rest]
        for request in requests:
            assert request.pop("prompt")
            assert request == {"model": MODEL, "max_tokens": 80, "temperature": 0}


# --- It fails, and says why -----------------------------------------------------------


@pytest.mark.parametrize("missing", ["vllm", "curl", "python3"])
def test_b83_a_missing_tool_is_named(tmp_path: Path, missing: str) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in [*COMMANDS.split(), "curl"]:
        found = shutil.which(name)
        assert found, name
        (tools / name).symlink_to(found)
    command(tools, "vllm", "false")
    command(tools, "python3", sys.executable)
    (tools / missing).unlink()
    with Run(tmp_path, env={"PATH": str(tools)}) as run:
        status, _, err = run.finish()
        assert status == 1
        assert f"kv_events.sh: {missing} is not installed" in err
        assert not run.started_an_engine()


def test_b83_a_subscriber_that_cannot_run_is_noticed_first(tmp_path: Path) -> None:
    alone = Path(shutil.copy(SCRIPT, tmp_path))
    with Run(tmp_path, alone) as run:
        status, _, err = run.finish()
        assert status == 1
        assert "the subscriber does not run" in err
        assert "kv_events_subscriber.py" in err
        assert not run.started_an_engine()


@pytest.mark.parametrize("knob", ["PORT", "KV_EVENTS_PORT", "KV_REPLAY_PORT"])
def test_b83_a_busy_port_is_named(tmp_path: Path, knob: str) -> None:
    with socket.create_server((HOST, 0)) as busy:
        port = str(busy.getsockname()[1])
        with Run(tmp_path, env={knob: port}) as run:
            status, _, err = run.finish()
            assert status == 1
            assert f"port {port} is taken" in err
            assert not run.started_an_engine()


def test_b83_arguments_with_an_open_quote_are_refused(tmp_path: Path) -> None:
    with Run(tmp_path, env={"VLLM_ARGS": "--template 'a"}) as run:
        status, _, err = run.finish()
        assert status == 1
        assert "VLLM_ARGS" in err
        assert not run.started_an_engine()


@pytest.mark.usefixtures("bystanders")
@pytest.mark.parametrize(
    ("mode", "messages"),
    [
        ("die", [LAST_WORDS, "vLLM ended while it started"]),
        ("broken", ["no completion: 500", "engine is dead"]),
        ("deaf", ["not ready in 3 s"]),
    ],
)
def test_b43_a_failing_engine_is_an_error_that_leaves_nothing(
    tmp_path: Path, mode: str, messages: list[str]
) -> None:
    limit = {"STARTUP_TIMEOUT": "3"} if mode == "deaf" else {}
    with Run(tmp_path, mode=mode, env=limit) as run:
        status, _, err = run.finish()
        assert status == 1
        assert run.started_an_engine()
        for message in messages:
            assert message in err


def test_an_engine_without_events_is_an_error(tmp_path: Path) -> None:
    with Run(tmp_path, scaled(tmp_path, EVENTS_TIMEOUT=0), mode="silent") as run:
        status, _, err = run.finish()
        assert status == 1
        assert "no events came in time" in err


# --- It is ended ----------------------------------------------------------------------

SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.usefixtures("bystanders")
@pytest.mark.parametrize("number", SIGNALS)
def test_b43_a_signal_while_the_engine_starts_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Run(tmp_path, mode="deaf") as run:
        run.report()
        os.kill(run.pid, number)
        assert run.finish()[0] == SIGNALS[number]


@pytest.mark.usefixtures("bystanders")
@pytest.mark.parametrize("number", SIGNALS)
def test_b43_a_signal_during_a_completion_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Run(tmp_path, mode="hang") as run:
        run.report()
        run.report()
        os.kill(run.pid, number)
        assert run.finish()[0] == SIGNALS[number]


@pytest.mark.usefixtures("bystanders")
def test_b43_ctrl_c_on_a_terminal_leaves_nothing(tmp_path: Path) -> None:
    with Run(tmp_path, mode="hang") as run:
        run.report()
        run.report()
        os.killpg(run.pid, signal.SIGINT)
        assert run.finish()[0] == 130


@pytest.mark.usefixtures("bystanders")
def test_b43_an_engine_that_ignores_term_is_killed_with_its_children(
    tmp_path: Path,
) -> None:
    with Run(tmp_path, scaled(tmp_path, GRACE=1), mode="stubborn") as run:
        run.report()
        os.kill(run.pid, signal.SIGTERM)
        assert run.finish()[0] == 143


# --- The text of it -------------------------------------------------------------------


def test_shellcheck_has_nothing_to_say() -> None:
    beside_python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=beside_python)
    assert shellcheck
    checked = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")
