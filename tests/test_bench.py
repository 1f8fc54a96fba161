# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The benchmark's judge and its sums: a right answer counts, a wrong one is found."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rig import (
    JSON,
    ROOT,
    SSE_HEAD,
    Close,
    ProxyProcess,
    ScriptedEngine,
    Step,
    chunk,
    event,
    http_response,
)

sys.path.append(str(ROOT / "tests" / "bench"))

import report  # noqa: E402
from answers import answer, ident  # noqa: E402

BENCH = ROOT / "tests" / "bench"
MODEL = "bench/Llama-3.1-8B-Instruct"


@contextlib.contextmanager
def engines() -> Iterator[list[str]]:
    """The addresses of a prefill and a decode engine of the benchmark."""
    command = [sys.executable, str(BENCH / "engine.py"), "1", "1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        ports = process.stdout.readline().split()
        yield [f"127.0.0.1:{port}" for port in ports]
        process.stdin.close()


def drive(port: int, **what: object) -> JSON:
    """What the load reports."""
    found = subprocess.run(
        [sys.executable, str(BENCH / "load.py")],
        input=json.dumps({"ports": [port], **what}) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    report: JSON = json.loads(found.stdout)
    return report


@pytest.mark.parametrize("stream", ["no", "yes", "half"])
def test_right_answers_are_counted(stream: str) -> None:
    with engines() as (prefill, decode):
        argv = ["--model", MODEL, "--prefill", prefill, "--decode", decode]
        with ProxyProcess(argv) as proxy:
            found = drive(proxy.address[1], clients=20, stream=stream, prompt=50_000)
    assert found["wrong"] == {}
    assert found["asked"] == found["right"] == 20
    assert found["tokens"] == 16 * {"no": 0, "half": 10, "yes": 20}[stream]


def test_a_client_asks_again_on_its_connection() -> None:
    with ScriptedEngine("decode") as engine:
        payload = answer(False, 16).fill(ident(0))
        engine.answer(http_response(200, json.loads(payload)))
        found = drive(engine.port, clients=1, seconds=0.1)
        # One for the load's, one answer right, others not, by the same connection.
        assert found["asked"] > 2
        assert engine.accepted == 1


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ([http_response(200, {"id": "another"})], "other bytes"),
        ([http_response(503, b"busy")], "status 503"),
        ([SSE_HEAD, chunk(event("a")), Close.FIN], "cut short"),
        ([Close.RST], "no answer"),
    ],
)
def test_wrong_answers_are_counted_by_kind(steps: list[Step], kind: str) -> None:
    with ScriptedEngine("decode") as engine:
        engine.answer(*steps)
        found = drive(engine.port, clients=1)
    assert found["wrong"] == {kind: 1}
    assert found["right"] == 0


def test_the_same_json_in_other_bytes_is_told_apart() -> None:
    payload = json.loads(answer(False, 16).fill(ident(0)))
    with ScriptedEngine("decode") as engine:
        engine.answer(http_response(200, json.dumps(payload, indent=1).encode()))
        found = drive(engine.port, clients=1)
    assert (found["right"], found["reencoded"], found["wrong"]) == (1, 1, {})


def test_medians_are_taken_of_each_figure() -> None:
    def rounds(*cpu: float) -> list[JSON]:
        load = {"asked": 10, "right": 10, "wrong": {}, "reencoded": 0}
        return [{"request": {**load, "cpu": each}} for each in cpu]

    figures = report.row(rounds(0.001, 0.009, 0.002))
    assert figures["request"] == pytest.approx(200)
    assert figures["token"] is None
    assert figures["answers"] == 30
