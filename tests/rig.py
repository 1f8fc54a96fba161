# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The test rig: scripted engines, a raw client, the proxy as a process.

    with Cluster(prefill=2, decode=2) as cluster:
        cluster.d[0].answer(http_response(503, b"busy"))
        response = cluster.post("/v1/completions", {"prompt": "a"})
        assert response.status == 200
        leg = cluster.p[0].next_request()
        assert leg.members()["max_tokens"] == b"1"

Nothing here uses the proxy's code: requests and responses are judged by h11, JSON
by the standard library. Engines live on one event loop in a background thread, so
tests are plain functions that block. Whatever a test waits for it reads from a
socket, a pipe or a queue under `HANG_GUARD`; `poll` is the one exception, for state
that announces itself nowhere (the proxy's /status, its descriptors).
"""

import asyncio
import contextlib
import enum
import functools
import itertools
import json
import os
import queue
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import h11

T = TypeVar("T")
JSON = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
DISAGG_PROXY = ROOT / "disagg_proxy.py"
SCALED_PROXY = ROOT / "tests" / "scaled_proxy.py"

MODEL = "org/tiny"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

# Seconds after which a wait counts as a hang. Never an expectation about speed.
HANG_GUARD = 10.0
# Seconds between two looks at a condition nothing announces.
POLL_PAUSE = 0.01
# Bytes of one HTTP head that the engine and the client accept; a request id with
# two addresses or a big token fits, a parser gone wild does not.
MAX_HEAD = 1 << 20
# Bytes after which an engine no longer records what it answers.
MAX_RECORDED = 1 << 24
RECEIVE_SIZE = 1 << 16


def poll(condition: Callable[[], T | None], what: str, limit: float = HANG_GUARD) -> T:
    """Waits until `condition` returns something true, and returns it.

    Args:
        condition: looked at every `POLL_PAUSE` seconds.
        what: names the awaited state in the failure.
        limit: seconds.

    Raises:
        TimeoutError: the deadline passed.

    """
    deadline = time.monotonic() + limit
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"never happened: {what}")
        time.sleep(POLL_PAUSE)


# --- Bytes on the wire ----------------------------------------------------------------


def members(body: bytes) -> dict[str, bytes]:
    """The top-level members of a JSON object: decoded name to raw value bytes.

    Raises:
        ValueError: not one JSON object, or a name occurs twice.

    """
    text = body.decode()
    decoder = json.JSONDecoder()

    def skip(at: int, expected: str) -> int:
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
        if text[at : at + 1] not in expected or at >= len(text):
            raise ValueError(f"no {expected!r} at {at} in {text!r}")
        return at

    found: dict[str, bytes] = {}
    at = skip(0, "{")
    while text[at] != "}":
        at = skip(at + 1, '"' if found else '"}')
        if text[at] == "}":
            break
        name, at = decoder.raw_decode(text, at)
        at = skip(at, ":") + 1
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
        _, end = decoder.raw_decode(text, at)
        if name in found:
            raise ValueError(f"{name!r} twice in {text!r}")
        found[name] = text[at:end].encode()
        at = skip(end, ",}")
    if text[at + 1 :].strip(" \t\r\n"):
        raise ValueError(f"text after the object: {text!r}")
    return found


def dumps(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def http_request(
    method: str,
    target: str,
    body: bytes | JSON | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """One HTTP/1.1 request; a dict is sent as JSON, `headers` replace ours by name."""
    content = dumps(body) if isinstance(body, dict) else body
    fields = {"Host": "proxy"}
    if content is not None:
        fields |= {
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
        }
    fields |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + (content or b"")


def http_response(
    status: int,
    body: bytes | JSON = b"",
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """One HTTP/1.1 response with `Content-Length`; a dict is sent as JSON."""
    content = dumps(body) if isinstance(body, dict) else body
    fields = {"Content-Type": "application/json"} | (dict(headers) if headers else {})
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    length = f"Content-Length: {len(content)}\r\n"
    return f"HTTP/1.1 {status} Scripted\r\n{head}{length}\r\n".encode() + content


def openai_error(status: int, message: str) -> JSON:
    """A vLLM error body."""
    error = {"message": message, "type": "Scripted", "param": None, "code": status}
    return {"error": error}


SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\n"
    b"Content-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(payload: JSON | str) -> bytes:
    """One server-sent event."""
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return f"data: {text}\n\n".encode()


DONE = event("[DONE]")


# --- What an engine plays -------------------------------------------------------------


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The loop of all engines, in its own thread, for the life of the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="engines", daemon=True).start()
    return loop


async def _on_loop(function: Callable[[], T]) -> T:
    return function()


def _run(function: Callable[[], T]) -> T:
    """Runs a plain function on the engines' loop and returns its result."""
    future = asyncio.run_coroutine_threadsafe(_on_loop(function), _loop())
    return future.result(HANG_GUARD)


class Gate:
    """A step of an answer at which the engine waits until the test releases it."""

    def __init__(self) -> None:
        self._open = asyncio.Event()

    def release(self) -> None:
        """Lets the answer go on. Callable from any thread, any number of times."""
        _loop().call_soon_threadsafe(self._open.set)

    async def passed(self) -> None:
        """For the engine: returns once released."""
        await self._open.wait()


class Close(enum.Enum):
    """A step that ends the connection: orderly, or with SO_LINGER 0."""

    FIN = enum.auto()
    RST = enum.auto()


Step = bytes | Gate | Close


@dataclass
class EngineRequest:
    """One request as it arrived at an engine."""

    engine: "ScriptedEngine"
    # Connections are numbered from 1 in the order the engine accepted them.
    connection: int
    line: bytes
    # As sent: order, case and duplicates kept.
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    # What was written in answer so far, up to `MAX_RECORDED` and the step there.
    answered: bytearray = field(default_factory=bytearray)
    # Set when the peer closed or reset before the last step was played.
    abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def target(self) -> str:
        """The request target, for example /v1/completions?x=1."""
        return self.line.split(b" ")[1].decode()

    @property
    def is_probe(self) -> bool:
        """Whether this is what a health or model check asks for."""
        return self.line.startswith(
            (b"GET /health ", b"GET /v1/models ", b"GET /query ")
        )

    def header(self, name: str) -> str | None:
        """The value of a header, None if absent; fails if it came twice."""
        return _one(self.headers, name)

    def members(self) -> dict[str, bytes]:
        """Top-level members of the JSON body, values as raw bytes."""
        return members(self.body)

    def json(self) -> JSON:
        """The parsed JSON body."""
        parsed: JSON = json.loads(self.body)
        return parsed

    def handed_over(self) -> bytes:
        """Raw `kv_transfer_params` of the JSON answer that was sent."""
        body = bytes(self.answered).partition(b"\r\n\r\n")[2]
        return members(body)["kv_transfer_params"]

    def wait_abandoned(self) -> None:
        """Returns once the peer has closed before the end of the answer."""
        assert self.abandoned.wait(HANG_GUARD), "the peer kept the connection open"


# From a request to the steps of its answer; runs on the engines' loop.
Play = Callable[[EngineRequest], Iterable[Step]]
Answer = Iterable[Step] | Play


def _one(headers: Iterable[tuple[bytes, bytes]], name: str) -> str | None:
    values = [value for key, value in headers if key.lower() == name.lower().encode()]
    assert len(values) < 2, f"{name} came {len(values)} times"
    return values[0].decode("latin-1") if values else None


# --- Default answers ------------------------------------------------------------------


_hand_over_numbers = itertools.count(1)


def hand_over(request: EngineRequest) -> JSON:
    """A NIXL pull hand-over that occurs once in the life of the test process.

    Its keys are those of a vLLM 0.33 prefill engine (pull_scheduler.py).
    """
    number = next(_hand_over_numbers)
    engine_id = f"engine-{request.engine.port}"
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[number, number + 1]],
        "remote_engine_id": engine_id,
        "remote_request_id": f"cmpl-{request.header('x-request-id')}-0-{number:08x}",
        "remote_host": "10.0.0.9",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": 16,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


