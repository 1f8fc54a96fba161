# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The HTTP side of the simulated engine: what uvicorn shows of itself to a client.

Keep-alive with an idle limit, pipelining, chunked request bodies, `Expect`; a peer
that closes or half-closes is gone. Faults are injected here too.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Literal, cast
from urllib.parse import parse_qs

import httptools
import msgspec
from sim_api import APIS, JSON

if TYPE_CHECKING:
    from sim_engine import Engine
    from sim_generation import Generation

# Seconds for the last bytes to leave before their connection is reset.
FLUSH_TIME = 0.005
# SO_LINGER on with 0 seconds: closing sends RST.
LINGER_RESET = struct.pack("ii", 1, 0)

JSON_TYPE = b"application/json"
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: %b\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
INVALID_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"connection: close\r\n\r\nInvalid HTTP request received."
)
REASONS = {each.value: each.phrase.encode() for each in HTTPStatus}


class Clock:
    """The `date` header, made once per second as uvicorn does."""

    def __init__(self) -> None:
        self.second = 0
        self.date = b""

    def now(self) -> bytes:
        second = int(time.time())
        if second != self.second:
            self.second = second
            self.date = formatdate(second, usegmt=True).encode()
        return self.date


clock = Clock()


# --- Faults ---------------------------------------------------------------------------


