# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Logs: their two formats, what cannot be forged, what never stands in them (B86)."""

import json
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from moriio_rig import Fleet, Peer, registration
from rig import (
    CHAT,
    COMPLETIONS,
    JSON,
    MODEL,
    ROOT,
    SSE_HEAD,
    Close,
    Cluster,
    ProxyProcess,
    ScriptedEngine,
    chunk,
    dumps,
    event,
    http_request,
    http_response,
    openai_error,
)

BODY: JSON = {"prompt": "a", "messages": []}
FORMATS = ["text", "json"]
# As it is, and as it would look in a line of its own.
EVIL = "x\n2026-01-01 00:00:00,000 INFO forged\r\x1b[2J\x00\x7f\x85\x9b1m\u2028\u202e"
EVERYTHING = ["--log-level", "debug", "--access-log"]
ADMIN = {"ADMIN_API_KEY": "admin-secret"}
WITH_KEY = {"X-API-Key": "admin-secret"}


def parsed(log: list[str]) -> list[JSON]:
    """The lines of a JSON log; fails where one is anything else."""
    lines: list[JSON] = [json.loads(line) for line in log]
    for line in lines:
        assert set(line) >= {"time", "level", "message"}, line
        written = datetime.fromisoformat(line["time"])
        assert written.utcoffset() == timedelta(0)
        assert abs(datetime.now(UTC) - written) < timedelta(hours=1)
    return lines


def check_lines(log: list[str], form: str) -> None:
    """Fails if anything in a log is not a line that the proxy meant to write."""
    assert log
    assert "".join(log).isprintable()
    if form == "json":
        parsed(log)
        return
    for line in log:
        date, time, level, _ = [*line.split(" ", 3), ""][:4]
        if not line.startswith("    "):  # A traceback's.
            datetime.fromisoformat(f"{date} {time}")
            assert level in ("DEBUG", "INFO", "WARNING", "ERROR"), line
        assert not line.startswith("2026-01-01"), line


# --- Formats --------------------------------------------------------------------------


def test_json_lines_say_what_text_lines_say() -> None:
    said = []
    for form in FORMATS:
        with Cluster(args=["--log-format", form], env=ADMIN) as cluster:
            order = {"type": "decode", "instance": cluster.d[0].instance}
            cluster.post("/instances/remove", order, WITH_KEY)
            order["type"] = "prefill"
            cluster.post("/instances/remove", order, WITH_KEY)
        check_lines(cluster.proxy.log, form)
        if form == "json":
            found = [
                (each["level"], each["message"]) for each in parsed(cluster.proxy.log)
            ]
        else:
            found = [
                (line.split(" ", 3)[2], line.split(" ", 3)[3])
                for line in cluster.proxy.log
            ]
        ports = [str(each.port) for each in cluster.engines]
        ports.append(str(cluster.proxy.address[1]))
        for port in ports:
            found = [(level, text.replace(port, "PORT")) for level, text in found]
        said.append(sorted(found))
    assert said[0] == said[1]
    assert {level for level, _ in said[0]} == {"INFO"}
    assert any("draining: removed" in text for _, text in said[0])


# A script of a user's, whose faults say what a client said.
FAULTY = """
import sys
sys.path.insert(0, {root!r})
from disagg_proxy import ProxyServer, configure_logging, parse_args

async def answer(request):
    try:
        raise KeyError("first")
    except KeyError:
        raise ValueError((await request.json())["prompt"])

args = parse_args()
configure_logging(args.log_level, args.log_format)
ProxyServer(args, create_completion=answer).run_server()
"""