def prefill_answer(request: EngineRequest) -> Iterable[Step]:
    """What a P answers: its refusals of a naive copy (contract 6.3), or a hand-over."""
    body = request.json()
    if body.get("min_tokens", 0) > body.get("max_tokens", 16):
        return [http_response(400, openai_error(400, "min_tokens above max_tokens"))]
    if body.get("stream_options") is not None and not body.get("stream"):
        return [http_response(400, openai_error(400, "stream_options, no stream"))]
    if body.get("stream"):
        return decode_answer(request)
    answer = _completion(request) | {"kv_transfer_params": hand_over(request)}
    return [http_response(200, answer)]


def decode_answer(request: EngineRequest) -> Iterable[Step]:
    """What a D answers: JSON with `n` choices, or SSE of three tokens and [DONE]."""
    if request.target.partition("?")[0] not in (COMPLETIONS, CHAT):
        return [http_response(200, {"served": request.target})]
    body = request.json()
    if not body.get("stream"):
        return [http_response(200, _completion(request))]
    tokens = ["one", " two", " three"]
    events: list[JSON] = [{"choices": [_choice(request, each)]} for each in tokens]
    events[-1]["choices"][0]["finish_reason"] = "length"
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({"choices": [], "usage": _USAGE})
    events = [_envelope(request) | each for each in events]
    return [SSE_HEAD, *(chunk(event(each)) for each in events), chunk(DONE), LAST_CHUNK]