class Fault(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Something that goes wrong with requests, until cleared or `count` times.

    Attributes:
        kind: what happens:
            refuse: the port does not listen; open connections go on;
            reset_on_connect: a new connection is reset at once;
            reset_on_head: reset when the request's head has arrived;
            reset_after_request: reset when the whole request has arrived;
            status: answered with `status`, `headers`, `body`, and not admitted;
            hang: admitted, then held until the faults are cleared: before the head,
                or in a stream after `after_events` events;
            die_in_head: cut in the middle of the response head;
            die: cut after `after_events` events of a stream or `after_bytes` bytes
                of a body (0 of either: right after the head);
            no_last_chunk: FIN in place of the end of the message;
            close_idle: connections are closed right after an answer that did not
                announce it.
        count: how many requests (connections) it hits.
        path: hits requests for this path only; else POSTs that generate.
        port: the engine, where the fault is posted elsewhere.
        how: a cut is a reset or a FIN.

    """

    kind: Literal[
        "refuse",
        "reset_on_connect",
        "reset_on_head",
        "reset_after_request",
        "status",
        "hang",
        "die_in_head",
        "die",
        "no_last_chunk",
        "close_idle",
    ]
    count: int | None = None
    path: str | None = None
    port: int | None = None
    after_events: int | None = None
    after_bytes: int | None = None
    how: Literal["reset", "fin"] = "reset"
    status: int = 500
    headers: dict[str, str] = {}
    body: str | None = None
    content_type: str = "application/json"

    def concerns(self, request: Request) -> bool:
        if self.path is not None:
            return request.path == self.path.encode()
        return request.method == b"POST" and request.path in APIS

    def content(self) -> bytes:
        """The body of `status`; unless given, an error as vLLM would write it."""
        if self.body is not None:
            return self.body.encode()
        text = f"simulated {self.status}"
        error = {"message": text, "type": "Simulated", "param": None}
        return msgspec.json.encode({"error": error | {"code": self.status}})


ON_REQUEST = {
    "reset_after_request",
    "status",
    "hang",
    "die_in_head",
    "die",
    "no_last_chunk",
}


# --- HTTP -----------------------------------------------------------------------------


class Request:
    """One HTTP request as it arrived."""

    __slots__ = ("body", "headers", "keep_alive", "method", "path", "pieces", "target")

    def __init__(self) -> None:
        self.target = b""
        self.path = b""
        self.method = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.body = b""
        self.keep_alive = True

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header.

        Args:
            name: in lower case.

        """
        for key, value in self.headers:
            if len(key) == len(name) and key.lower() == name:
                return value
        return None

    def is_json(self) -> bool:
        kind = (self.header(b"content-type") or b"").partition(b";")[0]
        return kind.strip().lower() == JSON_TYPE

    def query(self) -> dict[str, list[str]]:
        return parse_qs(self.target.partition(b"?")[2].decode("latin-1"))


class Cut:
    """Where a fault of kind `die` ends the body of a response."""

    def __init__(self, fault: Fault) -> None:
        self.events = fault.after_events
        self.bytes = fault.after_bytes
        if self.events is None and self.bytes is None:
            self.bytes = 0

    def take(self, data: bytes) -> int:
        """How many bytes of the next piece of the body still leave."""
        if self.bytes is not None:
            kept = min(len(data), self.bytes)
            self.bytes -= kept
            return kept
        at = 0
        while self.events and (end := data.find(b"\n\n", at)) >= 0:
            at = end + 2
            self.events -= 1
        return len(data) if self.events else at

    def reached(self) -> bool:
        return not (self.events or self.bytes)


class Exchange:
    """One request and the response to it, with the fault that it meets."""

    __slots__ = (
        "connection",
        "control",
        "cut",
        "events",
        "fault",
        "generation",
        "record",
        "request",
        "streaming",
    )

    def __init__(self, connection: Connection, request: Request) -> None:
        self.connection = connection
        self.request = request
        self.fault: Fault | None = None
        self.cut: Cut | None = None
        self.generation: Generation | None = None
        self.control: asyncio.Task[None] | None = None
        self.record: JSON | None = None
        self.streaming = False
        # Events so far, counted only where a fault needs them.
        self.events = 0

    def meet(self, fault: Fault) -> None:
        self.fault = fault
        self.cut = Cut(fault) if fault.kind == "die" else None

    def answer(
        self,
        status: int,
        body: bytes = b"",
        content_type: bytes = JSON_TYPE,
        headers: bytes = b"",
    ) -> None:
        """Writes a whole response and ends the exchange."""
        if body:
            headers += b"content-type: %b\r\n" % content_type
        if not self.request.keep_alive:
            headers += b"connection: close\r\n"
        head = (
            b"HTTP/1.1 %d %b\r\ndate: %b\r\nserver: uvicorn\r\n%b"
            b"content-length: %d\r\n\r\n"
        ) % (
            status,
            REASONS.get(status, b"-"),
            clock.now(),
            headers,
            len(body),
        )
        if self.request.method == b"HEAD":
            body = b""
        self.note(status)
        if self.fault is not None and self.breaks(self.fault, head, body):
            return
        self.connection.transport.write(head + body)
        self.connection.answered()

    def breaks(self, fault: Fault, head: bytes, body: bytes) -> bool:
        """Lets the fault cut a response that is not streamed; whether it did."""
        connection = self.connection
        if fault.kind == "die_in_head":
            connection.cut_off(head[: len(head) // 2], fault.how)
        elif self.cut is not None:
            kept = self.cut.take(body)
            if not self.cut.reached():
                return False
            connection.cut_off(head + body[:kept], fault.how)
        elif fault.kind == "no_last_chunk":
            connection.cut_off(head + body[:-1], "fin")
        else:
            return False
        return True

    def open_stream(self) -> None:
        """Writes the head of an event stream."""
        self.streaming = True
        self.note(200)
        head = SSE_HEAD % clock.now()
        if not self.request.keep_alive:
            head = head[:-2] + b"connection: close\r\n\r\n"
        if self.fault is not None and self.fault.kind == "die_in_head":
            self.connection.cut_off(head[: len(head) // 2], self.fault.how)
        elif self.fault is not None and self.cut is not None and self.cut.reached():
            self.connection.cut_off(head, self.fault.how)
        else:
            self.connection.transport.write(head)

    def send(self, events: bytes) -> None:
        """Writes events as one chunk."""
        chunk = b"%x\r\n%b\r\n" % (len(events), events)
        if self.fault is not None and self.loses(self.fault, events, chunk):
            return
        self.connection.transport.write(chunk)

    def loses(self, fault: Fault, events: bytes, chunk: bytes) -> bool:
        """Lets the fault cut a stream in or after this chunk; whether it did."""
        self.events += events.count(b"\n\n")
        if self.cut is None:
            return False
        kept = self.cut.take(events)
        if not self.cut.reached():
            return False
        if kept < len(events):
            chunk = chunk[: chunk.index(b"\n") + 1 + kept]
        self.connection.cut_off(chunk, fault.how)
        return True

    def close_stream(self, events: bytes) -> None:
        """Writes the last events and ends the exchange."""
        chunk = b"%x\r\n%b\r\n" % (len(events), events)
        if self.fault is not None and self.loses(self.fault, events, chunk):
            return
        if self.fault is not None and self.fault.kind == "no_last_chunk":
            self.connection.cut_off(chunk, "fin")
            return
        self.connection.transport.write(chunk + b"0\r\n\r\n")
        self.connection.answered()

    def note(self, status: int) -> None:
        if self.record is not None:
            self.record["status"] = status


class Connection(asyncio.Protocol):
    """The server side of one connection: uvicorn's, as far as a client can tell."""

    transport: asyncio.Transport

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = engine.sim.loop
        self.number = 0
        self.parser = httptools.HttpRequestParser(self)
        self.incoming = Request()
        self.queue: deque[Request] = deque()
        self.exchange: Exchange | None = None
        self.idle_timer: asyncio.TimerHandle | None = None
        self.closed = False
        self.pumping = False
        # Whether the peer takes data slower than it is written.
        self.full = False
        # A connection used for control stays out of the figures.
        self.counted = True

    # From the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        engine = self.engine
        engine.accepted += 1
        self.number = engine.accepted
        engine.connections.add(self)
        if engine.faults and engine.next_fault({"reset_on_connect"}) is not None:
            self.reset()

    def data_received(self, data: bytes) -> None:
        self.stop_idling()
        if self.closed:
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError:
            self.cut_off(INVALID_REQUEST, "fin")
            return
        self.pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.stop_idling()
        self.queue.clear()
        self.engine.connections.discard(self)
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        if exchange.control is not None:
            exchange.control.cancel()
        if exchange.generation is not None:
            exchange.generation.abort()

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self.exchange is not None and self.exchange.generation is not None:
            self.exchange.generation.unpark()

    # From the parser.

    def on_url(self, url: bytes) -> None:
        self.incoming.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.incoming.headers.append((name, value))

    def on_headers_complete(self) -> None:
        request = self.incoming
        request.method = self.parser.get_method()
        request.path = request.target.partition(b"?")[0]
        faults = self.engine.faults
        if faults and self.engine.next_fault({"reset_on_head"}, request) is not None:
            self.reset()
        elif request.header(b"expect") == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self.incoming.pieces.append(data)

    def on_message_complete(self) -> None:
        request, self.incoming = self.incoming, Request()
        pieces = request.pieces
        request.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        request.keep_alive = self.parser.should_keep_alive()
        self.queue.append(request)

    # Requests, one after the other.

    def pump(self) -> None:
        """Serves requests until one takes time or none is left."""
        self.pumping = True
        while self.queue and self.exchange is None and not self.closed:
            request = self.queue.popleft()
            self.exchange = Exchange(self, request)
            self.engine.serve(self.exchange)
        self.pumping = False

    def answered(self) -> None:
        """The current response is complete."""
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        engine = self.engine
        if not exchange.request.keep_alive or (
            engine.faults and engine.next_fault({"close_idle"}) is not None
        ):
            self.closed = True
            self.transport.close()
            return
        keep_alive = engine.sim.options.keep_alive
        self.idle_timer = self.loop.call_later(keep_alive, self.close_idle)
        if not self.pumping:
            self.pump()

    def stop_idling(self) -> None:
        if self.idle_timer is not None:
            self.idle_timer.cancel()
            self.idle_timer = None

    def close_idle(self) -> None:
        self.closed = True
        self.transport.close()

    def leave_figures(self) -> None:
        """Counts this connection no longer: it is used for control."""
        if self.counted:
            self.counted = False
            self.engine.accepted -= 1

    def drop(self) -> None:
        """The server gives the connection up, and with it what runs on it."""
        self.closed = True
        if self.exchange is not None and self.exchange.generation is not None:
            self.exchange.generation.stop()

    def cut_off(self, last: bytes, how: str) -> None:
        """Writes the last bytes, then ends the connection by FIN or reset."""
        self.drop()
        self.transport.write(last)
        if how == "fin":
            self.transport.close()
        else:
            self.loop.call_later(FLUSH_TIME, self.reset)

    def reset(self) -> None:
        self.drop()
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
        self.transport.abort()