@pytest.mark.parametrize("form", FORMATS)
def test_a_traceback_cannot_be_mistaken_for_lines(form: str, tmp_path: Path) -> None:
    script = tmp_path / "my_proxy.py"
    script.write_text(textwrap.dedent(FAULTY.format(root=str(ROOT))))
    engine = ScriptedEngine("decode")
    argv = ["--model", MODEL, "--prefill", engine.instance, "--decode", engine.instance]
    argv += ["--log-format", form]
    with engine, ProxyProcess(argv, script) as proxy:
        proxy.traceback_expected = True
        response = proxy.request("POST", COMPLETIONS, BODY | {"prompt": EVIL})
        assert response.status == 500
        proxy.wait_log("forged")
    check_lines(proxy.log, form)
    if form == "json":
        [error] = [each for each in parsed(proxy.log) if each["level"] == "ERROR"]
        assert error["message"] == "internal error"
        assert error["exception"].startswith("Traceback")
        assert "KeyError: 'first'" in error["exception"]
        assert "ValueError: x\\n2026" in error["exception"].replace("\n", "\\n")


@pytest.mark.parametrize("form", FORMATS)
def test_what_an_engine_says_cannot_forge_a_line(form: str) -> None:
    args = ["--log-format", form]
    with (
        ScriptedEngine("decode") as other,
        Cluster(args=args, env=ADMIN) as cluster,
    ):
        other.models = [EVIL, "x"]
        order = {"type": "decode", "instance": other.instance}
        assert cluster.post("/instances/add", order, WITH_KEY).status == 400
        line = cluster.proxy.wait_log("not added")
        assert "forged" in line
    check_lines(cluster.proxy.log, form)


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_registration_says_cannot_forge_a_line(form: str) -> None:
    with Fleet(argv=["--log-format", form]) as fleet:
        with Peer(fleet.proxy.discovery) as peer:
            peer.register(registration(fleet.p[0], "WRITE", type=EVIL))
        fleet.proxy.wait_log("registration refused")
    check_lines(fleet.proxy.log, form)


# --- What never stands in a log (B86) -------------------------------------------------

CLIENT_KEY, ENGINE_KEY = "client-secret", "engine-secret"
WRONG_KEY, PROMPT = "wrong-secret", "prompt-secret"
BEARER = {"Authorization": f"Bearer {CLIENT_KEY}"}
SECRET_BODY: JSON = {
    "model": MODEL,
    "prompt": PROMPT,
    "messages": [{"role": "user", "content": PROMPT}],
    "user": "user-secret",
}
MALFORMED = [
    b'{"prompt": "prompt-secret',
    b'{"prompt": "prompt-secret" "x"}',
    b'["prompt-secret"]',
    b'"prompt-secret"',
    b'{"prompt": "prompt-secret\\ud83d", "stream_options": {"a": "prompt-secret"}}',
    b'{"prompt": "prompt-secret\xff"}',
    b"prompt-secret",
]


def answers_that_fail() -> Iterator[tuple[str, bytes | Close]]:
    """Which leg, and an answer that is an error or none at all."""
    for role in ("prefill", "decode"):
        yield role, http_response(400, openai_error(400, PROMPT))
        yield role, http_response(500, openai_error(500, PROMPT))
        yield role, b"HTTP/1.1 prompt-secret\r\n\r\n"
        yield role, b"HTTP/1.1 200 OK\r\nContent-Length: prompt-secret\r\n\r\n"
        yield role, b"prompt-secret\r\n\r\n"
        yield role, Close.RST
    yield "decode", SSE_HEAD + b"prompt-secret\r\n"
    yield "decode", SSE_HEAD + chunk(event('{"error": "prompt-secret"}'))
    yield "prefill", http_response(200, b"prompt-secret")
    for params in (PROMPT, [PROMPT], {"do_remote_prefill": True, "x": PROMPT}):
        yield "prefill", http_response(200, {"kv_transfer_params": params})


