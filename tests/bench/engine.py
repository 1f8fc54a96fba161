# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The engines of the benchmark: as cheap for each request as Python allows.

    python tests/bench/engine.py 2 2     # prefill and decode engines

All of them in one process. It prints their ports, those of the prefill engines first,
and serves until its standard input ends. Decode engines hand out tokens as vLLM does:
one step gives a token to every stream at once.
"""

import asyncio
import json
import sys
from typing import cast

import httptools
import uvloop
from answers import (
    AT_THE_GATE,
    MODEL,
    TARGET,
    Order,
    answer,
    events,
    hand_over,
    read_order,
)

BACKLOG = 4096
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 01:40:29 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
HEAD = (
    b"HTTP/1.1 %s\r\ndate: Mon, 30 Nov 2026 01:40:29 GMT\r\nserver: uvicorn\r\n"
    b"content-length: %d\r\ncontent-type: application/json\r\n\r\n"
)


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    """An answer with its head."""
    return HEAD % (status, len(body)) + body


class Steps:
    """The steps of an engine: each gives every running stream its next token."""

    def __init__(self, pace: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.pace = pace / 1000
        self.streams: list[Connection] = []
        self.due = 0.0

    def add(self, stream: "Connection") -> None:
        """Takes a stream in; the steps begin with the first."""
        self.streams.append(stream)
        if len(self.streams) == 1:
            self.due = self.loop.time() + self.pace
            self._plan()

    def _plan(self) -> None:
        if self.pace:
            self.loop.call_at(self.due, self.step)
        else:
            self.loop.call_soon(self.step)

    def step(self) -> None:
        """One step; one that comes late does not hurry the next."""
        self.streams = [stream for stream in self.streams if stream.next_token()]
        if self.streams:
            self.due = max(self.due, self.loop.time()) + self.pace
            self._plan()


class Engine:
    """One engine: a role, a port, its steps by their pace."""

    def __init__(self, is_prefill: bool) -> None:
        self.is_prefill = is_prefill
        self.port = 0
        self.steps: dict[int, Steps] = {}

    async def listen(self) -> None:
        """Listens on a free port of loopback."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(self), "127.0.0.1", 0, backlog=BACKLOG
        )
        self.port = server.sockets[0].getsockname()[1]

    def at_pace(self, pace: int) -> Steps:
        """The steps of the streams of one pace."""
        if pace not in self.steps:
            self.steps[pace] = Steps(pace)
        return self.steps[pace]


# Streams that wait for their second token.
gate: list["Connection"] = []


def open_gate() -> None:
    """Lets those streams go on, as fast as they can."""
    for stream in gate:
        stream.engine.at_pace(0).add(stream)
    gate.clear()


class Connection(asyncio.Protocol):
    """A connection to an engine; its requests come one after the other."""

    transport: asyncio.Transport

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.parser = httptools.HttpRequestParser(self)
        self.target = b""
        self.body: list[bytes] = []
        self.order = Order(b"", 0, 0)
        self.given = 0
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()  # Some proxies try HTTP/2 first.

    # The parser's callbacks.

    def on_url(self, url: bytes) -> None:
        self.target = url

    def on_body(self, piece: bytes) -> None:
        self.body.append(piece)

    def on_message_complete(self) -> None:
        body, self.body = b"".join(self.body), []
        if self.target == TARGET:
            self._complete(body)
        else:
            self.transport.write(self._small(self.target))

    # Answers.

    def _small(self, target: bytes) -> bytes:
        """What proxies ask before they send requests."""
        path = target.partition(b"?")[0]
        model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm"}
        role = "prefill" if self.engine.is_prefill else "decode"
        server = {"model_path": MODEL, "tp_size": 1, "disaggregation_mode": role}
        known = {
            b"/health": {},
            b"/v1/models": {"object": "list", "data": [model]},
            b"/version": {"version": "0.33.0"},
            b"/query": {"0": {"engine_id": f"engine-{self.engine.port}"}},
            b"/get_server_info": server,
            b"/server_info": server,
            b"/get_model_info": server,
            b"/model_info": server,
        }
        if target == b"/gate":
            open_gate()
        elif path not in known:
            return whole(b'{"detail":"Not Found"}', b"404 Not Found")
        return whole(json.dumps(known.get(path, {})).encode())

    def _complete(self, body: bytes) -> None:
        order = read_order(body)
        if order is None:
            self.transport.write(whole(b'{"detail":"no such model"}', b"404 Not Found"))
            return
        if self.engine.is_prefill:
            order = order._replace(tokens=1)  # Some proxies ask P for a stream.
        self.order = order
        stream = b'"stream":true' in body or b'"stream": true' in body
        if self.engine.is_prefill and not stream:
            prefilled = hand_over(order, self.engine.port, transfer_id(body))
            self.transport.write(whole(prefilled))
            return
        if not stream:
            payload = answer(False, order.tokens).fill(order.ident)
            self.transport.write(whole(payload))
            return
        self.given = 0
        self.transport.write(STREAM_HEAD)
        if not self.next_token():
            return
        if order.pace == AT_THE_GATE:
            gate.append(self)
        else:
            self.engine.at_pace(order.pace).add(self)

    def next_token(self) -> bool:
        """Sends a token; says whether there are more."""
        if self.closed:
            return False
        wire = events(self.order.tokens)[self.given]
        self.transport.write(wire.fill(self.order.ident))
        self.given += 1
        return self.given < self.order.tokens


def transfer_id(body: bytes) -> bytes:
    """The member that MoRIIO's and Mooncake's proxies want to see again."""
    at = body.find(b'"transfer_id"')
    if at < 0:
        return b""
    start = body.index(b'"', at + 13)
    return b',"transfer_id":' + body[start : body.index(b'"', start + 1) + 1]


async def serve(prefill: int, decode: int) -> None:
    loop = asyncio.get_running_loop()
    engines = [Engine(number < prefill) for number in range(prefill + decode)]
    for engine in engines:
        await engine.listen()
    print(*(engine.port for engine in engines), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