_USAGE = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}


def _choice(request: EngineRequest, text: str, index: int = 0) -> JSON:
    choice: JSON = {"index": index, "finish_reason": None, "logprobs": None}
    if not request.target.startswith(CHAT):
        return choice | {"text": text}
    key = "delta" if request.json().get("stream") else "message"
    return choice | {key: {"role": "assistant", "content": text}}


def _envelope(request: EngineRequest) -> JSON:
    chat, body = request.target.startswith(CHAT), request.json()
    kind = "chat.completion" if chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.header('x-request-id')}",
        "object": f"{kind}.chunk" if chat and body.get("stream") else kind,
        "created": 0,
        "model": body.get("model") or MODEL,
    }


def _completion(request: EngineRequest) -> JSON:
    indexes = range(request.json().get("n") or 1)
    choices = [_choice(request, "hello", index) for index in indexes]
    return _envelope(request) | {"choices": choices, "usage": _USAGE}


# --- ScriptedEngine -------------------------------------------------------------------


@dataclass
class _Script:
    answer: Answer
    early: bool = False


class ScriptedEngine:
    """An engine on a loopback port that records requests and plays answers.

    GET /health and GET /v1/models are answered by the attributes `health`, `models`
    and `api_key`, and recorded in `probes`; so is GET /query, as by the bootstrap
    server of a Mooncake engine with one rank. Every other request is recorded in
    `requests` and takes the next answer given by `answer`, else `default`.

    Args:
        role: "prefill" or "decode": picks the default answer.
        host: loopback address to bind.
        listening: False reserves the port, so that connecting is refused.

    """

    def __init__(
        self, role: str, host: str = "127.0.0.1", listening: bool = True
    ) -> None:
        self.host = host
        self.role = role
        # The status of GET /health, or a gate before it is answered.
        self.health: int | Gate = 200
        # The ids that GET /v1/models lists, or the whole body of its answer.
        self.models: list[str] | bytes = [MODEL]
        self.api_key: str | None = None
        # Seconds after which an idle connection is closed; vLLM's default is 5.
        self.idle_close: float | None = None
        self.requests: list[EngineRequest] = []
        self.probes: list[EngineRequest] = []
        self.accepted = 0
        # What no HTTP/1.1 client may send, and bugs of a test's own answers.
        self.faults: list[Exception] = []
        self._default = prefill_answer if role == "prefill" else decode_answer
        self.default: Answer = self._default
        self._scripts: list[_Script] = []
        self._arrived: queue.SimpleQueue[EngineRequest] = queue.SimpleQueue()
        self._connections: set[_EngineConnection] = set()
        self._fillers: list[socket.socket] = []
        self.listening = False
        self._accepting: set[asyncio.Task[Any]] = set()
        self._listener = self._bind(0)
        self.port: int = self._listener.getsockname()[1]
        if listening:
            self.listen()

    @property
    def instance(self) -> str:
        """HOST:PORT as the proxy's command line takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def answer(self, *steps: Step | Play) -> None:
        """Scripts the next unscripted request: steps, or one function to them."""
        self._scripts.append(_Script(self._as_answer(steps)))

    def answer_early(self, *steps: Step) -> None:
        """Like `answer`, but plays when the head is there; the body is not read."""
        self._scripts.append(_Script(steps, early=True))

    def next_request(self) -> EngineRequest:
        """The next request not yet returned by this method; waits for it."""
        try:
            return self._arrived.get(timeout=HANG_GUARD)
        except queue.Empty:
            raise AssertionError(f"no request came to {self}") from None

    def open_connections(self) -> int:
        """Number of connections that neither side has closed."""
        return len(self._connections)

    def wait_connections(self, count: int) -> None:
        """Returns once exactly `count` connections are open."""
        poll(
            lambda: len(self._connections) == count,
            f"{self} has {count} connections",
        )

    def listen(self) -> None:
        """Starts to accept connections (again)."""
        self._listener.listen(4096)
        self.listening = True
        _run(lambda: _loop().add_reader(self._listener, self._accept))

    def refuse(self) -> None:
        """Closes every connection and refuses new ones; the port stays reserved."""
        self._stop()
        self._listener = self._bind(self.port)

    def swallow_connects(self) -> None:
        """Closes every connection; connecting neither succeeds nor fails from now."""
        self.refuse()
        # An accept queue of one that is full: the kernel drops further SYNs.
        self._listener.listen(0)
        for _ in range(4):
            filler = socket.socket(self._listener.family)
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect((self.host, self.port))
            self._fillers.append(filler)

    def drop_connections(self, close: Close = Close.FIN) -> None:
        """Closes every connection, idle or not; goes on accepting.

        Returns when the kernel has sent what closes them.
        """
        dropped = list(self._connections)

        def drop() -> None:
            for each in dropped:
                each.end(close)

        _run(drop)
        poll(lambda: self._connections.isdisjoint(dropped), "connections are closed")
        # asyncio tells of the end of a connection just before it closes the socket.
        _run(lambda: None)

    def forget(self) -> None:
        """Back to the defaults, with empty records."""
        self.health, self.models, self.api_key = 200, [MODEL], None
        self.idle_close = None
        self.default = self._default
        self._scripts.clear()
        self.requests.clear()
        self.probes.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrived.get_nowait()

    def close(self) -> None:
        """Ends the engine; the port is free."""
        self._stop()
        self.check()

    def check(self) -> None:
        """Fails, once, if a connection brought something that is not HTTP/1.1."""
        faults, self.faults = self.faults, []
        assert not faults, (self, faults)

    def __repr__(self) -> str:
        return f"<{self.role} {self.instance}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take_script(self, request: EngineRequest) -> _Script:
        """For the connection: the script of the request that is arriving."""
        if not self._admits(request):
            return _Script([http_response(401, b'{"error":"Unauthorized"}')])
        if request.is_probe:
            return _Script(self._probe_answer(request))
        return self._scripts.pop(0) if self._scripts else _Script(self.default)

    def record(self, request: EngineRequest) -> None:
        """For the connection: a request is here."""
        if request.is_probe:
            self.probes.append(request)
        else:
            self.requests.append(request)
            self._arrived.put(request)

    def _admits(self, request: EngineRequest) -> bool:
        # vLLM guards /v1 with its key and leaves /health and the like open.
        if not self.api_key or not request.target.startswith("/v1"):
            return True
        return request.header("authorization") == f"Bearer {self.api_key}"

    def _probe_answer(self, request: EngineRequest) -> list[Step]:
        if request.target == "/health":
            if isinstance(self.health, Gate):
                return [self.health, http_response(200)]
            return [http_response(self.health)]
        if request.target == "/query":
            return [http_response(200, {"0": {"engine_id": f"engine-{self.port}"}})]
        if isinstance(self.models, bytes):
            return [http_response(200, self.models)]
        models = [{"id": each, "object": "model"} for each in self.models]
        return [http_response(200, {"object": "list", "data": models})]

    @staticmethod
    def _as_answer(steps: Sequence[Any]) -> Answer:
        answer: Answer = steps[0] if len(steps) == 1 and callable(steps[0]) else steps
        return answer

    def _bind(self, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((self.host, port))
        return listener

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        accepted.setblocking(False)
        connected = _loop().connect_accepted_socket(self._connected, accepted)
        task = _loop().create_task(connected)
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    def _connected(self) -> "_EngineConnection":
        self.accepted += 1
        return _EngineConnection(self, self.accepted, self._connections)

    def _stop(self) -> None:
        def stop() -> None:
            _loop().remove_reader(self._listener)
            self.listening = False
            for each in list(self._connections):
                each.end(Close.FIN)

        _run(stop)
        self._listener.close()
        while self._fillers:
            self._fillers.pop().close()


class _EngineConnection(asyncio.Protocol):
    """One accepted connection: requests in, answers out, one after the other."""

    def __init__(
        self, engine: ScriptedEngine, number: int, alive: "set[_EngineConnection]"
    ) -> None:
        self.engine = engine
        self.number = number
        self._alive = alive
        self._parser = self._new_parser(b"")
        self._input = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._answering: EngineRequest | None = None

    @staticmethod
    def _new_parser(data: bytes) -> h11.Connection:
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        if data:
            parser.receive_data(data)
        return parser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._alive.add(self)
        self._task = asyncio.ensure_future(self._serve())
        if not self.engine.listening:
            # It was accepted, but not yet known, when the engine stopped.
            self.end(Close.FIN)

    def data_received(self, data: bytes) -> None:
        self._parser.receive_data(data)
        self._input.set()

    def eof_received(self) -> bool:
        self._peer_left()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._peer_left()
        self._alive.discard(self)
        self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def end(self, close: Close) -> None:
        """Closes from the engine's side."""
        self._answering = None
        if close is Close.RST:
            linger = struct.pack("ii", 1, 0)
            peer: socket.socket = self._transport.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._transport.abort()
        else:
            self._transport.close()

    def _peer_left(self) -> None:
        if self._answering:
            self._answering.abandoned.set()

    async def _serve(self) -> None:
        try:
            await self._exchanges()
        except Exception as error:
            self.engine.faults.append(error)
            self.end(Close.RST)

    async def _exchanges(self) -> None:
        while not self._transport.is_closing():
            request = await self._read_head()
            script = self.engine.take_script(request)
            if script.early:
                self._transport.pause_reading()
            else:
                await self._read_body(request)
            self._answering = request
            self.engine.record(request)
            await self._play(request, script.answer)
            self._answering = None
            if script.early and not self._transport.is_closing():
                self._transport.resume_reading()
                await self._read_body(request)
            self._parser = self._new_parser(self._parser.trailing_data[0])

    async def _next_event(self) -> h11.Event:
        while True:
            happened = self._parser.next_event()
            if happened is h11.NEED_DATA:
                self._input.clear()
                await self._input.wait()
            else:
                assert not isinstance(happened, type), happened
                return happened

    async def _read_head(self) -> EngineRequest:
        idle: asyncio.TimerHandle | None = None
        if self.engine.idle_close:
            idle = _loop().call_later(self.engine.idle_close, self.end, Close.FIN)
        head = await self._next_event()
        if idle:
            idle.cancel()
        assert isinstance(head, h11.Request), head
        line = b"%b %b HTTP/%b" % (head.method, head.target, head.http_version)
        headers = list(head.headers.raw_items())
        return EngineRequest(self.engine, self.number, line, headers)

    async def _read_body(self, request: EngineRequest) -> None:
        pieces = []
        while isinstance(happened := await self._next_event(), h11.Data):
            pieces.append(bytes(happened.data))
        assert isinstance(happened, h11.EndOfMessage), happened
        request.body = b"".join(pieces)

    async def _play(self, request: EngineRequest, answer: Answer) -> None:
        steps = answer(request) if callable(answer) else answer
        for step in steps:
            match step:
                case Gate():
                    await step.passed()
                case Close():
                    self.end(step)
                case _ if self._transport.is_closing():
                    self._peer_left()
                    return
                case _:
                    if len(request.answered) < MAX_RECORDED:
                        request.answered += step
                    self._transport.write(step)
                    await self._writable.wait()