def speak_of_secrets(cluster: Cluster | Fleet) -> bytes:
    """Sends keys and prompts on every way that leads into the proxy; all answers."""
    proxy, engines = cluster.proxy, {"prefill": cluster.p[0], "decode": cluster.d[0]}
    answers = []
    for path in (COMPLETIONS, CHAT, "/tokenize", f"/v1/x?key={CLIENT_KEY}&q={PROMPT}"):
        for headers in (BEARER, {"Authorization": f"Bearer {WRONG_KEY}"}, {}):
            for stream in (False, True):
                body = SECRET_BODY | {"stream": stream}
                answers.append(proxy.request("POST", path, body, headers))
    for malformed in MALFORMED:
        for path in (COMPLETIONS, CHAT, "/tokenize"):
            answers.append(proxy.request("POST", path, malformed, BEARER))
    for kind in ("text/prompt-secret", "multipart/form-data; boundary=prompt-secret"):
        headers = BEARER | {"Content-Type": kind}
        answers.append(proxy.request("POST", COMPLETIONS, SECRET_BODY, headers))
    for role, answer in answers_that_fail():
        steps = (answer,) if isinstance(answer, Close) else (answer, Close.FIN)
        engines[role].answer(*steps)
        answers.append(proxy.request("POST", COMPLETIONS, SECRET_BODY, BEARER))
        # Else the next request may still be written to what is closed.
        engines[role].wait_connections(0)
    for key in ("admin-secret", WRONG_KEY):
        order = {"type": "decode", "instance": PROMPT, "key": CLIENT_KEY}
        for content in (dumps(order), b"{prompt-secret"):
            headers = BEARER | {"X-API-Key": key}
            answers.append(proxy.request("POST", "/instances/add", content, headers))
    for target in ("/status", "/metrics", "/health"):
        answers.append(proxy.request("GET", target, headers=BEARER))
    return b"".join(answer.raw.partition(b"\r\n\r\n")[0] for answer in answers)


def check_secrets(proxy: ProxyProcess, heads: bytes) -> None:
    """Fails where a secret is in a log, in the heads of answers or in what is shown."""
    shown = "".join(proxy.log) + heads.decode()
    for said in ("malformed answer", "answer cut short", "total_ms"):
        assert said in shown
    for secret in (CLIENT_KEY, ENGINE_KEY, WRONG_KEY, PROMPT, "-secret"):
        assert secret not in shown, [line for line in proxy.log if secret in line]


@pytest.mark.parametrize("form", FORMATS)
def test_b86_no_key_and_no_prompt_is_logged(form: str) -> None:
    args = ["--log-format", form, *EVERYTHING, "--api-key", CLIENT_KEY]
    env = ADMIN | {"OPENAI_API_KEY": ENGINE_KEY}
    with Cluster(args=args, env=env) as cluster:
        heads = speak_of_secrets(cluster)
        for target in ("/status", "/metrics"):
            assert b"-secret" not in cluster.get(target).body
    check_lines(cluster.proxy.log, form)
    check_secrets(cluster.proxy, heads)


def test_b86_moriio_logs_none_either() -> None:
    with Fleet(argv=[*EVERYTHING, "--api-key", CLIENT_KEY]) as fleet:
        heads = speak_of_secrets(fleet)
    check_lines(fleet.proxy.log, "text")
    check_secrets(fleet.proxy, heads)


ODD_FIELDS = [
    b"X-Request-Id: a%0d%0ab",
    b"X-Request-Id: a\x01\x1b[31mb",
    b"X-Request-Id: a\nX-Split: b",
    b"X-Request-Id: a\rX-Split: b",
    b"X-Session-ID: \x9b31m\x85",
]


@pytest.mark.parametrize("form", FORMATS)
def test_b86_a_field_splits_neither_an_answer_nor_a_line(form: str) -> None:
    printable = bytes(range(0x20, 0x7F))
    with Cluster(args=["--log-format", form, *EVERYTHING]) as cluster:
        for field in ODD_FIELDS:
            request = http_request("POST", COMPLETIONS, BODY)
            with cluster.connect() as client:
                client.send(request.replace(b"\r\n", b"\r\n" + field + b"\r\n", 1))
                response = client.reader().finish()
            assert response.header("x-split") is None
            for name, value in response.headers:
                assert not (name + value).translate(None, printable), response.headers
    check_lines(cluster.proxy.log, form)