# --- RawClient ------------------------------------------------------------------------


class End(enum.Enum):
    """How a response ended."""

    COMPLETE = enum.auto()
    # The connection went before the framing said that the message is over.
    INCOMPLETE = enum.auto()


@dataclass
class Response:
    """A response as far as it was read."""

    status: int = 0
    # As received: order, case and duplicates kept.
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    http_version: bytes = b""
    body: bytes = b""
    # Every byte of the response, framing included; set when it has ended.
    raw: bytes = b""
    # Status codes of the 1xx responses before this one.
    interim: list[int] = field(default_factory=list)
    end: End | None = None
    # True if it was a reset, not a FIN, that ended the connection.
    reset: bool = False
    # Bytes that arrived after the end of the message.
    extra: bytes = b""

    def header(self, name: str) -> str | None:
        """The value of a header, None if absent; fails if it came twice."""
        return _one(self.headers, name)

    def json(self) -> Any:
        """The parsed JSON body."""
        return json.loads(self.body)

    @property
    def raw_body(self) -> bytes:
        """The body with its framing: chunk heads and all."""
        return self.raw.partition(b"\r\n\r\n")[2]

    def events(self) -> list[str]:
        """Payloads of the server-sent events in the body."""
        return [
            each.removeprefix("data: ")
            for each in self.body.decode().split("\n\n")
            if each
        ]

    def error(self) -> JSON:
        """The OpenAI error object of a JSON error response (fails on another)."""
        assert self.header("content-type") == "application/json", self.headers
        assert self.end is End.COMPLETE, self
        body = self.json()
        assert list(body) == ["error"], body
        error: JSON = body["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        return error


class ResponseReader:
    """Reads one response, as far as asked, judged by h11."""

    def __init__(self, client: "RawClient", method: str) -> None:
        self._client = client
        self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        request = h11.Request(method=method, target="/", headers=[("Host", "proxy")])
        self._parser.send(request)
        self._parser.send(h11.EndOfMessage())
        self._response = Response()
        self._pieces: list[bytes] = []
        self._raw = bytearray()

    def head(self) -> Response:
        """Reads until the final head is there."""
        while not self._response.status and self._response.end is None:
            self._step()
        return self._response

    def body_until(self, needle: bytes) -> bytes:
        """Reads until `needle` is in the body, and returns the body so far.

        Raises:
            EOFError: the response ended without it.

        """
        while needle not in (body := b"".join(self._pieces)):
            if self._response.end is not None:
                raise EOFError(f"no {needle!r} in {self.finish()}")
            self._step()
        return body

    def finish(self) -> Response:
        """Reads to the end of the response, or of the connection."""
        while self._response.end is None:
            self._step()
        self._response.body = b"".join(self._pieces)
        return self._response

    def _step(self) -> None:
        try:
            happened = self._parser.next_event()
        except h11.RemoteProtocolError:
            # h11 says the same for a cut message and for a malformed one.
            if self._parser.trailing_data[1]:
                self._over(End.INCOMPLETE)
                return
            raise
        match happened:
            case h11.NEED_DATA:
                self._receive()
            case h11.InformationalResponse():
                self._response.interim.append(happened.status_code)
            case h11.Response():
                self._response.status = happened.status_code
                self._response.headers = list(happened.headers.raw_items())
                self._response.http_version = happened.http_version
            case h11.Data():
                self._pieces.append(bytes(happened.data))
            case h11.EndOfMessage():
                self._over(End.COMPLETE)
            case _:
                self._over(End.INCOMPLETE)

    def _receive(self) -> None:
        if self._parser.trailing_data[1]:
            # h11 waits for the rest of a head even after the end of the connection.
            self._over(End.INCOMPLETE)
            return
        try:
            data = self._client.read_some()
        except ConnectionResetError:
            data, self._response.reset = b"", True
        self._raw += data
        self._parser.receive_data(data)

    def _over(self, end: End) -> None:
        self._response.end = end
        if end is End.COMPLETE and (extra := self._parser.trailing_data[0]):
            self._response.extra = extra
            self._client.unread(extra)
            del self._raw[-len(extra) :]
        self._response.raw = bytes(self._raw)


class RawClient:
    """A client on a plain blocking socket.

    Args:
        address: (host, port) of the proxy.
        receive_buffer: bytes of SO_RCVBUF, for a client that reads slowly.
        wait: False only starts to connect, for bursts; sending then waits.
        trust: speaks TLS, if given.

    """

    def __init__(
        self,
        address: tuple[str, int],
        receive_buffer: int | None = None,
        wait: bool = True,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.socket = socket.socket(family)
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(HANG_GUARD if wait else 0)
        self._pending = b""
        try:
            self.socket.connect(address)
            if trust is not None:
                self.socket = trust.wrap_socket(self.socket, server_hostname=address[0])
        except BlockingIOError:
            self.socket.settimeout(HANG_GUARD)
        except OSError:
            self.socket.close()
            raise

    def send(self, *pieces: bytes) -> None:
        """Sends each piece in a segment (or more) of its own."""
        for piece in pieces:
            self.socket.sendall(piece)

    def request(
        self,
        method: str,
        target: str,
        body: bytes | JSON | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ResponseReader:
        """Sends one request and returns the reader of its response."""
        self.send(http_request(method, target, body, headers))
        return self.reader(method)

    def post(
        self, target: str, body: bytes | JSON, headers: Mapping[str, str] | None = None
    ) -> ResponseReader:
        """Sends one POST and returns the reader of its response."""
        return self.request("POST", target, body, headers)

    def reader(self, method: str = "POST") -> ResponseReader:
        """Reads the next response; `method` is that of its request."""
        return ResponseReader(self, method)

    def read_some(self) -> bytes:
        """Received bytes, at least one; b"" at the end of the connection."""
        if self._pending:
            pending, self._pending = self._pending, b""
            return pending
        return self.socket.recv(RECEIVE_SIZE)

    def unread(self, data: bytes) -> None:
        """Puts received bytes back, for the next `read_some`."""
        self._pending = data + self._pending

    def wait_closed(self) -> bytes:
        """Reads until the proxy has closed (or reset); returns what came before."""
        received = []
        with contextlib.suppress(ConnectionResetError):
            while data := self.read_some():
                received.append(data)
        return b"".join(received)

    def half_close(self) -> None:
        """Ends this side: FIN, or the end of TLS; goes on reading."""
        if isinstance(self.socket, ssl.SSLSocket):
            with contextlib.suppress(ssl.SSLError):  # More data is no goodbye.
                self.socket.unwrap()
        else:
            self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Ends the connection with RST."""
        linger = struct.pack("ii", 1, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.socket.close()

    def close(self) -> None:
        """Ends the connection with FIN."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- The proxy as a process -----------------------------------------------------------

# Variables that would change what the proxy does; tests set them one by one.
_FOREIGN_VARIABLES = {"OPENAI_API_KEY", "ADMIN_API_KEY", "VLLM_API_KEY"}
_LISTENING = "listening on "
_TERMINATED = 0


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN_VARIABLES and not name.lower().endswith("_proxy")
    }
    return kept | dict(extra or {})


def run_to_exit(
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    script: Path = DISAGG_PROXY,
) -> tuple[int, str]:
    """Runs a start that is to fail; returns exit status and standard error."""
    done = subprocess.run(
        [sys.executable, str(script), *argv],
        env=_environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_GUARD,
    )
    return done.returncode, done.stderr


class ProxyProcess:
    """A proxy script in a process of its own.

    Args:
        argv: its arguments, without `--port`.
        script: the file to run.
        env: additional environment variables.
        limits: module constants to scale down, by name; see scaled_proxy.py.
        trust: how its clients check its certificate, if it speaks TLS.
        descriptors: how many files it may have open.

    """

    def __init__(
        self,
        argv: Sequence[str],
        script: Path = DISAGG_PROXY,
        env: Mapping[str, str] | None = None,
        limits: Mapping[str, float] | None = None,
        trust: ssl.SSLContext | None = None,
        descriptors: int | None = None,
    ) -> None:
        self.trust = trust
        command = [sys.executable, str(script)]
        if limits:
            scaled = [f"{name}={value}" for name, value in limits.items()]
            command = [sys.executable, str(SCALED_PROXY), str(script), *scaled, "--"]
        if descriptors is not None:
            limit = f'ulimit -n {descriptors} && exec "$0" "$@"'
            command = ["bash", "-c", limit, *command]
        self.log: list[str] = []
        self.traceback_expected = False
        self._logged = threading.Condition()
        self._ended = False
        self._process = subprocess.Popen(
            [*command, "--port", "0", *argv],
            env=_environment(env),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._collector = threading.Thread(target=self._collect, daemon=True)
        self._collector.start()
        try:
            line = self.wait_log(_LISTENING)
        except BaseException:
            self.kill()
            raise
        # It may be a line of JSON.
        where = line.partition(_LISTENING)[2].split()[0].strip('"}')
        host, _, port = where.rpartition(":")
        self.address = (host.strip("[]"), int(port))

    def wait_log(self, text: str) -> str:
        """Returns the first log line that contains `text`; waits for it."""

        def found() -> str | None:
            return next((line for line in self.log if text in line), None)

        with self._logged:
            self._logged.wait_for(lambda: found() or self._ended, HANG_GUARD)
        line = found()
        assert line is not None, f"no {text!r} in the log: {self.log}"
        return line

    def connect(
        self, receive_buffer: int | None = None, wait: bool = True
    ) -> RawClient:
        """A new client connection."""
        return RawClient(self.address, receive_buffer, wait, self.trust)

    def request(
        self,
        method: str,
        target: str,
        body: bytes | JSON | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One exchange on a connection of its own."""
        with self.connect() as client:
            return client.request(method, target, body, headers).finish()

    def status(self) -> JSON:
        """GET /status, parsed."""
        status: JSON = self.request("GET", "/status").json()
        return status

    def states(self) -> dict[tuple[str, str], str]:
        """(role, instance) to its state, as /status shows it."""
        return {
            (each["role"], each["instance"]): each["state"]
            for each in self.status()["instances"]
        }

    def wait_state(self, engine: ScriptedEngine, state: str) -> None:
        """Returns once the proxy shows the engine as "up" or "down"."""
        key = engine.role, engine.instance
        poll(lambda: self.states().get(key) == state, f"{key} is {state}")

    def wait_all_up(self) -> None:
        """Returns once the proxy shows every instance as up."""
        poll(lambda: set(self.states().values()) == {"up"}, "all instances are up")

    def wait_idle(self) -> None:
        """Returns once /status shows no request in flight at any instance."""

        def idle() -> bool:
            return not any(each["in_flight"] for each in self.status()["instances"])

        poll(idle, "no request is in flight")

    def open_descriptors(self) -> int:
        """Number of open file descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def open_sockets(self) -> int:
        """Number of open sockets."""

        def targets() -> Iterator[str]:
            for name in os.listdir(f"/proc/{self.pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    yield os.readlink(f"/proc/{self.pid}/fd/{name}")

        return sum(target.startswith("socket:") for target in targets())

    def resident_bytes(self) -> int:
        """Resident memory now (VmRSS)."""
        return int(self._status("VmRSS")) * 1024

    def peak_resident_bytes(self) -> int:
        """The most resident memory so far (VmHWM)."""
        return int(self._status("VmHWM")) * 1024

    def _status(self, field: str) -> str:
        """The first word of a field of /proc/PID/status."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        lines = (each.partition(":\t") for each in status.splitlines())
        return next(value for name, _, value in lines if name == field).split()[0]

    def sleeps(self) -> int:
        """How often the process has fallen asleep, once it has done so anew."""
        seen = [""]

        def asleep() -> bool:
            # Of two looks both find it so: the state changes before the count does.
            state = self._status("State")
            seen.append(self._status("voluntary_ctxt_switches"))
            return state == "S" and seen[-2] == seen[-1]

        poll(asleep, "the process sleeps")
        return int(seen[-1])

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The process does not run within; the kernel goes on for it."""
        self.signal(signal.SIGSTOP)
        try:
            # It may run on for a while, on another processor.
            poll(lambda: self._status("State").startswith("T"), "the proxy stands")
            yield
        finally:
            self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    def wait_exit(self) -> int:
        """Waits until the process is over; returns its exit status."""
        status = self._process.wait(HANG_GUARD)
        self._collector.join(HANG_GUARD)
        return status

    def stop(self) -> None:
        """Ends the proxy with SIGTERM: status 0 and no traceback in its log."""
        self.signal(signal.SIGTERM)
        try:
            status = self.wait_exit()
        finally:
            self.kill()
        assert status == _TERMINATED, (status, self.log)
        if not self.traceback_expected:
            assert not [line for line in self.log if "Traceback" in line], self.log

    def kill(self) -> None:
        """Ends the process at once, if it is still there."""
        self._process.kill()
        self._process.wait()
        self._collector.join(HANG_GUARD)
        assert self._process.stderr
        self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # A failed test is reported as itself, not as what its proxy says afterwards.
        if kind is None:
            self.stop()
        else:
            self.kill()

    def _collect(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            with self._logged:
                self.log.append(line.rstrip("\n"))
                self._logged.notify_all()
        with self._logged:
            self._ended = True
            self._logged.notify_all()


# --- Cluster --------------------------------------------------------------------------


class Cluster:
    """P prefill engines, D decode engines and a proxy in front of them, all up.

    Args:
        prefill: how many prefill engines, or the engines.
        decode: the same for decode.
        model: the proxy's `--model`.
        args: further arguments of the proxy.
        env: additional environment variables of the proxy.
        limits: module constants to scale down.
        script: the proxy to run.
        connector: the proxy's `--kv-connector`, with what it takes besides.
        trust, descriptors: see `ProxyProcess`.

    """

    def __init__(
        self,
        prefill: int | Sequence[ScriptedEngine] = 1,
        decode: int | Sequence[ScriptedEngine] = 1,
        model: str = MODEL,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        limits: Mapping[str, float] | None = None,
        script: Path = DISAGG_PROXY,
        connector: str = "auto",
        trust: ssl.SSLContext | None = None,
        descriptors: int | None = None,
    ) -> None:
        self.p = self._engines("prefill", prefill)
        self.d = self._engines("decode", decode)
        self.engines = [*self.p, *self.d]
        # A flag once for all: upstream's own parser knows no other way.
        argv = ["--model", model, "--prefill"]
        for each in self.p:
            argv.append(each.instance)
            if connector == "mooncake":
                argv.append(str(each.port))
        if connector == "nixl-push":
            ids = [f"engine-{each.port}" for each in self.p]
            argv += ["--prefill-engine-id", *ids, "--prefill-kv-host", "127.0.0.1"]
        if connector != "auto":
            argv += ["--kv-connector", connector]
        argv += ["--decode", *(each.instance for each in self.d)]
        self.proxy = ProxyProcess(
            [*argv, *args], script, env, limits, trust, descriptors
        )
        self.connect = self.proxy.connect
        self.request = self.proxy.request

    def post(
        self, target: str, body: bytes | JSON, headers: Mapping[str, str] | None = None
    ) -> Response:
        """One POST on a connection of its own."""
        return self.request("POST", target, body, headers)

    def get(self, target: str) -> Response:
        """One GET on a connection of its own."""
        return self.request("GET", target)

    def settle(self) -> None:
        """Waits until nothing is in flight, then forgets scripts and records."""
        try:
            self.proxy.wait_idle()
            for each in self.engines:
                each.check()
        finally:
            for each in self.engines:
                each.forget()

    def __enter__(self) -> Self:
        try:
            self.proxy.wait_all_up()
        except BaseException as error:
            self.__exit__(error)
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.proxy.__exit__(kind)
        finally:
            for each in self.engines:
                each.close()

    @staticmethod
    def _engines(
        role: str, given: int | Sequence[ScriptedEngine]
    ) -> Sequence[ScriptedEngine]:
        if isinstance(given, int):
            return [ScriptedEngine(role) for _ in range(given)]
        return given


def gather(calls: Iterable[Callable[[], T]], limit: float = HANG_GUARD) -> list[T]:
    """Runs blocking calls side by side, each in a thread; results in order.

    Args:
        calls: what to run.
        limit: seconds until a call counts as hung.

    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(index: int, call: Callable[[], T]) -> None:
        try:
            results[index] = call()
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=each, daemon=True)
        for each in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit)
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(threads))]
