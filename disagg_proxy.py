#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""XpYd prefill/decode proxy for vLLM: one file, one event loop.

    client ──POST──▶ proxy ──1. P leg: one token, KV kept──▶ prefill instance
                       │   ◀─2. hand-over (where the KV is)──────┘      │ KV
                       └────3. D leg: the hand-over──▶ decode instance ◀┘
    client ◀──────────────4. D's answer, as it comes──────────┘

    python3 disagg_proxy.py --model MODEL \\
        --prefill 10.0.0.1:8100 10.0.0.2:8100 --decode 10.0.0.3:8200

A request, in order:

1. The whole request is read and checked; nothing that is refused here ever
   reaches an engine.
2. Its JSON body is split into top-level members: names decoded, values raw. A
   leg's body is those members joined again, so no value can change, and a
   client's own `kv_transfer_params` cannot slip through on any path.
3. A prefill instance gets the request with `max_tokens: 1`. Its answer carries
   the hand-over.
4. A decode instance gets the client's request with that hand-over.
5. The decode instance's status, headers and body bytes go to the client as
   they come, read no faster than the client takes them.
6. What fails before the client has seen a byte is tried again elsewhere, under
   the rules of `Proxy.serial`; after that the connection is cut, so that an
   incomplete answer never looks complete.

Differences from vLLM's `disagg_proxy_demo.py`: the hand-over is made and
passed on, errors keep their status, connections are kept, a client that leaves
aborts its request, and instances that fail come back by themselves.

Not supported: TLS towards the engines, HTTP/2, upgrades.

Reading order: start at "Prefill and decode"; what stands above it is the HTTP
and the connections it rests on. `moriio_proxy.py` imports the names in
`__all__`: keep both files together.
"""

import argparse
import asyncio
import ctypes
import enum
import errno
import functools
import hmac
import inspect
import ipaddress
import json
import logging
import math
import os
import random
import resource
import signal
import socket
import ssl
import struct
import sys
import time
from abc import ABC, abstractmethod
from binascii import hexlify
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from datetime import UTC, datetime
from email.utils import formatdate
from hashlib import blake2b
from itertools import accumulate
from time import monotonic
from typing import Any, NamedTuple, NoReturn, cast
from urllib.parse import unquote_to_bytes

import httptools
import msgspec
import uvloop
from msgspec import Raw

__all__ = [
    "CONNECTORS",
    "Connector",
    "Exchange",
    "Instance",
    "InstanceCycler",
    "LeastLoadedSchedulingPolicy",
    "NULL",
    "Pair",
    "Proxy",
    "ProxyError",
    "ProxyServer",
    "Request",
    "Response",
    "RoundRobinSchedulingPolicy",
    "SchedulingPolicy",
    "Seldom",
    "Server",
    "Service",
    "State",
    "Steps",
    "add_server_flags",
    "configure_logging",
    "encode_json",
    "forwarded_body",
    "main",
    "names_any",
    "no_instance",
    "parse_address",
    "request_id_line",
    "split_members",
    "words",
]

logger = logging.getLogger("disagg_proxy")
# Has a line for each request where `--access-log` is given, whatever the level.
access_logger = logging.getLogger("disagg_proxy.access")
access_logger.setLevel(logging.INFO)

# --- Limits and timeouts --------------------------------------------------------------

# Bytes of a request or response head: room for long tokens and MoRIIO's ids.
MAX_HEAD_BYTES = 64 * 1024
# Bytes of a head that is worth remembering.
MAX_KNOWN_HEAD_BYTES = 4096
# Header fields of a head: vLLM's own limit.
MAX_HEADERS = 256
# Bytes of a request target: no vLLM route needs a hundredth of it.
MAX_TARGET_BYTES = 16 * 1024
# Bytes of a request body: token-id prompts and inline images are tens of MB.
MAX_BODY_BYTES = 256 * 1024 * 1024
# Bytes of one chunk-size or trailer line.
MAX_CHUNK_LINE_BYTES = 4096
# Bytes of a prefill answer: hand-overs are kilobytes, so this is generous.
MAX_HAND_OVER_BYTES = 16 * 1024 * 1024
# Members of a body with half an emoji in it: they are found one by one, in Python.
MAX_CUT_MEMBERS = 1024
# Bytes of further requests kept while one is being answered on a connection.
MAX_PIPELINED_BYTES = 64 * 1024
# Bytes of a client's X-Request-Id that are given back.
MAX_REQUEST_ID_BYTES = 512
# Bytes of a path that are logged.
MAX_LOGGED_PATH_BYTES = 512
# Responses whose decode instance is remembered: a day of one in a second.
MAX_HOLDERS = 100_000
# Bytes from the start of an answer that have a response's id: it comes first.
MAX_RESPONSE_ID_OFFSET = 512
# Bytes of a body that is cheaper to copy behind its head than to send apart.
SMALL_BODY_BYTES = 16 * 1024
# Bytes waiting for a slow reader before its engine is no longer read.
WRITE_HIGH_WATER = 64 * 1024

# File descriptors of a client: its own, and its engine's. If it needs another for a
# moment, between the legs, a connection that is kept for later has to go.
DESCRIPTORS_PER_CLIENT = 2
# Those that are kept for probes, ports, engines that register and refusals; but no
# more than half of all.
RESERVED_DESCRIPTORS = 256

# Seconds from the first byte of a head to its last: bounds slow senders.
HEAD_TIMEOUT = 60.0
# Seconds in which a request body must bring MIN_BODY_PROGRESS bytes or its end.
BODY_STALL_TIMEOUT = 30.0
MIN_BODY_PROGRESS = 32 * 1024
# Seconds an idle client connection is kept: above the usual 60 s of balancers.
KEEP_ALIVE_TIMEOUT = 75.0
# Seconds a refused upload is still read, so that its client sees the answer.
LINGER_TIMEOUT = 30.0
# Seconds for a TLS handshake: a client that is alive needs a few round trips.
HANDSHAKE_TIMEOUT = 10.0
# Seconds an idle client has to answer the end of TLS: most libraries never do.
GOODBYE_TIMEOUT = 2.0
# Seconds an idle engine connection is kept: vLLM closes it at 5.0 s.
ENGINE_IDLE_TIMEOUT = 4.0
# Seconds to connect to an engine: a live one needs milliseconds.
CONNECT_TIMEOUT = 5.0
# Seconds until the first byte of an answer: upstream's total, six hours.
FIRST_BYTE_TIMEOUT = 6 * 3600.0
# Seconds a probe or a model check may take, and between two probes.
PROBE_TIMEOUT = 5.0
PROBE_INTERVAL_DOWN = 1.0
PROBE_INTERVAL_UP = 5.0
# Seconds running answers may take to finish after SIGTERM.
DRAIN_TIMEOUT = 30.0
# Seconds between two looks at all deadlines.
TICK = 1.0
# Seconds between two warnings of one kind, of which a flood of clients could make many.
WARNING_INTERVAL = 10.0
# Seconds from one start of a worker to the next: one that ends at once must not spin.
RESTART_INTERVAL = 1.0
# Seconds a worker waits for what the others say: one that hangs is left out.
ASK_TIMEOUT = 1.0
# Seconds between two words to each worker, and how many of them may go unanswered: one
# that hangs is ended, as the kernel goes on giving it clients.
PING_INTERVAL = 10.0
MAX_UNANSWERED = 3
# Bytes of freed memory kept for the next bodies, and the size of an allocation
# that is returned at once: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>.
MALLOC_OPTIONS = ((-1, 64 * 1024 * 1024), (-3, 8 * 1024 * 1024))
# Connections the kernel may queue: a burst of clients must not be refused.
LISTEN_BACKLOG = int(os.environ.get("PROXY_LISTEN_BACKLOG", "4096"))

# --- Errors ---------------------------------------------------------------------------

# status: (reason phrase, error type in vLLM's words)
REASONS = {
    200: ("OK", ""),
    400: ("Bad Request", "BadRequestError"),
    401: ("Unauthorized", "AuthenticationError"),
    403: ("Forbidden", "PermissionDeniedError"),
    404: ("Not Found", "NotFoundError"),
    405: ("Method Not Allowed", "MethodNotAllowedError"),
    408: ("Request Timeout", "RequestTimeoutError"),
    413: ("Content Too Large", "ContentTooLargeError"),
    414: ("URI Too Long", "UriTooLongError"),
    415: ("Unsupported Media Type", "UnsupportedMediaTypeError"),
    417: ("Expectation Failed", "ExpectationFailedError"),
    422: ("Unprocessable Content", "UnprocessableEntityError"),
    431: ("Request Header Fields Too Large", "HeaderFieldsTooLargeError"),
    500: ("Internal Server Error", "InternalServerError"),
    501: ("Not Implemented", "NotImplementedError"),
    502: ("Bad Gateway", "BadGatewayError"),
    503: ("Service Unavailable", "ServiceUnavailableError"),
    504: ("Gateway Timeout", "GatewayTimeoutError"),
}


class ProxyError(Exception):
    """An answer of the proxy's own: a status, a message and extra headers."""

    def __init__(self, status: int, message: str, *headers: tuple[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers

    def body(self, target: bytes) -> bytes:
        """The error object of a route: OpenAI's, or Anthropic's for its messages."""
        error = {"type": REASONS[self.status][1], "message": self.message}
        if target.startswith(b"/v1/messages"):
            return msgspec.json.encode({"type": "error", "error": error})
        more = {"param": None, "code": self.status}
        return msgspec.json.encode({"error": {**error, **more}})


def retry_later(message: str) -> ProxyError:
    """A 503 that will soon be over."""
    retry = ("Retry-After", str(math.ceil(PROBE_INTERVAL_DOWN)))
    return ProxyError(503, message, retry)


class AdminError(ProxyError):
    """An answer of an admin route, in upstream's shape."""

    def __init__(self, status: int, detail: object) -> None:
        super().__init__(status, "")
        self.detail = detail

    def body(self, target: bytes) -> bytes:
        return msgspec.json.encode({"detail": self.detail})


class MalformedAnswer(Exception):
    """An engine sent what is not HTTP."""


# --- HTTP/1.1 grammar: bytes to values, no I/O ----------------------------------------

CRLF = b"\r\n"
BLANKS = b" \t"
MAX_LENGTH_DIGITS = 18
LAST_CHUNK = b"0\r\n\r\n"
VISIBLE_ASCII = bytes(range(0x21, 0x7F))
HEX_DIGITS = b"0123456789abcdefABCDEF"
HOST_CHARS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._"
TOKEN_CHARS = (
    b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)
# RFC 9110 section 5.5: what may stand in a field value.
FIELD_CHARS = b"\t" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100))
# RFC 3986 section 3.2: a host and a port; what they consist of.
AUTHORITY_CHARS = HOST_CHARS.encode() + b"~%!$&'()*+,;=:[]"

# RFC 9110 section 7.6.1; always for one connection only.
HOP_BY_HOP = frozenset(
    b"""
    connection keep-alive proxy-authenticate proxy-authorization proxy-connection
    te transfer-encoding upgrade
    """.split()
)
# A client's fields that the proxy reads itself and writes anew on each leg.
OWNED_REQUEST = HOP_BY_HOP | frozenset(
    b"accept-encoding authorization content-length content-type expect host trailer "
    b"x-data-parallel-rank x-request-id".split()
)
# Those of them that may come once only.
SINGLE = frozenset(
    b"authorization content-length content-type expect host transfer-encoding "
    b"x-request-id".split()
)
OWNED_RESPONSE = HOP_BY_HOP | {b"content-length", b"x-request-id"}


def content_length(value: bytes) -> int:
    """RFC 9110 section 8.6: digits only; `int()` takes signs, blanks, underscores.

    Raises:
        ValueError: it is anything else.

    """
    if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
        raise ValueError("malformed Content-Length")
    return int(value)


class Fields(NamedTuple):
    """The fields of a head, sorted."""

    # Field lines that go on to the other side.
    lines: list[bytes]
    # Values of the others by lower-case name; several lines joined by ", ".
    owned: dict[bytes, bytes]
    # Names of those that came on several lines.
    repeated: set[bytes]


def split_fields(raw: bytes, wanted: frozenset[bytes]) -> Fields:
    """Sorts the fields of a head that the parser has found well-formed.

    Fields that Connection names go nowhere, RFC 9110 section 7.6.1.
    """
    lines: list[bytes] = []
    owned: dict[bytes, bytes] = {}
    repeated: set[bytes] = set()
    for line in raw[:-4].split(CRLF)[1:]:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name not in wanted:
            lines.append(line)
        elif name in owned:
            owned[name] += b", " + value.strip(BLANKS)
            repeated.add(name)
        else:
            owned[name] = value.strip(BLANKS)
    if b"connection" in owned:
        named = list_items(owned[b"connection"])
        if named - {b"close", b"keep-alive"}:
            lines = [n for n in lines if n.partition(b":")[0].lower() not in named]
    return Fields(lines, owned, repeated)


def list_items(value: bytes) -> set[bytes]:
    """The items of a comma-separated field, in lower case."""
    return {item.strip(BLANKS) for item in value.lower().split(b",")}


def keeps_alive(owned: dict[bytes, bytes], modern: bool) -> bool:
    """Whether a connection stays open after a message, RFC 9112 section 9.3."""
    if b"connection" not in owned:
        return modern
    named = list_items(owned[b"connection"])
    return b"close" not in named and (modern or b"keep-alive" in named)


# The paths that metrics tell apart: the proxy's own and vLLM's for clients.
KNOWN_PATHS = frozenset(
    {
        "/classify",
        "/detokenize",
        "/health",
        "/inference/v1/generate",
        "/instances/add",
        "/instances/remove",
        "/invocations",
        "/load",
        "/metrics",
        "/ping",
        "/pooling",
        "/rerank",
        "/score",
        "/start_profile",
        "/status",
        "/stop_profile",
        "/tokenize",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/rerank",
        "/v1/responses",
        "/v1/responses/{id}",
        "/v1/score",
        "/v2/embed",
        "/v2/rerank",
        "/version",
    }
)


def known_path(target: bytes) -> str:
    """The path of a target if it is known, else "other"."""
    path = unquote_to_bytes(target.partition(b"?")[0]).decode("latin-1")
    if path.startswith("/v1/responses/"):
        return "/v1/responses/{id}"
    return path if path in KNOWN_PATHS else "other"


def field_line(name: bytes, owned: Mapping[bytes, bytes]) -> bytes:
    """The line of a field that the proxy writes anew; nothing where it is absent."""
    value = owned.get(name.lower())
    return b"%s: %s\r\n" % (name, value) if value else b""


class RequestHead:
    """A client's request head but for its Content-Length; shared, not to be changed.

    Raises:
        ProxyError: it breaks RFC 9112 or a limit; the connection has to close.

    """

    def __init__(self, raw: bytes) -> None:
        self.target = b""
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(raw)
        except httptools.HttpParserUpgrade:
            pass  # An offer to upgrade is ignored, as RFC 9110 section 7.8 allows.
        except httptools.HttpParserError as err:
            raise ProxyError(400, f"Malformed request: {err}") from None
        self.method: bytes = parser.get_method()
        version = parser.get_http_version()
        self.modern = version == "1.1"
        if not self.modern and version != "1.0":
            raise ProxyError(400, "Only HTTP/1.0 and HTTP/1.1 are spoken here")
        if not raw.startswith(b"%s %s HTTP/" % (self.method, self.target)):
            raise ProxyError(400, "Malformed request line")
        lines, self.owned, repeated = split_fields(raw, OWNED_REQUEST)
        if repeated & SINGLE:
            raise ProxyError(400, f"Repeated: {b', '.join(repeated).decode()}")
        if len(self.target) > MAX_TARGET_BYTES:
            raise ProxyError(414, "The request target is too long")
        if len(lines) + len(self.owned) > MAX_HEADERS:
            raise ProxyError(431, "Too many header fields")
        self.content_type = self.owned.get(b"content-type", b"")
        if self.owned.get(b"expect", b"100-continue").lower() != b"100-continue":
            raise ProxyError(417, "Only 100-continue can be expected")
        if self.content_type:
            lines.append(b"Content-Type: " + self.owned[b"content-type"])
        self.authorization = field_line(b"Authorization", self.owned)
        # The line that only the leg gets that answers the client.
        self.accepted = field_line(b"Accept-Encoding", self.owned)
        # The lines that every leg gets.
        self.forwarded = CRLF.join([*lines, b""])
        self._framing(self.owned)
        if self.target[:1] != b"/":
            self._absolute()
        self.path = known_path(self.target)
        # The client's own id, where it can be shown.
        given = self.owned.get(b"x-request-id", b"")[:MAX_REQUEST_ID_BYTES]
        self.given_id = b"" if given.translate(None, VISIBLE_ASCII) else given
        # The request line of a leg.
        self.start = b"%s %s HTTP/1.1\r\n" % (self.method, self.target)

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self.target += url

    def forwarded_field(self, name: bytes) -> bytes | None:
        """The value of a field that legs get, by its lower-case name."""
        for line in self.forwarded.split(CRLF):
            found, colon, value = line.partition(b":")
            if colon and found.lower() == name:
                return value.strip(BLANKS)
        return None

    def _framing(self, owned: dict[bytes, bytes]) -> None:
        """RFC 9112 sections 3.2, 6.1 and 6.3."""
        host = owned.get(b"host", b"")
        if host.translate(None, AUTHORITY_CHARS) or (self.modern and not host):
            raise ProxyError(400, "No Host field, or a malformed one")
        self.chunked = b"transfer-encoding" in owned
        if b"content-length" in owned or (self.chunked and not self.modern):
            raise ProxyError(400, "Ambiguous framing")
        if self.chunked and owned[b"transfer-encoding"].lower() != b"chunked":
            raise ProxyError(501, "Only the chunked transfer coding is supported")
        self.keep_alive = keeps_alive(owned, self.modern)

    def _absolute(self) -> None:
        """Takes the path of an absolute-form target, RFC 9112 section 3.2.2."""
        scheme, _, rest = self.target.partition(b"://")
        if scheme.lower() not in (b"http", b"https"):
            raise ProxyError(400, "Malformed request target")
        authority, slash, path = rest.partition(b"/")
        if not authority or b"?" in authority or b"#" in authority:
            raise ProxyError(400, "Malformed request target")
        self.target = slash + path or b"/"


# Clients repeat their heads but for the length of the body.
known_request_head = functools.lru_cache(maxsize=512)(RequestHead)


def read_request_head(raw: bytes) -> tuple[RequestHead, int]:
    """A request's head, and the length of its body; 0 if it is chunked.

    Raises:
        ProxyError: see `RequestHead`.

    """
    start, length = raw.lower().find(b"\r\ncontent-length:"), b"0"
    if start >= 0:
        stop = raw.index(CRLF, start + 2)
        raw, length = raw[:start] + raw[stop:], raw[start + 17 : stop].strip(BLANKS)
    known = len(raw) <= MAX_KNOWN_HEAD_BYTES
    head = known_request_head(raw) if known else RequestHead(raw)
    if start >= 0 and head.chunked:
        raise ProxyError(400, "Ambiguous framing")
    try:
        return head, content_length(length)
    except ValueError as err:
        raise ProxyError(400, str(err)) from None


def framing_field(length: int | None) -> bytes:
    """How the body of an answer in HTTP/1.1 ends."""
    if length is None:
        return b"Transfer-Encoding: chunked\r\n"
    return b"Content-Length: %d\r\n" % length


class ResponseHead:
    """An engine's response head; shared, not to be changed.

    Raises:
        MalformedAnswer: it is not an HTTP/1.x head, or its framing is ambiguous.

    """

    def __init__(self, raw: bytes) -> None:
        parser = httptools.HttpResponseParser(self)
        try:
            parser.feed_data(raw)
        except httptools.HttpParserUpgrade:
            raise MalformedAnswer("it switches protocols") from None
        except httptools.HttpParserError as err:
            raise MalformedAnswer(str(err)) from None
        self.status: int = parser.get_status_code()
        start_line = raw[: raw.index(CRLF)]
        odd = start_line.translate(None, FIELD_CHARS)
        if start_line[:7] != b"HTTP/1." or self.status < 100 or odd:
            raise MalformedAnswer("malformed status line")
        modern = start_line[7:8] == b"1"
        lines, owned, _ = split_fields(raw, OWNED_RESPONSE)
        self.dated = any(line[:5].lower() == b"date:" for line in lines)
        # Status line and fields for the client, but for those of its connection.
        self.relayed = CRLF.join([b"HTTP/1.1" + start_line[8:], *lines, b""])
        self._framing(owned)
        # Whether the engine will take another request on this connection.
        # Chunks in HTTP/1.0 are faulty framing, RFC 9112 section 6.1.
        ends = self.length is not None or self.status in (204, 304)
        ends = ends or (self.chunked and modern)
        self.reusable = ends and keeps_alive(owned, modern)
        # Whether all a client of HTTP/1.1 has to be told is in `relayed_whole`.
        self.common = self.dated and self.status not in (204, 304)
        self.relayed_whole = self.relayed + framing_field(self.length)

    def _framing(self, owned: dict[bytes, bytes]) -> None:
        """RFC 9112 section 6.3: sets `length`, None if there is none, and `chunked`."""
        coding = owned.get(b"transfer-encoding")
        length = owned.get(b"content-length")
        if coding is not None and (length is not None or coding.lower() != b"chunked"):
            raise MalformedAnswer("ambiguous framing")
        self.chunked = coding is not None
        try:
            self.length = None if length is None else content_length(length)
        except ValueError as err:
            raise MalformedAnswer(str(err)) from None


# Engines send the same head many times within a second, their `Date`'s grain.
parse_response_head = functools.lru_cache(maxsize=512)(ResponseHead)


class Counted:
    """A body with a Content-Length."""

    def __init__(self, length: int) -> None:
        self.left = length
        self.done = length == 0
        self.extra = b""

    def feed(self, data: bytes) -> bytes:
        """Takes a read; returns what of it belongs to the body."""
        size = len(data)
        if size > self.left:
            self.extra, data = data[self.left :], data[: self.left]
            size = self.left
        self.left -= size
        self.done = self.left == 0
        return data

    def feed_eof(self) -> bool:
        """Whether the body is whole at the end of the connection."""
        return self.done


class Whole:
    """A body that came with its head: nothing is left to be followed."""

    done = True
    extra = b""

    def feed(self, data: bytes) -> bytes:
        """Takes the read: all of it is body."""
        return data

    def feed_eof(self) -> bool:
        """The body is whole."""
        return True


WHOLE = Whole()


class UntilClose:
    """A body that ends with its connection, RFC 9112 section 6.3 item 8."""

    def __init__(self) -> None:
        self.done = False
        self.extra = b""

    def feed(self, data: bytes) -> bytes:
        """Takes a read: all of it is body."""
        return data

    def feed_eof(self) -> bool:
        """The end of the connection is the end of the body."""
        self.done = True
        return True


class Chunked:
    """A chunked body, RFC 9112 section 7.1, followed across reads.

    Args:
        raw: True to give the coding's own bytes back, for a peer that takes
            chunks too; False to give the payload.

    Raises:
        ValueError: from `feed`, at bytes that are not the chunked coding.

    """

    def __init__(self, raw: bool) -> None:
        self.raw = raw
        # Payload bytes of the current chunk that are still to come.
        self.left = 0
        # What the next line is: "size", "end" (of a chunk) or "trailer".
        self.expect = "size"
        self.partial = b""
        self.trailer = 0
        self.done = False
        self.extra = b""

    def feed(self, data: bytes) -> bytes:
        """Takes a read; returns what of it belongs to the body."""
        payload: list[bytes] = []
        pos, size = 0, len(data)
        while pos < size and not self.done:
            if self.left:
                stop = min(pos + self.left, size)
                self.left -= stop - pos
                if not self.raw:
                    payload.append(data[pos:stop])
                pos = stop
                continue
            newline = data.find(b"\n", pos)
            if newline < 0:
                self._keep(data[pos:])
                pos = size
                break
            line = data[pos:newline]
            if self.partial:
                line, self.partial = self.partial + line, b""
            pos = newline + 1
            self._line(line)
            # The usual read is one whole chunk: its end is checked here at once.
            stop = pos + self.left
            if self.raw and self.left and data[stop : stop + 2] == CRLF:
                self.left, self.expect, pos = 0, "size", stop + 2
        if pos < size:
            self.extra = data[pos:]
        if self.raw:
            return data if pos == size else data[:pos]
        return payload[0] if len(payload) == 1 else b"".join(payload)

    def feed_eof(self) -> bool:
        """A chunked body is whole only after its last chunk."""
        return self.done

    def _keep(self, rest: bytes) -> None:
        self.partial += rest
        if self.expect == "end" and self.partial != b"\r":
            raise ValueError("a chunk is longer than its size")
        if len(self.partial) > MAX_CHUNK_LINE_BYTES:
            raise ValueError("a line of the chunked coding is too long")

    def _line(self, line: bytes) -> None:
        if line[-1:] != b"\r" or b"\r" in line[:-1] or len(line) > MAX_CHUNK_LINE_BYTES:
            raise ValueError("malformed line in the chunked coding")
        line = line[:-1]
        if self.expect == "size":
            self._size(line)
        elif self.expect == "end":
            if line:
                raise ValueError("a chunk is longer than its size")
            self.expect = "size"
        elif line:
            self._trailer(line)
        else:
            self.done = True

    def _size(self, line: bytes) -> None:
        digits, semicolon, extension = line.partition(b";")
        if semicolon:
            digits = digits.rstrip(b" \t")
            if extension.translate(None, FIELD_CHARS):
                raise ValueError("malformed chunk extension")
        if not digits or len(digits) > 15 or digits.strip(HEX_DIGITS):
            raise ValueError("malformed chunk size")
        self.left = int(digits, 16)
        self.expect = "end" if self.left else "trailer"

    def _trailer(self, line: bytes) -> None:
        self.trailer += len(line)
        name, colon, value = line.partition(b":")
        odd = name.translate(None, TOKEN_CHARS) + value.translate(None, FIELD_CHARS)
        # Framing may not be changed behind a body, RFC 9110 section 6.5.1.
        frames = name.lower() in (b"content-length", b"transfer-encoding")
        if not colon or not name or odd or frames:
            raise ValueError("malformed trailer field")
        if self.trailer > MAX_HEAD_BYTES:
            raise ValueError("trailers are too long")


Framing = Counted | Chunked | UntilClose | Whole


def response_framing(head: ResponseHead, to_head: bool, raw: bool) -> Framing:
    """RFC 9112 section 6.3: how the body of an answer ends.

    Args:
        head: the answer's head.
        to_head: whether it answers a HEAD request.
        raw: see `Chunked`.

    """
    if to_head or head.status in (204, 304):
        return Counted(0)
    if head.length is not None:
        return Counted(head.length)
    return Chunked(raw) if head.chunked else UntilClose()


def encode_chunk(data: bytes) -> bytes:
    """One chunk of the chunked coding; nothing for no data."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def render_head(status: int, fields: Iterable[tuple[str, str]]) -> bytes:
    """The head of an answer of the proxy's own, but for its empty line."""
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, ('',))[0]}"]
    lines.append(f"Date: {formatdate(usegmt=True)}")
    lines += [f"{name}: {value}" for name, value in fields]
    return "\r\n".join([*lines, ""]).encode("latin-1")


def is_json(content_type: bytes) -> bool:
    """Whether a Content-Type is JSON's, RFC 9110 section 8.3.1."""
    return content_type.partition(b";")[0].strip(BLANKS).lower() == b"application/json"


def check_path(path: bytes) -> str:
    """The percent-decoded path of a target, without its query.

    Raises:
        ProxyError: 400 for a path that proxy and engine might read differently
            (`//`, `.` and `..` segments, encoded slashes, control characters).

    """
    plain = path.partition(b"?")[0].partition(b"#")[0]
    lowered = plain.lower()
    decoded = unquote_to_bytes(plain)
    segments = decoded.split(b"/")
    doubtful = b"%2f" in lowered or b"%5c" in lowered or b"\\" in decoded
    if doubtful or b"" in segments[1:-1] or b"." in segments or b".." in segments:
        raise ProxyError(400, "The path is not in its normal form")
    if any(byte < 0x20 or byte == 0x7F for byte in decoded):
        raise ProxyError(400, "Control characters in the path")
    return decoded.decode("latin-1")


# --- JSON bodies: top-level members, values raw ---------------------------------------

Members = dict[str, Raw]

decode_members = msgspec.json.Decoder(Members).decode
decode_items = msgspec.json.Decoder(list[Raw]).decode
decode_any = msgspec.json.Decoder().decode
encode_json = msgspec.json.Encoder().encode
# What a decoder raises; the second for what is nested too deep.
BAD_JSON = (msgspec.DecodeError, RecursionError)

TRUE, FALSE, NULL = Raw(b"true"), Raw(b"false"), Raw(b"null")
ONE, EMPTY = Raw(b"1"), Raw(b'""')


def split_members(body: bytes) -> Members:
    """The members of a JSON object: names decoded, values as they stand.

    Of two members with one name the last counts, as in vLLM.

    Raises:
        ProxyError: 400, it is not one JSON object in UTF-8.

    """
    try:
        if not body.isascii():
            body.decode()
        return decode_members(body)
    except msgspec.ValidationError:
        raise ProxyError(400, "The body must be one JSON object") from None
    except (UnicodeDecodeError, RecursionError) as err:
        raise ProxyError(400, f"The body is not valid JSON: {err}") from None
    except msgspec.DecodeError as err:
        if b"\\ud" in body.lower():
            return split_lone_surrogates(body)
        raise ProxyError(400, f"The body is not valid JSON: {err}") from None


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def split_lone_surrogates(body: bytes) -> Members:
    r"""The same for text cut through an emoji (`"\ud83d"`).

    RFC 8259 section 8.2 allows it, msgspec does not, so the standard scanner
    finds where each value ends.
    """
    text = body.decode()
    scan = json.JSONDecoder(parse_constant=refuse_constant).raw_decode
    found: Members = {}

    def skip(pos: int, wanted: str) -> int:
        while (ahead := text[pos : pos + 1024]) and not ahead.strip(" \t\r\n"):
            pos += len(ahead)
        pos += len(ahead) - len(ahead.lstrip(" \t\r\n"))
        if not ahead or text[pos] not in wanted:
            raise ValueError(f"expected one of {wanted!r} at character {pos}")
        return pos

    try:
        pos = skip(0, "{")
        for _ in range(MAX_CUT_MEMBERS):
            name, pos = scan(text, skip(pos + 1, '"'))
            name.encode()  # No engine knows a name with a lone surrogate.
            start = skip(skip(pos, ":") + 1, '"{[-0123456789tfn')
            _, pos = scan(text, start)
            found[name] = Raw(text[start:pos].encode())
            pos = skip(pos, ",}")
            if text[pos] == "}":
                break
        if text[pos + 1 :].strip(" \t\r\n"):
            raise ValueError("trailing characters, or too many members")
    except (ValueError, RecursionError) as err:
        raise ProxyError(400, f"The body is not valid JSON: {err}") from None
    return found


def words(text: str) -> frozenset[str]:
    """A set of names."""
    return frozenset(text.split())


def is_null(value: Raw | None) -> bool:
    """Whether a member is absent or null."""
    return value is None or value == NULL


def may_be_true(value: Raw | None) -> bool:
    """Whether vLLM's models might read a member as true: they take 1, "yes", ..."""
    return value is not None and value not in (NULL, FALSE)


# --- Instances and their connections --------------------------------------------------

Steps = Generator[None, None, None]

# How an event with vLLM's error object begins; a chunk's size may stand before it.
STREAM_ERROR = b'data: {"error"'
MAX_STREAM_ERROR_OFFSET = 32


class State(enum.StrEnum):
    """Whether an instance gets requests."""

    UP = "up"
    DOWN = "down"
    DRAINING = "draining"


class Failure(enum.Enum):
    """Why a leg has no answer: a status, words, whether the engine may have it."""

    REFUSED = (502, "cannot be reached", False)
    CONNECT_TIMEOUT = (504, "did not accept a connection in time", False)
    NO_DESCRIPTOR = (503, "was not asked: the proxy has no file descriptor left", False)
    RESET = (502, "closed the connection without a whole answer", True)
    TIMEOUT = (504, "did not answer in time", True)
    MALFORMED = (502, "sent a malformed answer", True)
    TOO_LARGE = (502, "sent an answer beyond the limit", True)

    def __init__(self, status: int, words: str, delivered: bool) -> None:
        self.status = status
        self.words = words
        self.delivered = delivered


class Seldom:
    """A warning that is written once in WARNING_INTERVAL.

    Args:
        text: what has happened since the last time, with `%d` for how often.

    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.due = 0.0
        self.count = 0

    def note(self) -> None:
        """It has happened once more."""
        self.count += 1
        if monotonic() >= self.due:
            logger.warning(self.text, self.count)
            self.due, self.count = monotonic() + WARNING_INTERVAL, 0


no_descriptor = Seldom("%d connections to engines failed: no file descriptors left")
turned_away = Seldom("%d clients turned away: too many for the limit (ulimit -n)")

# What `next` returns after the last step: at half the cost of a StopIteration.
OVER = object()


class Script:
    """Runs one generator, which yields whenever it waits for one of its legs.

    The callback that has the news resumes it directly: no task, no future.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.steps: Steps | None = None
        # What comes after these, without what they have in memory.
        self.following: Steps | None = None
        self.legs: list[Leg] = []

    def run(self, steps: Steps) -> None:
        """Starts with the first of some steps."""
        self.steps = steps
        self.resume()

    def resume(self) -> None:
        """Goes on to the next yield, or to the end."""
        if self.steps is None:
            return
        try:
            if next(self.steps, OVER) is not OVER:
                return
        except Exception as err:
            self._end(err)
            return
        following, self.following = self.following, None
        if following is None:
            self._end(None)
        else:
            self.run(following)

    def cancel(self) -> None:
        """Ends it where it stands: its `finally` clauses run, its legs close."""
        steps, self.steps = self.steps, None
        if steps is not None:
            steps.close()
        self._close_legs()

    def _end(self, err: Exception | None) -> None:
        self.steps = None
        try:
            self.ended(err)
        finally:
            self._close_legs()

    def _close_legs(self) -> None:
        for leg in self.legs:
            if not leg.done:
                leg.close()
        self.legs.clear()

    def ended(self, err: Exception | None) -> None:
        """What follows the last step."""
        if err is not None:
            logger.error("internal error", exc_info=err)


class Leg:
    """One request to one instance, and what has become of it.

    Args:
        owner: resumed when the leg is settled and again when it is done.
        instance: where it goes.
        request: its head.
        body: its body.
        whole: settle a 200 only with its whole payload; else with the head.
        raw: keep the chunked coding's own bytes (they go to a peer as they are).
        to_head: it is a HEAD request, so the answer has no body.

    """

    def __init__(
        self,
        owner: Script,
        instance: "Instance",
        request: bytes,
        body: bytes,
        whole: bool,
        raw: bool,
        to_head: bool = False,
    ) -> None:
        self.owner = owner
        self.instance = instance
        self.request = request
        self.sent = body
        self.whole = whole
        self.raw = raw
        self.to_head = to_head
        self.head: ResponseHead | None = None
        # The answer's status; 0 when there is none.
        self.status = 0
        self.framing: Framing | None = None
        self.pieces: list[bytes] = []
        self.size = 0
        # When the request was handed to a connection, and when its answer's head
        # came, or all of it for a leg that is settled whole; 0 if it has not.
        self.begun = self.answered = 0.0
        self.settled = self.done = self.paused = False
        # Whether it is settled by the first bytes of the body, not by the head.
        self.late = False
        self.failure: Failure | None = None
        # Takes the body as it comes, once the client's answer has begun.
        self.sink: Callable[[bytes], None] | None = None
        self.connection: EngineConnection | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.deadline = math.inf

    def body(self) -> bytes:
        """What has come of the body and was not given to a sink."""
        pieces, self.pieces = self.pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def fail(self, failure: Failure) -> None:
        """No (whole) answer will come."""
        self.failure = failure
        self.instance.count(self, failure.name.lower())
        self._leave()
        self.settled = self.done = True
        self.owner.resume()

    def expire(self) -> None:
        """Its time is up."""
        if not self.done:
            self.fail(Failure.TIMEOUT)

    def settle(self, now: float) -> None:
        """What was waited for is there; the rest may take as long as it likes."""
        self.settled = True
        self.answered = now
        self.deadline = math.inf
        self.owner.resume()

    def pause(self) -> None:
        """Stops reading the answer."""
        if self.connection is not None:
            self.paused = True
            self.connection.transport.pause_reading()

    def go_on(self) -> None:
        """Reads on."""
        if self.paused and self.connection is not None:
            self.paused = False
            self.connection.transport.resume_reading()

    def close(self) -> None:
        """Nobody waits for it any more: an engine that works on it is told."""
        if not self.done:
            self.done = True
            self._leave()

    def _leave(self) -> None:
        self.instance.leave(self)
        if self.connecting is not None:
            self.connecting.cancel()
        if self.connection is not None:
            self.connection.abort()


class EngineConnection(asyncio.Protocol):
    """A connection to an instance: idle in its pool, or busy with one leg."""

    transport: asyncio.Transport

    def __init__(self, instance: "Instance") -> None:
        self.instance = instance
        self.leg: Leg | None = None
        self.buffer = b""
        self.deadline = 0.0
        self.used = False

    def begin(self, leg: Leg, now: float) -> None:
        """Sends a leg's request."""
        self.leg = leg
        leg.connection = self
        leg.begun = now
        if len(leg.sent) < SMALL_BODY_BYTES:
            self.transport.write(leg.request + leg.sent)
        else:
            self.transport.writelines((leg.request, leg.sent))
        # A prompt may be large, and its answer long.
        leg.request = leg.sent = b""

    def abort(self) -> None:
        """Closes at once; the engine takes it as the client's leaving."""
        self.leg = None
        self.transport.abort()

    # The life of a connection, as asyncio calls it.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.instance.connections += 1

    def data_received(self, data: bytes) -> None:
        leg = self.leg
        if leg is None:
            # Nobody asked for these bytes, so nobody gets them.
            self.transport.abort()
            return
        framing = leg.framing
        try:
            if framing is None:
                piece = self._head(leg, data)
                framing = leg.framing
                if framing is None:
                    return
            else:
                piece = framing.feed(data)
        except (MalformedAnswer, ValueError) as err:
            logger.warning("%s: malformed answer: %s", self.instance, err)
            leg.fail(Failure.MALFORMED)
            return
        if leg.sink is not None:
            if piece:
                instance = self.instance
                instance.pieces += 1
                instance.size += len(piece)
                leg.sink(piece)
            if framing.done:
                self._complete(leg, framing, monotonic())
                leg.owner.resume()
            return
        if piece:
            leg.pieces.append(piece)
        now = monotonic()
        if framing.done:
            self._complete(leg, framing, now)
        elif leg.whole and leg.status == 200:
            leg.size += len(piece)
            if leg.size > MAX_HAND_OVER_BYTES:
                leg.fail(Failure.TOO_LARGE)
            return
        elif leg.late and not leg.pieces:
            return
        if not leg.settled:
            leg.settle(now)

    def eof_received(self) -> None:
        leg = self.leg
        framing = leg.framing if leg is not None else None
        if leg is not None and framing is not None and framing.feed_eof():
            now = monotonic()
            self._complete(leg, framing, now)
            leg.owner.resume() if leg.settled else leg.settle(now)

    def connection_lost(self, exc: Exception | None) -> None:
        self.instance.connections -= 1
        self.instance.idle.pop(self, None)
        leg, self.leg = self.leg, None
        if leg is not None:
            # The end of an idle connection that was used again tells nothing.
            if leg.head is not None or not self.used:
                self.instance.suspect()
            leg.fail(Failure.RESET)

    def _head(self, leg: Leg, data: bytes) -> bytes:
        """Takes bytes up to the end of the head; returns what there is of the body."""
        if self.buffer:
            data, self.buffer = self.buffer + data, b""
        status = 0
        while status < 200:  # Interim answers may come first, RFC 9110 section 15.2.
            end = data.find(b"\r\n\r\n") + 4
            if end < 4 or end > MAX_HEAD_BYTES:
                if len(data) > MAX_HEAD_BYTES:
                    raise MalformedAnswer("the head is too long")
                self.buffer = data
                return b""
            head, data = parse_response_head(data[:end]), data[end:]
            status = head.status
        leg.head, leg.status = head, status
        if status >= 500:
            self.instance.count(leg, "5xx")
        if head.length == len(data) and head.common and not leg.to_head:
            leg.framing = WHOLE
            return data
        raw = leg.raw and not (leg.whole and status == 200)
        leg.framing = response_framing(head, leg.to_head, raw)
        return leg.framing.feed(data)

    def _complete(self, leg: Leg, framing: Framing, now: float) -> None:
        """The answer is whole: the connection goes back to the pool, or closes."""
        if leg.paused:
            leg.go_on()
        self.leg = leg.connection = None
        leg.done = True
        # Nobody would look after what a bootstrap server or a refused instance has.
        kept = self.instance.leave(leg)
        reusable = leg.head is not None and leg.head.reusable and not framing.extra
        # An engine may answer before it has read all of a large request.
        if kept and reusable and not self.transport.get_write_buffer_size():
            self.used = True
            self.deadline = now + ENGINE_IDLE_TIMEOUT
            self.instance.idle[self] = None
        else:
            self.transport.abort()


def parse_address(text: str) -> tuple[str, int]:
    """The host and port of `host:port`, `[ipv6]:port` or `http://host:port`.

    Raises:
        ValueError: it is none of these.

    """
    plain = text.removeprefix("http://").rstrip("/")
    host, colon, port = plain.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        try:
            host = str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError as err:
            raise ValueError(f"Invalid instance {text}: {err}") from None
        if host.strip(HOST_CHARS + ":%"):
            raise ValueError(f"Invalid zone in instance: {text}")
    elif ":" in host or not host or host.strip(HOST_CHARS):
        raise ValueError(f"Invalid instance format: {text}")
    if not colon or not (port.isascii() and port.isdigit()) or len(port) > 5:
        raise ValueError(f"Invalid port number in instance: {text}")
    if not 0 < int(port) < 65536:
        raise ValueError(f"Invalid port number in instance: {text}")
    return host, int(port)


LOCAL_NAMES = ("", "localhost", "0.0.0.0", "::", "[::]", "[::1]", "::1")


@functools.lru_cache(maxsize=256)  # Engines name the same few hosts again and again.
def is_local(host: str) -> bool:
    """Whether a host name means "this machine", whichever that is."""
    return host.lower() in LOCAL_NAMES or host.startswith("127.")


class Instance:
    """One engine: its address, its state, its connections."""

    def __init__(self, address: str, cycler: "InstanceCycler") -> None:
        self.host, self.port = parse_address(address)
        name = f"[{self.host}]" if ":" in self.host else self.host
        self.address = f"{name}:{self.port}"
        self.authority = self.address.encode("ascii")
        self.is_local = is_local(self.host)
        self.cycler = cycler
        self.state = State.DOWN
        self.reason: str | None = "not checked yet"
        self.since = time.time()
        # What its connector was told of it and has learnt, as JSON.
        self.facts: dict[str, Any] = {}
        # How many requests failed, by kind.
        self.failures: Counter[str] = Counter()
        self.transitions: Counter[State] = Counter()
        # Requests it was given, bytes of its bodies that clients got, in how many
        # pieces.
        self.given = self.size = self.pieces = 0
        # Open connections, and attempts to open one.
        self.connections = self.opening = 0
        self.idle: dict[EngineConnection, None] = {}
        # Requests it is working on; apart from them, probes and model checks.
        self.legs: set[Leg] = set()
        self.probes: set[Leg] = set()
        # Prefill legs of pairs whose decode leg has not begun to answer.
        self.needed: set[Leg] = set()
        self.watch: Watch | None = None
        # IP addresses of the host; looked up again after it was down.
        self.resolved: list[str] = []

    def __str__(self) -> str:
        return self.address

    @property
    def in_flight(self) -> int:
        """Requests it is working on."""
        return len(self.legs)

    def mark(self, state: State, reason: str | None = None) -> None:
        """Changes the state: one log line per change."""
        if state is not self.state:
            self.transitions[state] += 1
            because = f": {reason}" if reason else ""
            logger.info("%s %s is %s%s", self.cycler.role, self, state, because)
        self.take(state, reason, time.time())
        self.cycler.marked(self)

    def take(self, state: State, reason: str | None, now: float) -> None:
        """Changes the state, as it was seen here or told by another worker."""
        if state is not self.state:
            self.state, self.since = state, now
            self.cycler.refresh()
        self.reason = reason
        if state is State.DOWN:
            self.resolved = []
        elif state is State.DRAINING and not self.legs:
            self.cycler.forget(self)

    def count(self, leg: Leg, failure: str) -> None:
        """Counts a request that failed; what probes find is the state."""
        if leg in self.legs:
            self.failures[failure] += 1

    def suspect(self) -> None:
        """Something went wrong: have it probed now."""
        if self.watch is not None:
            self.watch.hurry()

    def send(self, leg: Leg, timeout: float, fresh: bool = False) -> None:
        """Sends a leg on an idle connection, or on a new one.

        Args:
            leg: what to send.
            timeout: seconds until the first byte of the answer, or until all of
                it for a leg that is settled whole.
            fresh: it is a probe, on a connection of its own.

        """
        now = monotonic()
        if fresh:
            self.probes.add(leg)
        else:
            self.legs.add(leg)
            self.given += 1
        leg.deadline = now + timeout
        while self.idle and not fresh:
            connection, _ = self.idle.popitem()
            if connection.deadline > now and not connection.transport.is_closing():
                connection.begin(leg, now)
                return
            connection.transport.abort()
        leg.connecting = leg.owner.loop.create_task(self._connect(leg))

    async def _connect(self, leg: Leg) -> None:
        self.opening += 1
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                if self.cycler.make_room():
                    await asyncio.sleep(0)  # What was dropped is closed then.
                connection = await self._open()
        except TimeoutError:
            failure, reason = Failure.CONNECT_TIMEOUT, "connect timed out"
        except OSError as err:
            failure, reason = Failure.REFUSED, err.strerror or str(err)
            if err.errno in (errno.EMFILE, errno.ENFILE):
                failure = Failure.NO_DESCRIPTOR
        except UnicodeError as err:  # A name that no lookup takes.
            failure, reason = Failure.REFUSED, str(err)
        else:
            leg.connecting = None
            connection.begin(leg, monotonic())
            return
        finally:
            self.opening -= 1
        leg.connecting = None
        if failure is Failure.NO_DESCRIPTOR:
            no_descriptor.note()  # That says nothing about the instance.
        elif self.state is State.UP:
            self.mark(State.DOWN, reason)
            self.suspect()
        if failure is not Failure.NO_DESCRIPTOR:
            self.lose_kv()
        leg.fail(failure)

    def lose_kv(self) -> None:
        """Nothing listens there: what it prefilled and nobody has taken is gone."""
        for leg in tuple(self.needed):
            if leg.done and leg.failure is None:
                leg.failure = Failure.RESET
                self.failures["reset"] += 1
                leg.owner.resume()

    async def _open(self) -> EngineConnection:
        """Tries the addresses of the host in turn."""
        loop = asyncio.get_running_loop()
        if not self.resolved:
            found = await loop.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM
            )
            self.resolved = [str(entry[4][0]) for entry in found]
        refused: OSError | None = None
        for address in self.resolved:
            try:
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(self), address, self.port
                )
                return connection
            except OSError as err:
                refused = err
        raise refused or OSError("no address")

    def leave(self, leg: Leg) -> bool:
        """A leg is over, however it ended; returns whether it was a request."""
        if leg not in self.legs:
            self.probes.discard(leg)
            return False
        self.legs.remove(leg)
        if not self.legs and self.state is State.DRAINING:
            self.cycler.forget(self)
        return True

    def tick(self, now: float) -> None:
        """Drops what has waited too long."""
        for connection in [c for c in self.idle if c.deadline <= now]:
            connection.transport.abort()
        for leg in [leg for leg in self.legs | self.probes if leg.deadline <= now]:
            leg.fail(Failure.TIMEOUT)

    def figures(self) -> Iterator[tuple[str, str, float]]:
        """Yields the name of a family in FAMILIES, label values, and the number."""
        own = f"{self.cycler.role} {self.address}"
        yield "instance_requests", own, self.given
        yield "instance_requests_in_flight", own, self.in_flight
        yield "instance_relayed_bytes", own, self.size
        yield "instance_relayed_pieces", own, self.pieces
        busy = self.connections - len(self.idle)
        yield "instance_connections", f"{own} busy", busy
        yield "instance_connections", f"{own} idle", len(self.idle)
        for kind, number in self.failures.items():
            yield "instance_failures", f"{own} {kind}", number
        for state in State:
            yield "instance_state", f"{own} {state}", state is self.state
            yield "instance_transitions", f"{own} {state}", self.transitions[state]

    def close(self) -> None:
        """Stops watching it and drops its idle connections."""
        if self.watch is not None:
            self.watch.cancel()
        for connection in list(self.idle):
            connection.transport.abort()


class InstanceCycler:
    """The instances of one role in rotation: `next()` gives the next that is up.

    `instances` shows all of them, with `state` and `in_flight`; `up` those that
    can be chosen; `session` whose request it is, for a policy that wants to know.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.instances: list[Instance] = []
        self.up: list[Instance] = []
        self.turn = 0
        self.session = b""
        # Told of each verdict on an instance.
        self.marked: Callable[[Instance], None] = lambda instance: None
        # Called before a connection is opened; see `Service.make_room`.
        self.make_room: Callable[[], bool] = lambda: False

    def __iter__(self) -> Iterator[Instance]:
        return self

    def __next__(self) -> Instance:
        up, turn = self.up, self.turn
        if not up:
            raise StopIteration
        self.turn = turn + 1
        return up[turn % len(up)]

    def find(self, address: str) -> Instance | None:
        """The instance with that address; the latest, if one is still draining."""
        found = (i for i in reversed(self.instances) if i.address == address)
        return next(found, None)

    def add(self, address: str) -> Instance:
        """Takes a new instance in; it is down until it was checked."""
        instance = Instance(address, self)
        self.instances.append(instance)
        return instance

    def refresh(self) -> None:
        """To be called when a state has changed."""
        self.up = [i for i in self.instances if i.state is State.UP]

    def forget(self, instance: Instance) -> None:
        """Takes an instance out."""
        if instance in self.instances:
            self.instances.remove(instance)
            logger.info("%s %s has left", self.role, instance)
            self.refresh()
            instance.close()


class ModelCheck(NamedTuple):
    """What a check found: what is wrong, if anything, and whether for good."""

    problem: str | None
    wrong_model: bool = False


def same_model(served: str, wanted: str) -> bool:
    """Whether two model ids are equal, or end in the same path component."""
    return served == wanted or served.rsplit("/", 1)[-1] == wanted.rsplit("/", 1)[-1]


def unreachable(leg: Leg) -> ProxyError:
    """The answer for a leg that failed."""
    assert leg.failure is not None
    role, words = leg.instance.cycler.role, leg.failure.words
    message = f"{role} instance {leg.instance} {words}"
    if leg.failure is Failure.NO_DESCRIPTOR:
        return retry_later(message)
    return ProxyError(leg.failure.status, message)


def no_instance(role: str) -> ProxyError:
    return retry_later(f"No {role} instance is available")


def fetch(
    script: Script, instance: Instance, path: bytes, key: bytes
) -> Generator[None, None, Leg]:
    """Gets a small answer from an instance, on a connection of its own.

    Raises:
        ProxyError: 503, the proxy has no file descriptor left.

    """
    fields = b"Authorization: %s\r\n" % key if key else b""
    request = b"GET %s HTTP/1.1\r\nHost: %s\r\n%s\r\n" % (
        path,
        instance.authority,
        fields,
    )
    leg = Leg(script, instance, request, b"", whole=True, raw=False)
    script.legs.append(leg)
    instance.send(leg, PROBE_TIMEOUT, fresh=True)
    # Nobody looks at the deadlines of an instance that is not in a role yet.
    timer = script.loop.call_later(PROBE_TIMEOUT, leg.expire)
    try:
        while not leg.settled:
            yield
    finally:
        timer.cancel()
    script.legs.remove(leg)
    leg.close()
    if leg.failure is Failure.NO_DESCRIPTOR:
        raise unreachable(leg)
    return leg


def check_instance(
    script: Script, instance: Instance, model: str | None, key: bytes
) -> Generator[None, None, ModelCheck]:
    """Asks an instance whether it is well and whether it serves the model."""
    for path in (b"/health",) if model is None else (b"/health", b"/v1/models"):
        leg = yield from fetch(script, instance, path, key)
        if leg.failure is not None:
            return ModelCheck(f"{path.decode()}: it {leg.failure.words}")
        if leg.status in (401, 403) and path == b"/v1/models":
            logger.warning("%s: its model is unverified: it wants a key", instance)
            return ModelCheck(None)
        if leg.status != 200:
            return ModelCheck(f"{path.decode()}: status {leg.status}")
    if model is None:
        return ModelCheck(None)
    try:
        served = msgspec.json.decode(leg.body(), type=ModelList).data
    except BAD_JSON:
        return ModelCheck("/v1/models: not a list of models")
    if any(same_model(entry.id, model) for entry in served):
        return ModelCheck(None)
    ids = ", ".join(entry.id for entry in served) or "no model"
    return ModelCheck(f"{instance} serves a different model: {ids} != {model}", True)


class ModelEntry(msgspec.Struct):
    id: str


class ModelList(msgspec.Struct):
    data: list[ModelEntry]


Learn = Callable[[Script, Instance], Generator[None, None, str | None]]


class Watch(Script):
    """Probes one instance for as long as it is known."""

    def __init__(
        self,
        instance: Instance,
        model: str | None,
        key: bytes,
        learn: Learn | None = None,
    ) -> None:
        super().__init__(asyncio.get_running_loop())
        self.instance = instance
        self.model = model
        self.key = key
        self.learn = learn
        self.timer: asyncio.TimerHandle | None = None
        # Set with the first verdict.
        self.first: asyncio.Future[ModelCheck] = self.loop.create_future()
        instance.watch = self
        self.run(self._steps())

    def hurry(self) -> None:
        """Ends the wait for the next probe."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
            self.loop.call_soon(self.resume)

    def _steps(self) -> Steps:
        instance = self.instance
        while True:
            try:
                check = yield from self._check()
            except ProxyError as err:  # Nothing was found out: it stays what it is.
                up = instance.state is State.UP
                check = ModelCheck(None if up else err.message)
            except Exception as err:
                logger.error("internal error", exc_info=err)
                check = ModelCheck(f"the check failed: {err}")
            if instance.state is not State.DRAINING:
                instance.mark(State.DOWN if check.problem else State.UP, check.problem)
            if not self.first.done():
                self.first.set_result(check)
            up = instance.state is State.UP
            self.timer = self.loop.call_later(
                PROBE_INTERVAL_UP if up else PROBE_INTERVAL_DOWN, self.resume
            )
            yield
            self.timer = None

    def _check(self) -> Generator[None, None, ModelCheck]:
        instance = self.instance
        model = None if instance.state is State.UP else self.model
        check = yield from check_instance(self, instance, model, self.key)
        if check.problem is None and self.learn is not None:
            problem = yield from self.learn(self, instance)
            return ModelCheck(problem)
        return check


# --- Keys -----------------------------------------------------------------------------

# Routes of the proxy's own that need no client's key: those with a key of their own,
# and those that take no body; of these --protect-status closes some.
ADMIN_TARGETS = (b"/instances/add", b"/instances/remove")
STATUS_TARGETS = (b"/metrics", b"/status")
OPEN_TARGETS = (*ADMIN_TARGETS, *STATUS_TARGETS, b"/health")


def client_keys(args: argparse.Namespace) -> list[bytes]:
    """The keys of which a client has to present one; from the flag, or VLLM_API_KEY.

    Raises:
        SystemExit: one is empty, as after a misspelt variable of a shell.

    """
    given: list[str] = args.api_key or []
    if "" in given:
        raise SystemExit("--api-key is empty")
    from_environment = os.environ.get("VLLM_API_KEY")
    if from_environment and not given:
        given = [from_environment]
    if args.protect_status and not given:
        raise SystemExit("--protect-status needs --api-key")
    return [os.fsencode(key) for key in given]


def check_admin_key(head: RequestHead) -> None:
    """Raises AdminError unless a request has the key of the admin routes."""
    given = head.forwarded_field(b"x-api-key")
    if given is None:
        missing = {
            "type": "missing",
            "loc": ["header", "x-api-key"],
            "msg": "Field required",
            "input": None,
        }
        raise AdminError(422, [missing])
    wanted = os.environ.get("ADMIN_API_KEY")
    if not wanted:
        raise AdminError(500, "Server configuration error.")
    if not hmac.compare_digest(given, os.fsencode(wanted)):
        raise AdminError(403, "Forbidden: Invalid API Key.")


# --- Metrics: what is counted, and how it is shown ------------------------------------

# How a request was served.
TWO_LEGS, BYPASS, ONE_LEG, OWN = MODES = (
    "disaggregated",
    "bypass",
    "single_leg",
    "own",
)
# Upper bounds of the buckets, in seconds: from a hand-over to a long answer.
BOUNDS = (
    *(0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)


class Family(NamedTuple):
    """A family of series; its full name has the prefix `pd_proxy_`."""

    name: str
    # counter, gauge or histogram; a counter's series end in `_total`.
    kind: str
    # Names, blanks between them.
    labels: str
    help: str


FAMILIES = (
    Family(
        "requests",
        "counter",
        "endpoint mode status",
        "Requests that are over, by the status that was sent; none: the client left "
        "before. mode: disaggregated, bypass (decode alone), single_leg, own",
    ),
    Family("requests_in_flight", "gauge", "", "Requests that are being answered"),
    Family(
        "bypassed_requests",
        "counter",
        "reason",
        "Requests that one hand-over cannot serve, so that decode serves alone",
    ),
    Family(
        "aborted_requests",
        "counter",
        "",
        "Requests whose client left before the answer was whole",
    ),
    Family(
        "cut_answers",
        "counter",
        "",
        "Answers cut because an instance failed or the time to drain was over",
    ),
    Family(
        "retries",
        "counter",
        "role",
        "Further tries of what an instance of this role had received and failed",
    ),
    Family(
        "failovers",
        "counter",
        "role",
        "Further tries of what an instance of this role had not even received",
    ),
    Family(
        "request_duration_seconds",
        "histogram",
        "mode",
        "From the last byte of a request to the last byte of its answer, written",
    ),
    Family(
        "prefill_duration_seconds",
        "histogram",
        "",
        "From the P leg's request, written, to the last byte of its 200",
    ),
    Family(
        "hand_over_duration_seconds",
        "histogram",
        "",
        "From the last byte of P's 200 to the D leg's request, written; a new "
        "connection is in it. Not where both legs run at once",
    ),
    Family(
        "decode_first_byte_seconds",
        "histogram",
        "mode",
        "From the D leg's request, written, to the head of its 200",
    ),
    Family("client_connections", "gauge", "", "Open connections of clients"),
    Family(
        "accept_queue_connections",
        "gauge",
        "",
        "Connections that wait in the kernel until the proxy takes them: a burst",
    ),
    Family(
        "client_connections_accepted", "counter", "", "Connections of clients, ever"
    ),
    Family(
        "instance_state",
        "gauge",
        "role instance state",
        "Proxy processes in whose view an instance is up, down or draining",
    ),
    Family(
        "instance_transitions",
        "counter",
        "role instance state",
        "Changes of an instance to a state",
    ),
    Family(
        "instance_requests",
        "counter",
        "role instance",
        "Requests given to an instance, with those that it failed",
    ),
    Family(
        "instance_requests_in_flight",
        "gauge",
        "role instance",
        "Requests an instance works on",
    ),
    Family(
        "instance_failures",
        "counter",
        "role instance kind",
        "Requests an instance failed. kind: refused, connect_timeout, reset, timeout, "
        "malformed, too_large, 5xx, stream_error (the first event is an error), "
        "no_descriptor (the proxy's own fault)",
    ),
    Family(
        "instance_relayed_bytes",
        "counter",
        "role instance",
        "Bytes of an instance's bodies passed on, chunk sizes among them",
    ),
    Family(
        "instance_relayed_pieces",
        "counter",
        "role instance",
        "Pieces in which they came: of a streamed answer about one for each token",
    ),
    Family(
        "instance_connections",
        "gauge",
        "role instance state",
        "Connections to an instance, busy or idle in the pool",
    ),
)

# Of each family, numbers by label values (a blank between them): one number, or of
# a histogram the values in each bucket, those above, and their sum. Encodes as JSON.
Snapshot = dict[str, dict[str, list[float]]]


def add_numbers(total: Snapshot, name: str, labels: str, numbers: list[float]) -> None:
    """Adds to one series."""
    series = total.setdefault(name, {})
    known = series.get(labels)
    series[labels] = [a + b for a, b in zip(known, numbers)] if known else numbers


def add_up(snapshots: Iterable[Snapshot]) -> Snapshot:
    """The sum of several processes' snapshots."""
    total: Snapshot = {}
    for snapshot in snapshots:
        for name, series in snapshot.items():
            for labels, numbers in series.items():
                add_numbers(total, name, labels, numbers)
    return total


def samples(
    family: Family, series: dict[str, list[float]]
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yields name, labels and value of each line of a family."""
    name, names = f"pd_proxy_{family.name}", family.labels.split()
    for values, numbers in series.items():
        labels = dict(zip(names, values.split()))
        if family.kind != "histogram":
            suffix = "_total" if family.kind == "counter" else ""
            yield name + suffix, labels, numbers[0]
            continue
        *counts, total = numbers
        bounds = (*(f"{bound:g}" for bound in BOUNDS), "+Inf")
        for bound, count in zip(bounds, accumulate(counts)):
            yield f"{name}_bucket", {**labels, "le": bound}, count
        yield f"{name}_count", labels, sum(counts)
        yield f"{name}_sum", labels, total


def render(snapshot: Snapshot) -> tuple[bytes, str]:
    """A snapshot in Prometheus' text format, and the media type of that."""
    # Not with the other imports: 4 MB, and not every proxy is scraped.
    from prometheus_client import CollectorRegistry, Metric, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
    from prometheus_client.registry import Collector

    class Exposition(Collector):
        def collect(self) -> Iterator[Metric]:
            for family in FAMILIES:
                metric = Metric(f"pd_proxy_{family.name}", family.help, family.kind)
                for sample in samples(family, snapshot.get(family.name, {})):
                    metric.add_sample(*sample)
                yield metric

    registry = CollectorRegistry()
    registry.register(Exposition())
    return generate_latest(registry), CONTENT_TYPE_LATEST


class Times:
    """A histogram of seconds; what is new waits, as sorting it later is cheaper."""

    def __init__(self) -> None:
        self.new: list[float] = []
        self.folded = [0.0] * (len(BOUNDS) + 2)

    def fold(self) -> list[float]:
        """All until now, as in a snapshot; what is negative never happened."""
        if self.new:
            new = sorted(self.new)
            self.new.clear()
            done = bisect_left(new, 0.0)
            self.folded[-1] += sum(new[done:])
            for place, bound in enumerate((*BOUNDS, math.inf)):
                up_to = bisect_right(new, bound)
                self.folded[place] += up_to - done
                done = up_to
        return self.folded.copy()


def logged_head(head: RequestHead) -> dict[str, object]:
    """What the access log says of a request's head; a query might hold secrets."""
    path = head.target.partition(b"?")[0][:MAX_LOGGED_PATH_BYTES]
    return {"method": head.method.decode(), "path": path.decode("latin-1")}


def milliseconds(start: float, end: float) -> float | None:
    """The time between two clock readings; None if one of them was not made."""
    return round((end - start) * 1000, 1) if start and end else None


def log_request(x: "Exchange", end: str, now: float) -> None:
    """Writes a line of the access log.

    Args:
        x: a request that is over, while its legs are there.
        end: whether its answer is "whole", or why not.
        now: when that was.

    """
    p = next((leg for leg in reversed(x.legs) if leg.whole), None)
    d = next((leg for leg in reversed(x.legs) if not leg.whole), None)
    given = x.head.given_id
    fields = {
        # As the engines have it.
        "id": x.request_id.partition(b": ")[2].strip().decode(),
        **({"client_id": given.decode()} if given else {}),
        **logged_head(x.head),
        "status": x.status or None,
        "end": end,
        "mode": x.mode,
        "prefill": str(p.instance) if p else None,
        "decode": str(d.instance) if d else None,
        "prefill_ms": milliseconds(p.begun, p.answered) if p else None,
        # Since the request came.
        "first_byte_ms": milliseconds(x.began, d.answered) if d else None,
        "total_ms": milliseconds(x.began, now),
        # To the client, heads among them.
        "bytes": x.client.written(),
    }
    access_logger.info("request", extra=fields)


class Tally:
    """What a process counts: numbers and lists, so that a request costs little.

    Args:
        access_log: whether each request leaves a line in the log.

    """

    def __init__(self, access_log: bool) -> None:
        self.access_log = access_log
        # Of the usual requests since `fold`, two legs and a 200: their paths, and
        # their times for `usual_times`, one after the other.
        self.usual: list[str] = []
        self.usual_new: list[float] = []
        # All others by path, mode and status.
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.prefill, self.hand_over = Times(), Times()
        self.first_byte = {mode: Times() for mode in (TWO_LEGS, BYPASS, ONE_LEG)}
        self.total = {mode: Times() for mode in MODES}
        self.usual_times = (
            self.total[TWO_LEGS],
            self.prefill,
            self.hand_over,
            self.first_byte[TWO_LEGS],
        )
        # Connections; answers that were not whole, by why.
        self.accepted = 0
        self.partial: Counter[str] = Counter()
        self.bypassed: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.failovers: Counter[str] = Counter()

    def answered(self, x: "Exchange", now: float) -> None:
        """Takes in a request whose answer is out, while its legs are there."""
        if self.access_log:
            log_request(x, "whole", now)
        if x.mode is TWO_LEGS and x.status == 200 and len(x.legs) == 2:
            p, d = x.legs
            if p.status == 200:
                # The same as below, at a third of the cost.
                self.usual.append(x.head.path)
                sent, come, begun = p.begun, p.answered, d.begun
                self.usual_new.extend(
                    (now - x.began, come - sent, begun - come, d.answered - begun)
                )
                return
        self.total[x.mode].new.append(now - x.began)
        self._over(x)

    def lost(self, x: "Exchange", why: str) -> None:
        """Takes in a request whose answer is "cut", or whose client has "aborted"."""
        self.partial[why] += 1
        if self.access_log:
            log_request(x, why, monotonic())
        self._over(x)

    def _over(self, x: "Exchange") -> None:
        self.requests[x.head.path, x.mode, x.status] += 1
        prefilled = math.inf
        for leg in x.legs:
            if leg.status != 200 or not leg.answered:
                continue
            if leg.whole:
                self.prefill.new.append(leg.answered - leg.begun)
                prefilled = leg.answered
            else:
                self.first_byte[x.mode].new.append(leg.answered - leg.begun)
                self.hand_over.new.append(leg.begun - prefilled)

    def refused(self, head: RequestHead | None, status: int, written: int) -> None:
        """Takes in a request that was not read to its end."""
        self.requests[head.path if head else "other", OWN, status] += 1
        if self.access_log:
            fields = logged_head(head) if head else {}
            fields |= {"status": status, "bytes": written}
            access_logger.info("refused", extra=fields)

    def again(self, leg: Leg) -> None:
        """Counts a further try of what a leg has failed."""
        delivered = leg.failure is None or leg.failure.delivered
        counter = self.retries if delivered else self.failovers
        counter[leg.instance.cycler.role] += 1

    def fold(self) -> None:
        """Makes room: to be called now and then."""
        for path, number in Counter(self.usual).items():
            self.requests[path, TWO_LEGS, 200] += number
        self.usual.clear()
        for place, times in enumerate(self.usual_times):
            times.new += self.usual_new[place :: len(self.usual_times)]
        self.usual_new.clear()
        for times in (self.prefill, self.hand_over):
            times.fold()
        for times in (*self.first_byte.values(), *self.total.values()):
            times.fold()

    def snapshot(self) -> Snapshot:
        """What was counted here until now."""
        self.fold()
        counted: Snapshot = {
            "aborted_requests": {"": [self.partial["aborted"]]},
            "cut_answers": {"": [self.partial["cut"]]},
            "client_connections_accepted": {"": [self.accepted]},
            "prefill_duration_seconds": {"": self.prefill.fold()},
            "hand_over_duration_seconds": {"": self.hand_over.fold()},
        }
        for (path, mode, status), number in self.requests.items():
            labels = f"{path} {mode} {status or 'none'}"
            add_numbers(counted, "requests", labels, [number])
        for name, counter in (
            ("bypassed_requests", self.bypassed),
            ("retries", self.retries),
            ("failovers", self.failovers),
        ):
            counted[name] = {label: [number] for label, number in counter.items()}
        for name, by_mode in (
            ("request_duration_seconds", self.total),
            ("decode_first_byte_seconds", self.first_byte),
        ):
            counted[name] = {mode: times.fold() for mode, times in by_mode.items()}
        return counted


# --- Client connections ---------------------------------------------------------------


# TCP_CLOSE and TCP_CLOSE_WAIT of Linux, tcp_states.h.
TCP_ENDED = (7, 8)
# `tcpi_state`; `tcpi_unacked`, where a listening socket has its accept queue.
TCP_STATE, TCP_ACCEPT_QUEUE = "B", "24xI"
# SO_LINGER on, zero seconds: closing sends a reset.
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def tcp_info(sock: Any, form: str) -> int:
    """One number of Linux's `struct tcp_info`, linux/tcp.h; 0 elsewhere.

    Args:
        sock: whose.
        form: what stands before it and its type, as for `struct.unpack`.

    """
    if not hasattr(socket, "TCP_INFO"):
        return 0
    size = struct.calcsize(form)
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    return int(struct.unpack(form, info)[0])


class Phase(enum.Enum):
    """What a client connection waits for."""

    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWER = enum.auto()
    # The answer is out, the rest of a refused request is read and dropped.
    LINGER = enum.auto()
    # The request that will be refused, as there are too many clients.
    CROWDED = enum.auto()


# Compared for each read: `Phase.IDLE` takes Python 3.11 four times as long.
IDLE, HEAD, BODY, ANSWER, LINGER, CROWDED = Phase


class Meter:
    """A client's transport that counts what is written, where that is logged."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self.transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


class ClientConnection(asyncio.Protocol):
    """A client's connection: its requests one after the other."""

    transport: asyncio.Transport

    def __init__(self, service: "Service") -> None:
        self.service = service
        self.phase = IDLE
        # Bytes of requests that were not read yet.
        self.buffer = bytearray()
        self.head: RequestHead | None = None
        self.handler: Handler | None = None
        self.framing: Framing = Counted(0)
        self.parts: list[bytes] = []
        self.size = self.mark = 0
        self.deadline = math.inf
        self.exchange: Exchange | None = None
        # Set while the transport takes more bytes.
        self.writable = True
        # Set where the log has a line for each request.
        self.meter: Meter | None = None

    # The life of a connection, as asyncio calls it.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.service.tally.access_log:
            self.meter = Meter(self.transport)
            self.transport = cast(asyncio.Transport, self.meter)
        self.transport.set_write_buffer_limits(WRITE_HIGH_WATER)
        self.service.clients.add(self)
        self.service.make_room()
        self.service.tally.accepted += 1
        self.deadline = monotonic() + HEAD_TIMEOUT
        beyond = len(self.service.clients) - self.service.max_clients
        if beyond > 0:
            turned_away.note()
            self.phase = CROWDED
            if beyond > self.service.max_refused:
                self.transport.abort()

    def data_received(self, data: bytes) -> None:
        phase = self.phase
        if phase is IDLE:
            self._take(data)
        elif phase is HEAD:
            self.buffer += data
            data = bytes(self.buffer)
            self.buffer.clear()
            self._take(data)
        elif phase is BODY:
            self._take_body(data)
        elif phase is ANSWER:
            self.buffer += data
            if len(self.buffer) > MAX_PIPELINED_BYTES:
                self.transport.pause_reading()
        elif phase is CROWDED:
            self.refuse(retry_later("The proxy serves as many clients as it can"))

    def eof_received(self) -> None:
        """A client that ends its side is gone, as in vLLM's own server."""

    def pause_writing(self) -> None:
        self.writable = False
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        self.writable = True
        if self.exchange is not None:
            self.exchange.go_on()
        elif self.phase is ANSWER:
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self.service.left(self)
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.give_up("aborted")

    # Reading a request.

    def _take(self, data: bytes) -> None:
        """Reads a head and, where it is all there, its body."""
        if data.startswith(CRLF):  # RFC 9112 section 2.2: empty lines may come first.
            start = 2
            while data.startswith(CRLF, start):
                start += 2
            data = data[start:]
        try:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4 or end > MAX_HEAD_BYTES:
                self._incomplete(data)
                return
            self.head = None
            self.head, length = read_request_head(data[:end])
            head = self.head
            if length > self.service.max_body:
                raise self.service.too_large()
            is_whole = not head.chunked and len(data) - end >= length
            handler = self._route(head, is_whole)
        except ProxyError as err:
            self.refuse(err)
            return
        if not head.chunked and len(data) - end == length:
            self._start(handler, head, data[end:] if length else b"")
            return
        self.phase, self.handler = BODY, handler
        self.parts, self.size, self.mark = [], 0, 0
        self.deadline = monotonic() + BODY_STALL_TIMEOUT
        self.framing = Chunked(raw=False) if head.chunked else Counted(length)
        if b"expect" in head.owned and head.modern and len(data) == end:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._take_body(data[end:])

    def _route(self, head: RequestHead, is_whole: bool) -> "Handler":
        """Who answers; of a whole request a refusal too, so that it costs no more.

        Whoever lacks a key is refused here: nothing is kept of a stranger's body.
        """
        service = self.service
        try:
            if service.client_keys:
                service.check_key(head, is_whole)
            handler = service.proxy.route(head.method, head.target, head.content_type)
            if not is_whole and handler in service.proxy.admin_handlers:
                check_admin_key(head)
            return handler
        except ProxyError as err:
            if not is_whole:
                raise
            return refusing(err)

    def _incomplete(self, data: bytes) -> None:
        if len(data) > MAX_HEAD_BYTES:
            if CRLF not in data[:MAX_TARGET_BYTES]:
                raise ProxyError(414, "The request line is too long")
            raise ProxyError(431, "The request head is too long")
        lines = data.count(b"\n")
        if lines != data.count(CRLF) or data.count(b"\r", 0, -1) != lines:
            raise ProxyError(400, "Malformed line end in the request head")
        if lines > MAX_HEADERS + 1:
            raise ProxyError(431, "Too many header fields")
        if data and self.phase is IDLE:
            self.phase = HEAD
            self.deadline = monotonic() + HEAD_TIMEOUT
        self.buffer += data

    def _take_body(self, data: bytes) -> None:
        handler, head, framing = self.handler, self.head, self.framing
        assert handler is not None and head is not None
        try:
            piece = framing.feed(data)
        except ValueError as err:
            self.refuse(ProxyError(400, f"Malformed request body: {err}"))
            return
        self.size += len(piece)
        if self.size > self.service.max_body:
            self.refuse(self.service.too_large())
        elif framing.done:
            self.buffer += framing.extra
            self.parts.append(piece)
            body, self.parts = b"".join(self.parts), []
            self._start(handler, head, body)
        else:
            self.parts.append(piece)
            if head.chunked:
                # Small chunks take long, and libuv would read 32 times in a row.
                self.transport.pause_reading()
                self.service.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _start(self, handler: "Handler", head: RequestHead, body: bytes) -> None:
        self.phase = ANSWER
        self.deadline = math.inf
        self.exchange = exchange = Exchange(self, head, body)
        exchange.begin(handler)

    # Answering.

    def finished(self, keep_alive: bool, now: float) -> None:
        """The answer is out: on to the next request."""
        self.exchange = self.head = None
        if not keep_alive or self.service.stopping:
            self.transport.close()
            return
        if not self.writable:
            return  # On with the next when the client has read this one.
        if self.buffer:
            self.service.loop.call_soon(self._next)
            return  # What comes until then has to queue up behind it.
        self.phase = IDLE
        self.deadline = now + KEEP_ALIVE_TIMEOUT

    def _next(self) -> None:
        """Goes on after an answer, with what had come before it was out."""
        if self.phase is not ANSWER or self.exchange is not None:
            return
        if not self.transport.is_closing():
            self.phase = IDLE
            self.deadline = monotonic() + KEEP_ALIVE_TIMEOUT
            data = bytes(self.buffer)
            self.buffer.clear()
            self._take(data)
            waits = self.phase is ANSWER
            if not (waits and len(self.buffer) > MAX_PIPELINED_BYTES):
                self.transport.resume_reading()

    def refuse(self, err: ProxyError) -> None:
        """Answers a request that was not read to its end, and closes in stages.

        RFC 9112 section 9.6: closing with unread data would reset the
        connection and might take the answer with it.
        """
        body = err.body(self.head.target if self.head else b"")
        fields = [("Content-Length", str(len(body))), *err.headers]
        fields += [("Content-Type", "application/json"), ("Connection", "close")]
        head = render_head(err.status, fields) + CRLF
        without_body = self.head is not None and self.head.method == b"HEAD"
        self.transport.write(head if without_body else head + body)
        self.service.tally.refused(self.head, err.status, self.written())
        if self.transport.can_write_eof():  # TLS cannot; the client closes then.
            self.transport.write_eof()
        self.phase = LINGER
        self.parts.clear()
        self.deadline = monotonic() + LINGER_TIMEOUT

    def written(self) -> int:
        """Bytes written since it was asked last, where they are counted."""
        if self.meter is None:
            return 0
        written, self.meter.written = self.meter.written, 0
        return written

    def stop(self) -> None:
        """Closes the connection unless an answer is on its way."""
        if self.exchange is None:
            self.transport.close()
            self.phase = LINGER
            self.deadline = monotonic() + GOODBYE_TIMEOUT

    def cut(self, framed: bool) -> None:
        """Ends an answer that is not whole, so that the client can tell.

        Where only the end of the connection marks the end of the answer, it is
        reset.
        """
        self.exchange = None
        self.phase = LINGER
        self.deadline = monotonic() + LINGER_TIMEOUT
        if framed:
            self.transport.close()
        else:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self.transport.abort()

    def peer_has_ended(self) -> bool:
        """Whether the client has ended a connection that is not read, or is full."""
        full = self.exchange is not None and not self.writable
        if not full and len(self.buffer) <= MAX_PIPELINED_BYTES:
            return False
        return tcp_info(self.transport.get_extra_info("socket"), TCP_STATE) in TCP_ENDED

    def tick(self, now: float) -> None:
        """Looks at the deadline of what the connection waits for."""
        if self.peer_has_ended():
            self.transport.abort()
        if now < self.deadline:
            return
        if self.phase is BODY and self.size - self.mark >= MIN_BODY_PROGRESS:
            self.mark = self.size
            self.deadline = now + BODY_STALL_TIMEOUT
        elif self.phase in (HEAD, BODY):
            self.refuse(ProxyError(408, "The request did not come in time"))
        elif self.transport.get_write_buffer_size():
            # The client still reads an answer: it is slow, not idle.
            self.deadline = now + KEEP_ALIVE_TIMEOUT
        else:
            self.transport.abort()


def refusing(err: ProxyError) -> "Handler":
    """A handler that answers with an error."""

    def refuse(x: Exchange) -> None:
        raise err

    return refuse


class Exchange(Script):
    """One request and its one answer."""

    def __init__(self, client: ClientConnection, head: RequestHead, body: bytes):
        super().__init__(client.service.loop)
        self.client = client
        self.head = head
        self.body = body
        self.keep_alive = head.keep_alive
        self.began = monotonic()
        # How it is served: one of MODES.
        self.mode = OWN
        # The status of the answer; 0 until the client has seen a byte of it.
        self.status = 0
        # The leg whose answer is being passed on.
        self.feeding: Leg | None = None
        # Is shown the first bytes of D's body, and which D it was.
        self.on_start: Callable[[Instance, bytes], None] | None = None
        # What a custom callable waits for while the client is slow.
        self.drained: asyncio.Future[None] | None = None
        own = client.service.authorization
        self.authorization = head.authorization if own is None else own
        # Header lines that all legs share.
        self.fields = head.forwarded + self.authorization
        # The header line with the id of both legs: 128 random bits.
        self.request_id = b"X-Request-Id: %b\r\n" % hexlify(random.randbytes(16))

    def begin(self, handler: "Handler") -> None:
        """Has a handler answer: at once, or in steps."""
        try:
            steps = handler(self)
        except Exception as err:
            self._end(err)
            return
        if steps is None:
            self._end(None)
        else:
            self.run(steps)

    def members(self) -> Members:
        """The body's members, without the parameters that only the proxy sets."""
        members = split_members(self.body)
        members.pop("kv_transfer_params", None)
        members.pop("ec_transfer_params", None)
        return members

    def session(self) -> bytes:
        """Whose request it is: the X-Session-ID field, or the member `user`."""
        session = self.head.forwarded_field(b"x-session-id")
        if session is None and self.body[:1] == b"{":
            session = bytes(self.members().get("user", b""))
        return session or b""

    # Legs.

    def post(
        self, instance: Instance, body: bytes, extra: bytes, whole: bool = False
    ) -> Leg:
        """Starts a leg with the client's method, target and end-to-end fields.

        Args:
            instance: where it goes.
            body: its body.
            extra: header lines of this leg alone, its X-Request-Id among them.
            whole: see `Leg`.

        """
        head = self.head
        request = b"%sHost: %s\r\n%s%sContent-Length: %d\r\n\r\n" % (
            head.start,
            instance.authority,
            self.fields,
            extra,
            len(body),
        )
        to_head = head.method == b"HEAD"
        leg = Leg(self, instance, request, body, whole, head.modern, to_head)
        self.legs.append(leg)
        instance.send(leg, self.client.service.first_byte_timeout)
        return leg

    # Answering.

    def answer(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Gives an answer of the proxy's own."""
        self.status = status
        fields = [("Content-Length", str(len(body))), ("Content-Type", content_type)]
        head = render_head(status, [*fields, *headers]) + self._last_fields()
        self.write(head if self.head.method == b"HEAD" else head + body)

    def answer_stream(self, content_type: str) -> None:
        """Begins an answer of the proxy's own whose length is not known."""
        self.status = 200
        head = render_head(200, [("Content-Type", content_type)])
        self.write(head + self._framing_field(None) + self._last_fields())

    def write(self, data: bytes) -> None:
        """Bytes to the client."""
        self.client.transport.write(data)

    async def drain(self) -> None:
        """Waits until the client takes more bytes."""
        while not self.client.writable:
            self.drained = self.loop.create_future()
            await self.drained

    def _framing_field(self, length: int | None) -> bytes:
        """How the body ends; HTTP/1.0 clients know only lengths and closing."""
        if length is not None or self.head.modern:
            return framing_field(length)
        self.keep_alive = False
        return b""

    def _last_fields(self) -> bytes:
        """The fields of this connection and of this request; the end of the head."""
        if self.client.service.stopping:
            self.keep_alive = False
        field = b""
        if not self.keep_alive:
            field = b"Connection: close\r\n"
        elif not self.head.modern:
            field = b"Connection: keep-alive\r\n"
        given = self.head.given_id
        if given:
            field += b"X-Request-Id: %s\r\n" % given
        return field + CRLF

    def relay(self, leg: Leg) -> None:
        """Passes on what there is of a leg's answer; the rest follows these steps."""
        recode = self.head.modern and isinstance(leg.framing, UntilClose)
        head, body = self._relayed_head(leg), leg.body()
        self.status = leg.status
        self.client.transport.write(head + (encode_chunk(body) if recode else body))
        if body:
            leg.instance.pieces += 1
            leg.instance.size += len(body)
            self.look(leg, body)
        if recode or not leg.done:
            self.following = self._relay_rest(leg, recode, seen=body != b"")

    def _relay_rest(self, leg: Leg, recode: bool, seen: bool) -> Steps:
        """Passes on the rest as it comes; ends when it is out.

        Raises:
            ConnectionError: the engine failed in mid-answer.

        """
        write = self.client.transport.write
        # There is no second try any more, and an answer may take hours.
        self.body = self.fields = b""
        if not leg.done:
            sink = (lambda data: write(encode_chunk(data))) if recode else write
            leg.sink = sink if seen else self.looking(leg, sink)
            self.feeding = leg
            leg.go_on() if self.client.writable else leg.pause()
            while not leg.done:
                yield
            self.feeding = None
            if leg.failure is not None:
                raise ConnectionError(f"{leg.instance} {leg.failure.words}")
        if recode:
            write(LAST_CHUNK)

    def look(self, leg: Leg, start: bytes) -> None:
        """Looks at the first bytes of an answer's body.

        A stream whose first event is an error is counted: its status was sent.
        """
        if start.find(STREAM_ERROR, 0, MAX_STREAM_ERROR_OFFSET) >= 0:
            leg.instance.failures["stream_error"] += 1
        if self.on_start is not None:
            self.on_start(leg.instance, start)

    def looking(
        self, leg: Leg, sink: Callable[[bytes], None]
    ) -> Callable[[bytes], None]:
        """A sink that looks at the first bytes, then leaves it to `sink`."""

        def first(data: bytes) -> None:
            self.look(leg, data)
            leg.sink = sink
            sink(data)

        return first

    def _relayed_head(self, leg: Leg) -> bytes:
        """The engine's head with the fields of this connection."""
        head = leg.head
        assert head is not None
        if head.common and self.head.modern and not leg.to_head:
            return head.relayed_whole + self._last_fields()
        fields, bodiless = head.relayed, leg.to_head or head.status == 304
        if not head.dated:
            # RFC 9110 section 6.6.1: whoever passes it on adds the date.
            fields += b"Date: %s\r\n" % formatdate(usegmt=True).encode()
        if head.status != 204 and (head.length is not None or not bodiless):
            fields += self._framing_field(head.length)
        return fields + self._last_fields()

    # What the connection tells.

    def pause(self) -> None:
        """The client is slow: its engine is not read for a while."""
        if self.feeding is not None:
            self.feeding.pause()

    def go_on(self) -> None:
        """The client takes bytes again."""
        if self.feeding is not None:
            self.feeding.go_on()
        elif self.drained is not None and not self.drained.done():
            self.drained.set_result(None)

    def give_up(self, why: str) -> None:
        """The client will get no more: whatever works on it is stopped.

        Args:
            why: see `Tally.lost`.

        """
        self.client.service.tally.lost(self, why)
        self.cancel()

    def ended(self, err: Exception | None) -> None:
        """Answers what went wrong, or cuts an answer that has begun."""
        client, tally = self.client, self.client.service.tally
        if client.exchange is not self:
            return
        if err is not None and self.status:
            logger.warning("answer cut short: %s", err)
            tally.lost(self, "cut")
            client.cut(self.head.modern)
            return
        if err is not None:
            if not isinstance(err, ProxyError):
                logger.error("internal error", exc_info=err)
                err = ProxyError(500, "Internal error in the proxy")
            body = err.body(self.head.target)
            self.answer(err.status, body, headers=err.headers)
        now = monotonic()
        tally.answered(self, now)
        client.finished(self.keep_alive, now)


Handler = Callable[[Exchange], Steps | None]


class Request:
    """What a custom callable receives."""

    def __init__(self, exchange: Exchange) -> None:
        self.body = exchange.body
        head = exchange.head
        owned = b"\r\n".join(b"%s:%s" % field for field in head.owned.items())
        lines = (head.forwarded + owned).decode("latin-1").split("\r\n")
        # Lower-case names.
        self.headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }

    async def json(self) -> Any:
        """The decoded body; raises ValueError where it is not JSON."""
        return json.loads(self.body)


class Service:
    """What all client connections of a process share.

    Args:
        proxy: the policy.
        args: the flags of `add_server_flags`.

    """

    def __init__(self, proxy: "Proxy", args: argparse.Namespace) -> None:
        self.proxy = proxy
        self.loop = asyncio.get_running_loop()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reserved = min(RESERVED_DESCRIPTORS, descriptors // 2)
        # Connections, to clients and to engines.
        self.max_connections = descriptors - reserved
        self.max_clients = self.max_connections // DESCRIPTORS_PER_CLIENT
        # Of those beyond, so many at a time are told why; the next are just closed.
        self.max_refused = reserved // 4
        self.max_body: int = args.max_body_size
        self.first_byte_timeout: float = args.first_byte_timeout
        self.servers: list[asyncio.Server] = []
        self.clients: set[ClientConnection] = set()
        self.tally = Tally(args.access_log)
        # Set once SIGTERM has come: no further requests.
        self.stopping = False
        self.empty = self.loop.create_future()
        key = os.environ.get("OPENAI_API_KEY", "")
        self.engine_key = f"Bearer {key}".encode() if key else b""
        # What clients have to present; empty: nothing.
        self.client_keys = client_keys(args)
        # What the engines are shown instead of what clients bring, if anything: a
        # key for the proxy is not for them.
        self.authorization: bytes | None = None
        if self.engine_key:
            self.authorization = b"Authorization: %s\r\n" % self.engine_key
        elif self.client_keys:
            self.authorization = b""
        closed = STATUS_TARGETS if args.protect_status else ()
        own = {path.encode() for path in proxy.routes}
        self.open_targets = own.intersection(OPEN_TARGETS).difference(closed)
        for cycler in (proxy.prefill_cycler, proxy.decode_cycler):
            cycler.make_room = self.make_room

    def check_key(self, head: RequestHead, is_whole: bool) -> None:
        """Refuses a request that has none of the keys, and needs one.

        How long it takes does not tell how much of a key was right. Whatever
        reaches an engine needs a key, as it would be served with the engine's own;
        vLLM, which guards only some of its routes, leaves `/tokenize` open.

        Raises:
            ProxyError: 401.

        """
        scheme, _, given = head.owned.get(b"authorization", b"").partition(b" ")
        right = [hmac.compare_digest(given, key) for key in self.client_keys]
        if any(right) and scheme.lower() == b"bearer":
            return
        target = head.target.partition(b"?")[0]
        if target in self.open_targets and (is_whole or target in ADMIN_TARGETS):
            return
        challenge = ("WWW-Authenticate", "Bearer")
        raise ProxyError(401, "A valid API key is needed", challenge)

    def too_large(self) -> ProxyError:
        return ProxyError(413, f"The body is larger than {self.max_body} bytes")

    def make_room(self) -> bool:
        """Closes an idle connection to an engine if there are as many as there can be.

        Without a descriptor for it, libuv closes whoever connects next. Returns
        whether one was closed.
        """
        proxy = self.proxy
        instances = (*proxy.prefill_cycler.instances, *proxy.decode_cycler.instances)
        to_engines = sum(each.connections + each.opening for each in instances)
        if len(self.clients) + to_engines < self.max_connections:
            return False
        idle = max((each.idle for each in instances), key=len, default={})
        if not idle:
            return False
        longest = next(iter(idle))
        del idle[longest]
        longest.transport.abort()
        return True

    def left(self, client: ClientConnection) -> None:
        """A client connection is closed."""
        self.clients.discard(client)
        if self.stopping and not self.clients and not self.empty.done():
            self.empty.set_result(None)

    async def drain(self, seconds: float) -> None:
        """Lets running answers finish, for so long at most; cuts the rest."""
        self.stopping = True
        for client in list(self.clients):
            client.stop()
        if self.clients:
            await asyncio.wait([self.empty], timeout=seconds)
        for client in list(self.clients):
            exchange = client.exchange
            if exchange is not None:
                exchange.give_up("cut")
                client.exchange = None
            if exchange is not None and not exchange.head.modern:
                client.cut(framed=False)
            else:
                client.transport.abort()

    def snapshot(self) -> Snapshot:
        """What this process has counted until now."""
        counted = self.tally.snapshot()
        running = sum(client.exchange is not None for client in self.clients)
        add_numbers(counted, "requests_in_flight", "", [running])
        add_numbers(counted, "client_connections", "", [len(self.clients)])
        listening = (sock for server in self.servers for sock in server.sockets)
        waiting = sum(tcp_info(sock, TCP_ACCEPT_QUEUE) for sock in listening)
        add_numbers(counted, "accept_queue_connections", "", [waiting])
        for cycler in (self.proxy.prefill_cycler, self.proxy.decode_cycler):
            for instance in cycler.instances:
                for name, labels, number in instance.figures():
                    add_numbers(counted, name, labels, [number])
        return counted

    def tick(self) -> None:
        """Looks at all deadlines, every TICK seconds, whatever happens in one."""
        self.loop.call_later(TICK, self.tick)
        self.tally.fold()
        now = monotonic()
        for client in list(self.clients):
            client.tick(now)
        for cycler in (self.proxy.prefill_cycler, self.proxy.decode_cycler):
            for instance in list(cycler.instances):
                instance.tick(now)


# --- Scheduling -----------------------------------------------------------------------


class SchedulingPolicy(ABC):
    """Chooses the instance for a leg."""

    # Whether `cycler.session` is to be set before each choice.
    by_session = False

    @abstractmethod
    def schedule(self, cycler: InstanceCycler) -> Instance:
        """Returns one of `cycler.instances` that is up.

        Raises:
            StopIteration: there is none, as `next(cycler)` does.

        """
        raise NotImplementedError("Scheduling Proxy is not set.")


class RoundRobinSchedulingPolicy(SchedulingPolicy):
    """One after the other."""

    def schedule(self, cycler: InstanceCycler) -> Instance:
        return next(cycler)


class LeastLoadedSchedulingPolicy(SchedulingPolicy):
    """The fewest requests in flight; among equals one after the other."""

    def schedule(self, cycler: InstanceCycler) -> Instance:
        turn = next(cycler)
        return min(cycler.up, key=lambda i: (i.in_flight, i is not turn))


class SessionSchedulingPolicy(SchedulingPolicy):
    """The same instance for the same session, as long as it is up.

    An instance that goes moves its own sessions only (rendezvous hashing).
    """

    by_session = True

    def schedule(self, cycler: InstanceCycler) -> Instance:
        turn, session = next(cycler), cycler.session
        if not session:
            return turn
        return max(cycler.up, key=lambda i: blake2b(session + i.authority).digest())


POLICIES: dict[str, type[SchedulingPolicy]] = {
    "least_loaded": LeastLoadedSchedulingPolicy,
    "round_robin": RoundRobinSchedulingPolicy,
    "session": SessionSchedulingPolicy,
}

# --- Connectors: who finds the KV, and how --------------------------------------------

# What NIXL's prefill side is asked with; the nulls are what every proxy sends.
NIXL_PREFILL = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)


class PrefillAnswer(msgspec.Struct):
    kv_transfer_params: Raw = NULL
    prompt_token_ids: Raw = NULL


class HandOver(msgspec.Struct):
    """The members of a hand-over that decide whether it can be used."""

    do_remote_prefill: Raw = NULL
    remote_block_ids: Raw = NULL
    remote_engine_id: Raw = NULL
    remote_request_id: Raw = NULL
    remote_host: Raw = NULL
    remote_port: Raw = NULL


decode_prefill_answer = msgspec.json.Decoder(PrefillAnswer).decode
decode_hand_over = msgspec.json.Decoder(HandOver).decode


def read_hand_over(given: Raw) -> HandOver:
    """What decides about P's parameters.

    Raises:
        ProxyError: they are not one JSON object.

    """
    try:
        return HandOver() if given == NULL else decode_hand_over(given)
    except BAD_JSON:
        found = split_members(bytes(given))
        known = found.keys() & set(HandOver.__struct_fields__)
        return HandOver(**{name: found[name] for name in known})


def names_any(ids: Raw) -> bool:
    """Whether block or token ids are a list of numbers, nested or not; not empty."""
    found = bytes(ids)
    return found[:1] == b"[" and found.translate(None, b"[], \t\r\n").isdigit()


def is_name(value: Raw) -> bool:
    """Whether a member is text that is not empty."""
    return bytes(value)[:1] == b'"' and value != EMPTY


# D's parameters from P's instance and P's parameters; see `Connector.decode_params`.
DecodeParams = Callable[[Instance, Raw], Raw | None]


def hand_over(make: DecodeParams, prefill: Instance, answer: bytes) -> Raw | None:
    """D's parameters by P's answer.

    Raises:
        ProxyError: 502, D must not have what P answered.

    """
    try:
        try:
            if not answer.isascii():
                answer.decode()
            given = decode_prefill_answer(answer).kv_transfer_params
        except (*BAD_JSON, UnicodeDecodeError):
            given = split_members(answer).get("kv_transfer_params", NULL)
        return make(prefill, given)
    except (ValueError, ProxyError) as err:
        raise bad_answer(prefill, f"no usable hand-over: {err}") from None


def bad_answer(prefill: Instance, what: str) -> ProxyError:
    return ProxyError(502, f"Prefill instance {prefill} answered with {what}")


class Pair(msgspec.Struct, frozen=True):
    """A pair of instances that know of each other, and what each is told."""

    prefill: Instance
    decode: Instance
    # The X-Request-Id line of both legs.
    request_id: bytes
    prefill_params: Raw
    # The legs run side by side, unless these are made of what P answers.
    decode_params: Raw | DecodeParams
    # Further header lines.
    prefill_fields: bytes = b""
    decode_fields: bytes = b""


class Connector:
    """How the KV cache gets from prefill to decode.

    One of two kinds: where `pairs` is False, `prefill_params` are P's, and
    `decode_params` makes those of whatever D is chosen; where it is True, `pair`
    says everything about two instances that know of each other.
    """

    pairs = False
    # Whether the legs find each other by their X-Request-Id.
    by_request_id = False
    # Whether P hands over only what ends by length: D would wait for the rest.
    by_length = False

    def prefill_params(self) -> Raw:
        """`kv_transfer_params` of the P leg."""
        raise NotImplementedError

    def decode_params(self, prefill: Instance, given: Raw) -> Raw | None:
        """`kv_transfer_params` of the D leg from those in P's answer; None for none.

        Raises:
            ValueError: they would harm the decode engine: a 502, D is not asked.

        """
        raise NotImplementedError

    def pair(self, prefill: Instance, decode: Instance) -> Pair:
        """What the legs of a pair are told."""
        raise NotImplementedError

    def adopt(self, instance: Instance, settings: Mapping[str, object]) -> None:
        """Takes in what the operator says of a prefill instance.

        Raises:
            ValueError: something is missing or malformed.

        """

    def learn(
        self, script: Script, instance: Instance
    ) -> Generator[None, None, str | None]:
        """Asks a prefill instance, with each probe; returns what is wrong, if any."""
        yield from ()
        return None


class AutoConnector(Connector):
    """NIXL's pull mode, and connectors that find KV by content.

    The latter ignore the parameters and answer none. Source: vLLM 0.33.0,
    `nixl/pull_scheduler.py`, `request_finished`.
    """

    def prefill_params(self) -> Raw:
        return NIXL_PREFILL

    def decode_params(self, prefill: Instance, given: Raw) -> Raw | None:
        found = read_hand_over(given)
        if found.do_remote_prefill != TRUE:
            return None
        if not names_any(found.remote_block_ids):
            raise ValueError("no block ids")
        named = is_name(found.remote_engine_id) and is_name(found.remote_request_id)
        if not named or not bytes(found.remote_port).strip(b'"').isdigit():
            raise ValueError("a coordinate is missing")
        host = decode_any(found.remote_host) or ""
        if not isinstance(host, str):
            raise ValueError("a malformed remote_host")
        if not is_local(host) or (host and prefill.is_local):
            return given
        fields = split_members(bytes(given))
        fields["remote_host"] = Raw(encode_json(prefill.host))
        return Raw(encode_json(fields))


def request_id_line(name: str) -> bytes:
    return b"X-Request-Id: %s\r\n" % name.encode()


def setting(settings: Mapping[str, object], name: str, kind: type, default: Any) -> Any:
    """A setting of the right type; raises ValueError."""
    value = settings.get(name, default)
    if not isinstance(value, kind) or isinstance(value, bool) or value in ("", 0):
        raise ValueError(f"{name} of a prefill instance is missing or malformed")
    return value


class NixlPushConnector(Connector):
    """NIXL's push mode: P writes into D's blocks, so both work at once.

    D is told which engine will write; the legs find each other by their
    X-Request-Id. Source: vLLM 0.33.0, `nixl/push_scheduler.py`.
    """

    pairs = True
    by_request_id = True

    def adopt(self, instance: Instance, settings: Mapping[str, object]) -> None:
        # D's parameters, but for the request's id.
        instance.facts = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": setting(settings, "engine_id", str, ""),
            "remote_host": setting(settings, "kv_host", str, ""),
            "remote_port": setting(settings, "side_channel_port", int, 5600),
            "tp_size": setting(settings, "tp_size", int, 1),
            "pp_size": setting(settings, "pp_size", int, 1),
        }

    def pair(self, prefill: Instance, decode: Instance) -> Pair:
        name = random.randbytes(16).hex()
        params = {**prefill.facts, "remote_request_id": name}
        return Pair(
            prefill,
            decode,
            request_id_line(name),
            prefill_params=NIXL_PREFILL,
            decode_params=Raw(encode_json(params)),
        )


class MooncakeRank(msgspec.Struct):
    engine_id: str


decode_mooncake = msgspec.json.Decoder(dict[int, MooncakeRank], strict=False).decode


class MooncakeConnector(Connector):
    """Mooncake: D reads from a DP rank of P, known by its engine id.

    The ids are had from P's bootstrap server, and change when P restarts.
    Source: vLLM 0.33.0, `mooncake/mooncake_connector.py` and `mooncake_utils.py`.
    """

    pairs = True
    by_length = True

    def adopt(self, instance: Instance, settings: Mapping[str, object]) -> None:
        port = setting(settings, "bootstrap_port", int, 8998)
        address = f"{instance.address.rpartition(':')[0]}:{port}"
        parse_address(address)
        instance.facts = {"bootstrap": address}

    def learn(
        self, script: Script, instance: Instance
    ) -> Generator[None, None, str | None]:
        bootstrap = Instance(instance.facts["bootstrap"], InstanceCycler("bootstrap"))
        leg = yield from fetch(script, bootstrap, b"/query", b"")
        if leg.failure is not None:
            return f"bootstrap server {bootstrap} {leg.failure.words}"
        try:
            ranks = decode_mooncake(leg.body())
        except BAD_JSON:
            return f"bootstrap server {bootstrap}: no list of DP ranks"
        # DP ranks and their engine ids; new ones after a restart.
        instance.facts["ranks"] = sorted([n, r.engine_id] for n, r in ranks.items())
        return None if ranks else f"no DP rank has registered with {bootstrap} yet"

    def pair(self, prefill: Instance, decode: Instance) -> Pair:
        ranks = prefill.facts["ranks"]
        rank, engine = ranks[prefill.given % len(ranks)]
        number = random.randbytes(16).hex()
        transfer = f"xfer-{number}"
        p = {"do_remote_decode": True, "do_remote_prefill": False}
        d = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://{prefill.facts['bootstrap']}",
            "remote_engine_id": engine,
            "transfer_id": transfer,
        }
        return Pair(
            prefill,
            decode,
            request_id_line(number),
            prefill_params=Raw(encode_json({**p, "transfer_id": transfer})),
            decode_params=Raw(encode_json(d)),
            prefill_fields=b"X-data-parallel-rank: %d\r\n" % rank,
        )


CONNECTORS: dict[str, type[Connector]] = {
    "auto": AutoConnector,
    "mooncake": MooncakeConnector,
    "nixl-push": NixlPushConnector,
}

# --- Prefill and decode ---------------------------------------------------------------

# P's answer is read here, not by the client.
IDENTITY = b"Accept-Encoding: identity\r\n"
# Removed from the P leg: what a one-token answer cannot have, or would reject.
# The rest may shape the prompt, which has to be the same on both legs.
NOT_FOR_PREFILL = words(
    "best_of echo logprobs min_completion_tokens min_tokens prompt_logprobs stop "
    "stop_sequences stop_token_ids stream_options top_logprobs"
)
ONE_FOR_PREFILL = words("max_completion_tokens n")
ADJUSTED_FOR_PREFILL = NOT_FOR_PREFILL | ONE_FOR_PREFILL
# A completion that every engine refuses: no engine serves a model of this name.
REFUSED_BY_DECODE = {
    "model": "pd-proxy/released-hand-over",
    "prompt": "x",
    "max_tokens": 1,
}
# In the error of vLLM's parser: its type.
UNREAD = b'"Bad Request"'
# Failures after which another instance may do better.
RETRIED = (Failure.REFUSED, Failure.CONNECT_TIMEOUT, Failure.RESET)
# What has to be looked at to tell whether one hand-over can serve a request.
MAY_BYPASS = words("best_of echo n prompt_logprobs use_beam_search")
# Names a response of before, which only the engine that made it knows.
PREVIOUS = "previous_response_id"
# vLLM 0.33.0's routes that change an engine rather than use it.
ENGINE_CONTROL = words(
    "/abort_requests /collective_rpc /fault_tolerance/apply /fault_tolerance/status "
    "/finish_weight_update /inference/v1/abort_requests /init_weight_transfer_engine "
    "/is_scaling_elastic_ep /pause /release_kv_cache_memory /reset_encoder_cache "
    "/reset_mm_cache /reset_prefix_cache /resume /scale_elastic_ep /sleep "
    "/start_profile /start_weight_update /stop_profile /update_weights "
    "/v1/load_lora_adapter /v1/unload_lora_adapter /wake_up /weight_checker"
)


def completion_bypass(members: Members, chat: bool = False) -> str | None:
    """`Endpoint.bypass` of completions; raises for what vLLM would refuse on D."""
    if "stream_options" in members:
        check_stream_options(members)
    prompt = members.get("prompt")
    if prompt is not None and is_prompt_list(prompt):
        return "prompt_list"
    if MAY_BYPASS.isdisjoint(members):
        return None
    for name in ("n", "best_of"):
        if name in members and bytes(members[name]) not in (b"1", b"null"):
            return name
    if may_be_true(members.get("use_beam_search")):
        return "beam_search"
    if not is_null(members.get("prompt_logprobs")):
        return "prompt_logprobs"
    # Chat reads `top_logprobs`, 0 by default, as soon as there is `echo`.
    with_logprobs = chat or not is_null(members.get("logprobs"))
    if with_logprobs and may_be_true(members.get("echo")):
        return "echo_logprobs"
    return None


def check_stream_options(members: Members) -> None:
    """The coupling that vLLM checks; it would refuse D's leg while P's blocks wait.

    Raises:
        ProxyError: 400.

    """
    options = members.get("stream_options")
    if is_null(options) or may_be_true(members.get("stream")):
        return
    if options is not None and bytes(options) != b"{}":
        raise ProxyError(400, "Stream options can only be defined when `stream=True`.")


class Tool(msgspec.Struct):
    type: str = ""


decode_tools = msgspec.json.Decoder(list[Tool] | None).decode


def responses_bypass(members: Members) -> str | None:
    """`Endpoint.bypass` of responses: what D keeps, or does in several rounds."""
    if may_be_true(members.get("background")):
        return "background"
    if not is_null(members.get(PREVIOUS)):
        return PREVIOUS
    try:
        tools = decode_tools(members.get("tools", NULL)) or ()
    except msgspec.DecodeError:
        return "malformed_tools"
    if any(tool.type != "function" for tool in tools):
        return "built_in_tools"
    return None


def is_prompt_list(prompt: Raw) -> bool:
    """Whether a completions prompt is several prompts.

    A list of numbers is one prompt in tokens; it may have millions of them, so
    only its first item is looked at.
    """
    view = memoryview(prompt)
    if view[0] != ord("["):
        return False
    first = bytes(view[1:64]).lstrip(b" \t\r\n")[:1]
    if first in b"-0123456789":
        return False
    try:
        return len(decode_items(prompt)) != 1
    except msgspec.DecodeError:  # Half an emoji, see `split_lone_surrogates`.
        return len(json.loads(bytes(prompt))) != 1


class Endpoint(msgspec.Struct, frozen=True):
    """How an endpoint runs on two legs."""

    # Members of the P leg: one token, and nothing is kept.
    prefill: Members
    # Why one hand-over cannot serve a request; None when it can.
    bypass: Callable[[Members], str | None]
    # Whether the engine makes its own id from the X-Request-Id.
    takes_request_id: bool = True
    # Whether P can be told to go on where an answer ends.
    takes_ignore_eos: bool = True
    # Whether D gets the prompt as the tokens that P made of it.
    token_ids: bool = False


ONE_TOKEN: Members = {"stream": FALSE, "max_tokens": ONE}
ENDPOINTS = {
    "/v1/completions": Endpoint(ONE_TOKEN, completion_bypass),
    "/v1/chat/completions": Endpoint(
        ONE_TOKEN, functools.partial(completion_bypass, chat=True)
    ),
    "/v1/messages": Endpoint(ONE_TOKEN, lambda members: None, takes_ignore_eos=False),
    "/v1/responses": Endpoint(
        {"stream": FALSE, "max_output_tokens": ONE, "store": FALSE},
        responses_bypass,
        takes_request_id=False,
    ),
}
# Asks P for the tokens, so that D need not make them once more.
CHAT_IN_TOKENS = msgspec.structs.replace(
    ENDPOINTS["/v1/chat/completions"],
    prefill={**ONE_TOKEN, "return_token_ids": TRUE},
    token_ids=True,
)


def prefill_body(members: Members, own: Members, params: Raw | None) -> bytes:
    """The body of the P leg: the same prompt, one token, no stream."""
    leg = {**members, **own}
    if not ADJUSTED_FOR_PREFILL.isdisjoint(members):
        for name in NOT_FOR_PREFILL & leg.keys():
            del leg[name]
        for name in ONE_FOR_PREFILL & leg.keys():
            leg[name] = ONE
    if params is not None:
        leg["kv_transfer_params"] = params
    return encode_json(leg)


def decode_body(members: Members, params: Raw | None) -> bytes:
    """The body of the D leg: the client's, and where the KV is."""
    return encode_json(
        members if params is None else {**members, "kv_transfer_params": params}
    )


def with_token_ids(params: Raw, answer: bytes) -> Raw:
    """A hand-over with the token ids of the prompt, if P's answer has them.

    Source: vLLM 0.32.0, `chat_completion/protocol.py`, `prompt_token_ids`.
    """
    try:
        ids = decode_prefill_answer(answer).prompt_token_ids
    except BAD_JSON:
        return params
    if not names_any(ids):
        return params
    return Raw(encode_json({**split_members(bytes(params)), "prompt_token_ids": ids}))


def forces_tool(members: Members) -> bool:
    """Whether the answer has to be a tool call."""
    choice = bytes(members.get("tool_choice", NULL))
    named = choice[:1] == b"{" and b'"auto"' not in choice and b'"none"' not in choice
    return named or choice == b'"required"'


def failed(leg: Leg) -> bool:
    """Whether a settled leg is anything but a success."""
    return leg.failure is not None or leg.status != 200


def checked(leg: Leg) -> Leg:
    """A P leg that is not a success; raises ProxyError where it is not an error."""
    if leg.failure is None and leg.status < 400:
        raise bad_answer(leg.instance, f"status {leg.status}")
    return leg


class Release(Script):
    """Has a decode instance tell P that nobody will use a hand-over.

    A request that D refuses after parsing it makes D send that word, and its
    answer proves that it did; measured on vLLM 0.32.0, P's blocks are free after
    45 ms. (Closing a real request at once takes 17 ms, but goes unnoticed where
    the engine sees the end of the connection before the end of the body.)
    """

    def __init__(self, proxy: "Proxy", params: Raw, x: Exchange) -> None:
        super().__init__(x.loop)
        self.proxy = proxy
        self.fields = x.authorization
        self.body = encode_json({**REFUSED_BY_DECODE, "kv_transfer_params": params})
        self.loop.call_soon(self.run, self._steps())

    def _steps(self) -> Steps:
        for instance in list(self.proxy.decode_cycler.instances):
            request = (
                b"POST /v1/completions HTTP/1.1\r\nHost: %s\r\n%s"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            ) % (instance.authority, self.fields, len(self.body))
            leg = Leg(self, instance, request, self.body, whole=True, raw=False)
            self.legs.append(leg)
            instance.send(leg, PROBE_TIMEOUT)
            while not leg.settled:
                yield
            if leg.begun:
                return


class Response(NamedTuple):
    """An answer of a custom callable."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"


CustomAnswer = Response | AsyncIterator[bytes]
Custom = Callable[[Request], CustomAnswer | Awaitable[CustomAnswer]]


class Proxy:
    """The policy: which instances serve a request, and what they are asked.

    Args:
        prefill_instances: `host:port` of each prefill instance.
        decode_instances: the same for decode.
        model: the model id all of them serve; None: whatever they serve.
        scheduling_policy: chooses the instance for each leg.
        custom_create_completion: answers `/v1/completions` instead.
        custom_create_chat_completion: answers `/v1/chat/completions` instead.
        retries: how many more prefill instances a request may try.
        connector: how the KV gets from P to D; `AutoConnector` if None.
        allow_engine_control: whether clients reach `ENGINE_CONTROL`.
        token_handover: whether D gets a chat as tokens; not with pairs.

    Raises:
        ValueError: a malformed address.

    """

    def __init__(
        self,
        prefill_instances: list[str],
        decode_instances: list[str],
        model: str | None,
        scheduling_policy: SchedulingPolicy,
        custom_create_completion: Custom | None = None,
        custom_create_chat_completion: Custom | None = None,
        retries: int = 1,
        connector: Connector | None = None,
        allow_engine_control: bool = False,
        token_handover: bool = False,
    ) -> None:
        self.prefill_cycler = InstanceCycler("prefill")
        self.decode_cycler = InstanceCycler("decode")
        for address in prefill_instances:
            self.prefill_cycler.add(address)
        for address in decode_instances:
            self.decode_cycler.add(address)
        self.model = model
        self.scheduling_policy = scheduling_policy
        self.retries = retries
        self.custom_create_completion = custom_create_completion
        self.custom_create_chat_completion = custom_create_chat_completion
        self.connector = connector or AutoConnector()
        self.allow_engine_control = allow_engine_control
        # Requests until P and D have met in all the ways they would by themselves.
        self.left_of_round = self.rounds = 0
        # Clients ask for the same few routes again and again.
        self.route = functools.lru_cache(maxsize=256)(self.find_route)
        # Which decode instance holds a response, the latest MAX_HOLDERS ids.
        self.holders: dict[str, Instance] = {}
        # POST routes whose JSON body is checked before it is read.
        self.generate: dict[str, Handler] = {
            path: functools.partial(self.two_legs, endpoint)
            for path, endpoint in ENDPOINTS.items()
        }
        if token_handover:
            chat = "/v1/chat/completions"
            self.generate[chat] = functools.partial(self.two_legs, CHAT_IN_TOKENS)
        if custom_create_completion is not None:
            self.generate["/v1/completions"] = custom_handler(custom_create_completion)
        if custom_create_chat_completion is not None:
            handler = custom_handler(custom_create_chat_completion)
            self.generate["/v1/chat/completions"] = handler
        # Routes with a key of their own.
        self.admin_handlers: tuple[Handler, ...] = (
            self.add_instance,
            self.remove_instance,
        )
        self.routes: dict[str, dict[bytes, Handler]] = {
            "/health": {b"GET": self.health},
            "/metrics": {b"GET": self.metrics},
            "/status": {b"GET": self.status},
            "/instances/add": {b"POST": self.add_instance},
            "/instances/remove": {b"POST": self.remove_instance},
            **{path: {b"POST": handler} for path, handler in self.generate.items()},
        }

    @property
    def prefill_instances(self) -> list[Instance]:
        return self.prefill_cycler.instances

    @property
    def decode_instances(self) -> list[Instance]:
        return self.decode_cycler.instances

    def find_route(self, method: bytes, target: bytes, media_type: bytes) -> Handler:
        """Finds the handler of a request.

        Raises:
            ProxyError: 400, 403, 405 or 415.

        """
        path = check_path(target)
        methods = self.routes.get(path)
        if methods is None:
            if path.rstrip("/") in ENGINE_CONTROL and not self.allow_engine_control:
                raise ProxyError(403, "Engine control is not open to clients")
            if path.startswith("/v1/responses/"):
                return functools.partial(self.one_response, path.split("/")[3])
            return self.one_leg
        if method == b"HEAD":
            method = b"GET"
        if method not in methods:
            allow = ", ".join(name.decode() for name in methods)
            raise ProxyError(405, "Method Not Allowed", ("Allow", allow))
        if path in self.generate and not is_json(media_type):
            raise ProxyError(415, "Only 'application/json' is allowed")
        return methods[method]

    # Choosing instances.

    def pick(
        self, x: Exchange, cycler: InstanceCycler, avoid: list[Instance]
    ) -> Instance | None:
        """The policy's choice among the instances that are up and not in `avoid`."""
        policy = self.scheduling_policy
        if policy.by_session:
            cycler.session = x.session()
        try:
            choice = policy.schedule(cycler)
            if choice not in avoid:
                return choice
            for _ in cycler.up:
                choice = policy.schedule(cycler)
                if choice not in avoid:
                    return choice
        except StopIteration:
            return None
        return next((i for i in cycler.up if i not in avoid), None)

    def pair_off(self) -> None:
        """Shifts D's rotation once P and D have met in all the ways they would."""
        if self.left_of_round == 0:
            ups = len(self.prefill_cycler.up), len(self.decode_cycler.up)
            self.left_of_round = math.lcm(*ups) or 1
            self.decode_cycler.turn += self.rounds > 0
            self.rounds += 1
        self.left_of_round -= 1

    # Two legs.

    def two_legs(self, endpoint: Endpoint, x: Exchange) -> Steps:
        """Prefill on one instance, decode on another."""
        members = x.members()
        reason = endpoint.bypass(members)
        if not endpoint.takes_request_id:
            x.on_start = self.note_holder
            if self.connector.by_request_id:
                reason = reason or "request_id"
        if self.connector.by_length and not endpoint.takes_ignore_eos:
            reason = "ignore_eos"
        if reason:
            x.mode = BYPASS
            x.client.service.tally.bypassed[reason] += 1
        else:
            x.mode = TWO_LEGS
        if reason == PREVIOUS:
            body = decode_body(members, None)
            response_id = bytes(members[PREVIOUS]).strip(b'"').decode()
            return self.held(x, body, response_id)
        if reason:
            return self.serial(x, members, None)
        if self.connector.pairs:
            return self.paired(x, members, endpoint)
        return self.serial(x, members, endpoint)

    def serial(self, x: Exchange, members: Members, two: Endpoint | None) -> Steps:
        """P's hand-over goes to D, under the rules of failure; or D serves alone.

        Before the client has seen a byte, a decode instance that failed gets
        replaced once: with a fresh hand-over, because a hand-over is delivered
        only once, and by another decode instance, or by the same one when the
        prefill instance may have been at fault.
        """
        prefill: Instance | None = None
        params: Raw | None = None
        avoid: list[Instance] = []
        again, other_p = self.retries > 0, False
        if not self.decode_cycler.up:
            raise no_instance("decode")  # Before P works for nothing.
        while True:
            if two is not None:
                body = prefill_body(
                    members, two.prefill, self.connector.prefill_params()
                )
                answer = yield from self.prefill(x, members, body, prefill, other_p)
                if answer is None:
                    return
                prefill = answer.instance
                if answer.status == 200:
                    said = answer.body()
                    params = hand_over(self.connector.decode_params, prefill, said)
                    if two.token_ids and params is not None:
                        params = with_token_ids(params, said)
                self.pair_off()
            body = decode_body(members, params)
            leg = yield from self.decode(x, body, avoid, params)
            if params is not None and leg.status == 400:
                x.on_start = functools.partial(self.release_unread, x, params)
            if not (again and self.worth_another(leg, prefill)):
                break
            x.client.service.tally.again(leg)
            again, params = False, None
            others = [i for i in self.decode_cycler.up if i is not leg.instance]
            avoid, other_p = ([leg.instance], False) if others else ([], True)
            leg.close()
        self.give(x, leg)

    def worth_another(self, leg: Leg, prefill: Instance | None) -> bool:
        """Whether a failed D leg is worth a second try of the whole request."""
        if leg.failure is not None and leg.failure is not Failure.RESET:
            return False
        if leg.failure is None and leg.status < 500:
            return False
        if any(i is not leg.instance for i in self.decode_cycler.up):
            return True
        other_prefill = any(i is not prefill for i in self.prefill_cycler.up)
        return leg.failure is None and prefill is not None and other_prefill

    def give(self, x: Exchange, leg: Leg) -> None:
        """Gives the client what a leg brought."""
        if leg.failure is not None:
            raise unreachable(leg)
        x.relay(leg)

    def prefill(
        self,
        x: Exchange,
        members: Members,
        body: bytes,
        used: Instance | None,
        other: bool,
    ) -> Generator[None, None, Leg | None]:
        """The P leg, on another instance than `used` if there is one, or must be.

        Returns the leg with a 200, or with the 5xx of an old engine that cannot
        prefill a forced tool call; None when the client has its answer.
        """
        tried: list[Instance] = []
        refused: Leg | None = None
        leg: Leg | None = None
        while len(tried) <= self.retries:
            avoid = [*tried, used] if used else tried
            instance = self.pick(x, self.prefill_cycler, avoid)
            if instance is None and used and not other and used not in tried:
                instance = self.pick(x, self.prefill_cycler, tried)
            if instance is None:
                break
            if leg is not None:
                x.client.service.tally.again(leg)
            leg = x.post(instance, body, x.request_id + IDENTITY, whole=True)
            while not leg.settled:
                yield
            if leg.failure is None:
                if leg.status == 200 or (leg.status >= 500 and forces_tool(members)):
                    if refused is not None:
                        refused.close()
                    return leg
                refused = checked(leg)
                if leg.status < 500:
                    break
                leg.pause()
            elif leg.failure not in RETRIED:
                break
            tried.append(instance)
        if refused is not None:
            x.relay(refused)
            return None
        raise unreachable(leg) if leg else no_instance("prefill")

    def decode(
        self,
        x: Exchange,
        body: bytes,
        avoid: list[Instance],
        params: Raw | None = None,
    ) -> Generator[None, None, Leg]:
        """The D leg, settled; instances that cannot be reached are passed over.

        A hand-over (`params`) that does not get there is released.
        """
        leg: Leg | None = None
        extra = x.request_id + x.head.accepted
        try:
            while instance := self.pick(x, self.decode_cycler, avoid):
                if leg is not None:
                    x.client.service.tally.again(leg)
                leg = x.post(instance, body, extra)
                while not leg.settled:
                    yield
                if leg.failure is None or leg.failure.delivered:
                    return leg
                avoid = [*avoid, instance]
            raise unreachable(leg) if leg else no_instance("decode")
        finally:
            if params is not None and (leg is None or not leg.begun):
                Release(self, params, x)

    def release_unread(
        self, x: Exchange, params: Raw, instance: Instance, start: bytes
    ) -> None:
        """Releases a hand-over that D has refused unread, by its error's first bytes.

        D itself tells P of what it refuses after parsing the body, with errors of
        other types. Source: vLLM 0.32.0, `_with_kv_transfer_rejection_cleanup` and
        `validation_exception_handler`.
        """
        if UNREAD in start:
            Release(self, params, x)

    # Pairs.

    def paired(self, x: Exchange, members: Members, endpoint: Endpoint) -> Steps:
        """Both legs name each other, so a retry is a whole new pair.

        An instance that failed is not tried again; the other leg of its pair is
        closed at once.
        """
        avoid: list[Instance] = []
        leg: Leg | None = None
        for _ in range(1 + self.retries):
            pair = self.choose(x, avoid)
            if pair is None:
                break
            if leg is not None:
                x.client.service.tally.again(leg)
                leg.close()
            leg = yield from self.run_pair(x, members, endpoint, pair)
            if leg.failure not in RETRIED and leg.status < 500:
                break
            avoid.append(leg.instance)
            pair.prefill.suspect()
        if leg is None:
            raise no_instance("decode" if self.prefill_cycler.up else "prefill")
        self.give(x, leg)

    def choose(self, x: Exchange, avoid: list[Instance]) -> Pair | None:
        """The next pair without the instances in `avoid`; None if there is none."""
        prefill = self.pick(x, self.prefill_cycler, avoid)
        decode = self.pick(x, self.decode_cycler, avoid)
        if prefill is None or decode is None:
            return None
        self.pair_off()
        return self.connector.pair(prefill, decode)

    def run_pair(
        self, x: Exchange, members: Members, endpoint: Endpoint, pair: Pair
    ) -> Generator[None, None, Leg]:
        """Runs both legs until it is known which of them answers the client.

        That is the first that fails, else D; the other one is closed. D's head
        may come before the KV, so nothing is given to the client before P has
        succeeded and D has begun its body: until then the pair can be replaced.
        """
        own = endpoint.prefill
        if self.connector.by_length:
            own = {**own, "ignore_eos": TRUE}
        body = prefill_body(members, own, pair.prefill_params)
        x.request_id = pair.request_id
        fields = pair.request_id + pair.prefill_fields + IDENTITY
        p = x.post(pair.prefill, body, fields, whole=True)
        params: Raw | None
        if isinstance(pair.decode_params, Raw):
            params = pair.decode_params
        else:
            while not p.settled:
                yield
            if failed(p):
                return checked(p)
            params = hand_over(pair.decode_params, pair.prefill, p.body())
        fields = pair.request_id + pair.decode_fields + x.head.accepted
        d = x.post(pair.decode, decode_body(members, params), fields)
        d.late = True
        # D waits for KV that is gone if P dies now, be it after its own answer.
        needed = pair.prefill.needed
        needed.add(p)
        try:
            while True:
                if d.settled and failed(d):
                    p.close()
                    return d
                if p.settled and failed(p):
                    d.close()
                    return checked(p)
                if d.settled:
                    if p.settled:
                        return d
                    d.pause()  # Nobody takes its bytes yet.
                yield
        finally:
            needed.discard(p)

    # One leg.

    def one_leg(self, x: Exchange) -> Steps:
        """Any other path: to a decode instance as it is."""
        x.mode = ONE_LEG
        leg = yield from self.decode(x, forwarded_body(x), [])
        self.give(x, leg)

    # Responses, which stay with the decode instance that made them.

    def note_holder(self, instance: Instance, start: bytes) -> None:
        """Remembers who made a response, from the first bytes of the answer."""
        _, found, rest = start[:MAX_RESPONSE_ID_OFFSET].partition(b'"id":"')
        response_id, ends, _ = rest.partition(b'"')
        if found and ends:
            self.holders[response_id.decode(errors="replace")] = instance
            if len(self.holders) > MAX_HOLDERS:
                del self.holders[next(iter(self.holders))]

    def one_response(self, response_id: str, x: Exchange) -> Steps:
        """Retrieves or cancels a response, or whatever its engine offers."""
        x.mode = ONE_LEG
        return self.held(x, forwarded_body(x), response_id)

    def held(self, x: Exchange, body: bytes, response_id: str) -> Steps:
        """To the decode instance that holds a response.

        Where that is not known (another proxy was told, or this one before it was
        started again) the instances are asked one after the other.
        """
        holder = self.holders.get(response_id)
        instances = self.decode_cycler.instances
        known = holder in instances
        avoid = [i for i in instances if known and i is not holder]
        while True:
            leg = yield from self.decode(x, body, avoid)
            avoid = [*avoid, leg.instance]
            others = any(i not in avoid for i in self.decode_cycler.up)
            if leg.failure is not None or leg.status != 404 or not others:
                break
            leg.close()
        self.give(x, leg)

    # The proxy's own routes.

    def health(self, x: Exchange) -> None:
        for cycler in (self.prefill_cycler, self.decode_cycler):
            if not cycler.up:
                raise no_instance(cycler.role)
        x.answer(200, b"ok", "text/plain")

    def status(self, x: Exchange) -> None:
        x.answer(200, encode_json(status_report(self.described())))

    def described(self) -> list[dict[str, Any]]:
        """All instances as `/status` shows them."""
        instances = (*self.prefill_cycler.instances, *self.decode_cycler.instances)
        return [self.describe(instance) for instance in instances]

    def metrics(self, x: Exchange) -> None:
        x.answer(200, *render(x.client.service.snapshot()))

    def describe(self, instance: Instance) -> dict[str, object]:
        """An instance as `/status` shows it."""
        return {
            "instance": instance.address,
            "role": instance.cycler.role,
            "state": instance.state,
            "reason": instance.reason,
            "since": round(instance.since, 3),
            "in_flight": instance.in_flight,
            "failures": instance.failures,
        }

    def add_instance(self, x: Exchange) -> Steps:
        """Upstream's `POST /instances/add`, with its statuses and bodies."""
        cycler, address, order = self.admin_request(x)
        named = Instance(address, cycler).address
        instance = cycler.find(named) or Instance(address, cycler)
        key = x.client.service.engine_key
        problem = (yield from check_instance(x, instance, self.model, key)).problem
        if problem is None and instance.state is State.UP:
            raise AdminError(400, "Instance already exists.")
        if problem is None and cycler is self.prefill_cycler:
            try:
                self.connector.adopt(instance, order)
            except ValueError as err:
                raise AdminError(400, str(err)) from None
            problem = yield from self.connector.learn(x, instance)
        if problem is not None:
            logger.warning("not added: %s: %s", instance, problem)
            raise AdminError(400, "Instance validation failed.")
        known = cycler.find(named)
        if known is not None and (known is not instance or known.state is State.UP):
            raise AdminError(400, "Instance already exists.")
        if known is None:
            cycler.instances.append(instance)
            self.watch(instance, key)
        instance.mark(State.UP)
        message = f"Added {address} to {cycler.role}_instances."
        x.answer(200, encode_json({"message": message}))

    def watch(self, instance: Instance, key: bytes) -> Watch:
        """Has an instance probed from now on."""
        prefill = instance.cycler is self.prefill_cycler
        learn = self.connector.learn if prefill else None
        return Watch(instance, self.model, key, learn)

    def remove_instance(self, x: Exchange) -> None:
        """`POST /instances/remove`: no new requests, running ones finish."""
        cycler, address, _ = self.admin_request(x)
        instance = cycler.find(Instance(address, cycler).address)
        if instance is None:
            raise AdminError(400, "Instance does not exist.")
        instance.mark(State.DRAINING, "removed")
        message = f"Removing {address} from {cycler.role}_instances."
        x.answer(200, encode_json({"message": message}))

    def hear(self, key: str, record: Any, engine_key: bytes) -> None:
        """Takes over what another worker says of an instance; see `Worker`."""
        role, _, address = key.partition(" ")
        is_prefill = role == self.prefill_cycler.role
        cycler = self.prefill_cycler if is_prefill else self.decode_cycler
        instance = cycler.find(address)
        if record is not None:
            state, reason, since, facts = record
            instance = instance or cycler.add(address)
            instance.facts = dict(facts)
            instance.take(State(state), reason, since)
            if instance.watch is None:
                self.watch(instance, engine_key)
        elif instance is not None:
            instance.take(State.DRAINING, "removed", time.time())

    def admin_request(
        self, x: Exchange
    ) -> tuple[InstanceCycler, str, dict[str, object]]:
        """Checks key and body of an admin route; returns role, address and body."""
        check_admin_key(x.head)
        try:
            order = msgspec.json.decode(x.body)
        except BAD_JSON as err:
            raise AdminError(400, f"Malformed JSON: {err}") from None
        if not isinstance(order, dict):
            raise AdminError(400, "The body must be one JSON object.")
        cyclers = {"prefill": self.prefill_cycler, "decode": self.decode_cycler}
        kind, address = order.get("type"), order.get("instance")
        if not isinstance(kind, str) or kind not in cyclers:
            raise AdminError(400, "Invalid instance type.")
        if not isinstance(address, str) or ":" not in address:
            raise AdminError(400, "Invalid instance format.")
        try:
            parse_address(address)
        except ValueError:
            raise AdminError(400, "Invalid instance address.") from None
        return cyclers[kind], address, order


def status_report(instances: list[dict[str, Any]]) -> dict[str, object]:
    """The answer of `/status`, in upstream's shape and with more."""
    nodes: dict[str, list[str]] = {"prefill": [], "decode": []}
    for instance in instances:
        nodes[instance["role"]].append(instance["instance"])
    return {
        "prefill_node_count": len(nodes["prefill"]),
        "decode_node_count": len(nodes["decode"]),
        "prefill_nodes": nodes["prefill"],
        "decode_nodes": nodes["decode"],
        "instances": instances,
    }


def forwarded_body(x: Exchange) -> bytes:
    """A body for one leg: as it is, but for the parameters only the proxy sets.

    Raises:
        ProxyError: 400, it is neither JSON nor a multipart form: an engine might
            read parameters in it that were not seen here.

    """
    if not x.body or x.body[:2] == b"--" and is_multipart(x.head):
        return x.body
    if x.body.lstrip(b" \t\r\n")[:1] != b"{":
        decode_or_refuse(x.body)
        return x.body
    members = split_members(x.body)
    if not members.keys() & {"kv_transfer_params", "ec_transfer_params"}:
        return x.body
    return encode_json(x.members())


def is_multipart(head: RequestHead) -> bool:
    return head.owned.get(b"content-type", b"").lower().startswith(b"multipart/")


def decode_or_refuse(body: bytes) -> None:
    try:
        decode_any(body)
    except BAD_JSON as err:
        raise ProxyError(400, f"The body is not valid JSON: {err}") from None


def custom_handler(custom: Custom) -> Handler:
    """A handler that has a custom callable answer."""

    async def run(x: Exchange) -> None:
        given = custom(Request(x))
        answer = await given if inspect.isawaitable(given) else given
        if isinstance(answer, Response):
            x.answer(answer.status, answer.body, answer.content_type)
            return
        await stream(x, answer)

    def handle(x: Exchange) -> Steps:
        task = x.loop.create_task(run(x))
        task.add_done_callback(lambda _: x.resume())
        try:
            while not task.done():
                yield
        finally:
            task.cancel()
        task.result()

    return handle


async def stream(x: Exchange, pieces: AsyncIterator[bytes]) -> None:
    """Sends an iterator's bytes as they come, no faster than the client reads.

    What goes wrong before the first piece can still be told by a status.
    """
    piece = encode_piece(x, await anext(aiter(pieces), b""))
    x.answer_stream("text/event-stream; charset=utf-8")
    x.write(piece)
    async for following in pieces:
        x.write(encode_piece(x, following))
        await x.drain()
    if x.head.modern:
        x.write(LAST_CHUNK)


def encode_piece(x: Exchange, piece: bytes) -> bytes:
    """A piece of a stream in the client's framing."""
    return encode_chunk(bytes(memoryview(piece))) if x.head.modern else piece


# --- Workers: several processes, one port, one view -----------------------------------

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
HANDLED_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD)


def stopper(stop: asyncio.Future[None], seconds: float) -> Callable[[], None]:
    """A signal handler: the first signal ends in order, the second at once."""

    def handle() -> None:
        if stop.done():
            os._exit(1)
        logger.info("stopping: running answers may take %g s", seconds)
        stop.set_result(None)

    return handle


class Link(asyncio.Protocol):
    """One end of a socket pair: messages in JSON, one a line.

    A worker tells the supervisor what to put on the board ("set"), what it wants to
    know of all ("ask"), what it knows itself ("answer"), that it serves ("ready") and
    that it lives ("pong"). It is told what others have set, asked and answered, to say
    whether it lives ("ping"), and to "stop".
    """

    transport: asyncio.Transport

    def __init__(
        self, hear: Callable[[list[Any]], None], lost: Callable[[], None]
    ) -> None:
        self.hear = hear
        self.lost = lost
        self.partial = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            self.hear(decode_any(line))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost()

    def tell(self, *message: object) -> None:
        """Sends a message."""
        self.transport.write(encode_json(message) + b"\n")


class Slot:
    """The place of one worker: what it listens on outlives its process."""

    # To its present process, if there is one: `pid` is not 0.
    link: Link

    def __init__(self, index: int) -> None:
        self.index = index
        self.pid = 0
        # When its last process was made, and whether that has come to serve.
        self.started = 0.0
        self.serves = False
        # Words to it since it was last heard.
        self.unanswered = 0
        self.listening: list[socket.socket] = []
        # The supervisor's end of its link.
        self.channel: list[socket.socket] = []
        # What its process had counted when all were asked last.
        self.counted: Snapshot = {}


class Worker:
    """One of several processes that serve a port, and what ties it to the others.

    The board is what all know: by role and address of an instance its state,
    reason, time and facts, and what another kind of proxy adds. Who sees a change
    tells the supervisor, which passes it on to all, the sender too, in one order.
    So everywhere the last word counts; and as each worker goes on probing, a wrong
    one counts for one probe interval. Nothing is told per request.

    Args:
        slot: its place.
        first: whether no worker has served yet.
        board: what was known when this process was made.
        channel: leads to the supervisor.

    """

    def __init__(
        self, slot: Slot, first: bool, board: dict[str, Any], channel: socket.socket
    ) -> None:
        self.index = slot.index
        self.listening = slot.listening
        self.first = first
        self.board = board
        self.channel = channel
        # Who has asked, and the answers by the numbers of the workers.
        self.questions: dict[int, tuple[Exchange, dict[int, Any]]] = {}

    async def join(self, service: Service, stop: asyncio.Future[None]) -> None:
        """Takes over the board; from now on it hears and is heard."""
        self.service = service
        self.stop = stop
        _, self.link = await service.loop.create_unix_connection(
            lambda: Link(self.hear, lambda: os._exit(1)), sock=self.channel
        )
        proxy = service.proxy
        proxy.routes["/status"] = {b"GET": self.status}
        proxy.routes["/metrics"] = {b"GET": self.metrics}
        for cycler in (proxy.prefill_cycler, proxy.decode_cycler):
            cycler.turn = self.index
            cycler.marked = self.publish
            for instance in list(cycler.instances):
                if not self.first and f"{cycler.role} {instance}" not in self.board:
                    cycler.forget(instance)
        for key, value in list(self.board.items()):
            self.hear(["set", key, value])

    def publish(self, instance: Instance) -> None:
        """Tells the others of a verdict, where it is a change."""
        key = f"{instance.cycler.role} {instance}"
        told = self.board.get(key)
        if instance.state is State.DRAINING:
            self.say(key, None)
        elif told is None or (told[0], told[3]) != (instance.state, instance.facts):
            state, reason, since = instance.state, instance.reason, instance.since
            self.say(key, [state, reason, since, dict(instance.facts)])

    def say(self, key: str, value: Any) -> None:
        """Puts something up for all workers; None takes it off."""
        if self.board.get(key) != value:
            put_up(self.board, key, value)
            self.link.tell("set", key, value)

    def hear(self, message: list[Any]) -> None:
        """Called with what the supervisor passes on."""
        try:
            match message:
                case ["set", key, value]:
                    put_up(self.board, key, value)
                    self.service.proxy.hear(key, value, self.service.engine_key)
                case ["ask", subject, *question]:
                    self.link.tell("answer", subject, self.answer(subject), *question)
                case ["answer", number, answer, asked, index]:
                    self.note(number, answer, asked, index)
                case ["ping"]:
                    self.link.tell("pong")
                case ["stop"]:
                    self.stop.set_result(None)
        except Exception as err:
            logger.error("internal error", exc_info=err)

    def answer(self, subject: str) -> Any:
        """What this worker says of itself."""
        if subject == "status":
            return self.service.proxy.described()
        return self.service.snapshot()

    def note(self, number: int, answer: Any, asked: int, index: int) -> None:
        """Takes an answer; the last of those who were asked ends the wait."""
        if number in self.questions:
            x, answers = self.questions[number]
            answers[index] = answer
            if len(answers) == asked:
                x.resume()

    def ask(self, x: Exchange, subject: str) -> Generator[None, None, list[Any]]:
        """What all workers say, in the order of their numbers."""
        number = random.getrandbits(48)
        _, answers = self.questions[number] = (x, {})
        self.link.tell("ask", subject, number)
        timer = x.loop.call_later(ASK_TIMEOUT, x.resume)
        try:
            yield
        finally:
            timer.cancel()
            del self.questions[number]
        return [answer for _, answer in sorted(answers.items())]

    def status(self, x: Exchange) -> Steps:
        """`/status`, the same whichever worker answers."""
        described = yield from self.ask(x, "status")
        x.answer(200, encode_json(status_report(merged(described))))

    def metrics(self, x: Exchange) -> Steps:
        """`/metrics`, the sum of all workers."""
        snapshots = yield from self.ask(x, "metrics")
        x.answer(200, *render(add_up(snapshots)))


def put_up(board: dict[str, Any], key: str, value: Any) -> None:
    """Sets what a board says; None takes it off."""
    if value is None:
        board.pop(key, None)
    else:
        board[key] = value


def merged(described: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Instances as the first worker sees them, with the counts of all."""
    instances: dict[tuple[str, str, bool], dict[str, Any]] = {}
    for one in (one for worker in described for one in worker):
        key = one["role"], one["instance"], one["state"] == State.DRAINING
        known = instances.setdefault(key, one)
        if known is not one:
            known["in_flight"] += one["in_flight"]
            known["failures"] = Counter(known["failures"]) + Counter(one["failures"])
    return list(instances.values())


class Supervisor:
    """Runs the workers of a server, in a process that itself serves nobody.

    It forks, so that policies and callables of the Python API need not be sent
    anywhere, and only while its event loop stands still. It keeps the listening
    sockets: who waits for a worker that dies is served by its successor. A worker
    that dies before it serves loses them, so that nobody waits for what may never
    come.

    Args:
        server: what each worker runs.
        count: how many.

    Raises:
        SystemExit: the port is taken.

    """

    def __init__(self, server: "Server", count: int) -> None:
        self.server = server
        self.loop = asyncio.SelectorEventLoop()
        self.stop = self.loop.create_future()
        self.stop.add_done_callback(self.end)
        self.board: dict[str, Any] = {}
        # Bound without SO_REUSEPORT, which fails where anybody listens; then these
        # suffer none but workers beside them: a second copy is refused (B48).
        self.keeper = asyncio.run(bind(server, reuse_port=False))
        for sock in self.keeper:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.port = self.keeper[0].getsockname()[1]
        self.slots = [Slot(index) for index in range(count)]
        # Those that have never served.
        self.missing = set(self.slots)
        # What workers that have ended are known to have counted: a sum that fell
        # would be taken for a new start, and counted twice.
        self.left: Snapshot = {}
        # Whose turn it is to start; None to look whether all is over.
        self.turns: asyncio.Queue[Slot | None] = asyncio.Queue()

    def run(self) -> None:
        """Returns when all have ended, after SIGTERM or SIGINT.

        Raises:
            SystemExit: the first worker, which looks at the instances, has ended.

        """
        handler = stopper(self.stop, self.server.args.drain_timeout)
        for number in STOP_SIGNALS:
            self.loop.add_signal_handler(number, handler)
        self.loop.add_signal_handler(signal.SIGCHLD, self.reap)
        self.loop.call_later(PING_INTERVAL, self.ping)
        self.turns.put_nowait(self.slots[0])
        while not self.stop.done() or any(slot.pid for slot in self.slots):
            slot = self.loop.run_until_complete(self.turns.get())
            if slot is None or self.stop.done():
                continue
            try:
                self.start(slot)
            except (OSError, SystemExit) as err:
                if self.slots[0] in self.missing:
                    raise
                logger.error("worker %d cannot be made: %s", slot.index, err)
                self.start_later(slot)
        self.loop.close()
        self.stop.result()

    def start(self, slot: Slot) -> None:
        """Makes the process of a worker."""
        slot.started, slot.serves, slot.unanswered = self.loop.time(), False, 0
        slot.listening = slot.listening or asyncio.run(bind(self.server, True))
        ours, theirs = socket.socketpair()
        link = Link(functools.partial(self.hear, slot), lambda: None)
        connecting = self.loop.create_unix_connection(lambda: link, sock=ours)
        self.loop.run_until_complete(connecting)
        slot.link, slot.channel = link, [ours]
        # No signal may find the new process with what belongs to this one.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        try:
            slot.pid = os.fork()
            if slot.pid == 0:
                self.work(slot, theirs)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
            theirs.close()
            if slot.pid == 0:
                link.transport.abort()

    def work(self, slot: Slot, channel: socket.socket) -> NoReturn:
        """Serves as a worker, in the new process, which stops at a word only."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
            close_all(self.keeper)
            for each in self.slots:
                close_all(each.channel)
                close_all(each.listening if each is not slot else ())
            first = self.slots[0] in self.missing
            worker = Worker(slot, first, self.board, channel)
            uvloop.run(self.server.serve(worker))
            status = 0
        except SystemExit as err:
            print(err, file=sys.stderr)
        except BaseException as err:
            logger.critical("worker %d failed", slot.index, exc_info=err)
        finally:
            sys.stdout.flush()
            os._exit(status)

    def ping(self) -> None:
        """Has the workers say that they live, and ends those that do not."""
        self.loop.call_later(PING_INTERVAL, self.ping)
        for slot in self.slots:
            if slot.pid and slot.serves:
                if slot.unanswered >= MAX_UNANSWERED:
                    logger.error("worker %d hangs", slot.index)
                    os.kill(slot.pid, signal.SIGKILL)
                slot.unanswered += 1
                slot.link.tell("ping")

    def reap(self) -> None:
        """Looks which workers have ended."""
        for slot in self.slots:
            if slot.pid:
                pid, status = os.waitpid(slot.pid, os.WNOHANG)
                if pid:
                    self.ended(slot, os.waitstatus_to_exitcode(status))

    def ended(self, slot: Slot, status: int) -> None:
        """A worker has ended: another takes its place, but not at the start."""
        slot.link.transport.abort()
        slot.pid = 0
        counters = (family.name for family in FAMILIES if family.kind != "gauge")
        counted = {name: slot.counted.get(name, {}) for name in counters}
        self.left, slot.counted = add_up((self.left, counted)), {}
        if not slot.serves:
            close_all(slot.listening)
            slot.listening = []
        if self.stop.done():
            self.turns.put_nowait(None)
        elif self.slots[0] in self.missing:
            self.stop.set_exception(SystemExit(1))
        else:
            logger.error("worker %d has ended with status %d", slot.index, status)
            self.start_later(slot)

    def start_later(self, slot: Slot) -> None:
        """Has a worker started as soon as it may be."""
        due = slot.started + RESTART_INTERVAL
        self.loop.call_at(due, self.turns.put_nowait, slot)

    def hear(self, slot: Slot, message: list[Any]) -> None:
        """Called with what a worker says."""
        slot.unanswered = 0
        match message:
            case ["set", key, value]:
                put_up(self.board, key, value)
                self.tell_all(*message)
            case ["ask", subject, number]:
                asked = 1 + sum(each.pid > 0 for each in self.slots)
                self.tell_all("ask", subject, number, slot.index, asked)
                left = self.left if subject == "metrics" else []
                slot.link.tell("answer", number, left, asked, len(self.slots))
            case ["answer", subject, answer, number, asker, asked]:
                if subject == "metrics":
                    slot.counted = answer
                link = self.slots[asker].link
                link.tell("answer", number, answer, asked, slot.index)
            case ["ready"]:
                self.ready(slot)

    def ready(self, slot: Slot) -> None:
        """A worker serves: after the first the others may start."""
        slot.serves = True
        if slot in self.missing and not self.stop.done():
            self.missing.remove(slot)
            if not self.missing:
                self.server.announce(slot.listening[0])
            elif slot is self.slots[0]:
                for other in self.slots[1:]:
                    self.turns.put_nowait(other)

    def tell_all(self, *message: object) -> None:
        """Passes a message on to all workers."""
        for slot in self.slots:
            if slot.pid:
                slot.link.tell(*message)

    def end(self, stop: asyncio.Future[None]) -> None:
        """Has the workers finish what they are at."""
        close_all(self.keeper)
        for slot in self.slots:
            close_all(slot.listening)
        self.tell_all("stop")
        self.turns.put_nowait(None)


async def bind(server: "Server", reuse_port: bool) -> list[socket.socket]:
    """The sockets of a server's address; raises SystemExit if the port is taken."""
    host, port = server.args.host, server.port
    where = {"host": host, "port": port, "reuse_port": reuse_port}
    listener = await server.bind(asyncio.Protocol, **where)
    sockets = [sock.dup() for sock in listener.sockets]
    listener.close()
    return sockets


def close_all(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


# --- Logs -----------------------------------------------------------------------------

# What every log record has; the rest came with `extra`.
RECORD_MEMBERS = vars(logging.makeLogRecord({})).keys() | words("message asctime")


def printable(text: str) -> str:
    """Escapes control characters and the like, with which lines could be forged."""
    if text.isprintable():
        return text
    escape = "unicode_escape"
    return "".join(c if c.isprintable() else c.encode(escape).decode() for c in text)


def extra_members(record: logging.LogRecord) -> dict[str, Any]:
    """What came with a record."""
    return {k: v for k, v in vars(record).items() if k not in RECORD_MEMBERS}


class TextFormatter(logging.Formatter):
    """A record and all that came with it in one line; a traceback is indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        words = [super().formatMessage(record)]
        for name, value in extra_members(record).items():
            words.append(f"{name}={'-' if value is None else value}")
        return printable(" ".join(words))

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join("    " + printable(line) for line in lines)


class JsonFormatter(logging.Formatter):
    """One JSON object for each record: its time in UTC, and all that came with it."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "message": record.getMessage(),
        }
        line |= extra_members(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # In ASCII, where JSON escapes all that is not printable but one.
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")


def configure_logging(level: str, form: str) -> None:
    """Has everything from `level` on logged to standard error.

    Args:
        level: as for `--log-level`.
        form: as for `--log-format`.

    """
    handler = logging.StreamHandler()
    text = TextFormatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # It would warn of every write to a client that is leaving.
    logging.getLogger("asyncio").setLevel(logging.ERROR)


# --- Server and command line ----------------------------------------------------------


class Server:
    """Serves a proxy until it is told to stop.

    Args:
        proxy: the policy.
        args: the flags of `add_server_flags`.

    """

    def __init__(self, proxy: Proxy, args: argparse.Namespace) -> None:
        self.proxy_instance = proxy
        self.args = args
        self.port: int = args.port
        # Which of several processes this is, if there are several.
        self.worker: Worker | None = None

    def run_server(self) -> None:
        """Serves; returns after SIGTERM or SIGINT.

        Raises:
            SystemExit: the port is taken, or `prepare` refuses to start.

        """
        workers = self.args.workers or len(os.sched_getaffinity(0))
        if workers > 1:
            Supervisor(self, workers).run()
        else:
            uvloop.run(self.serve())
        logger.info("stopped")

    async def serve(self, worker: Worker | None = None) -> None:
        """The same in a running loop, as the only process or as one of several."""
        self.worker = worker
        raise_descriptor_limit()
        keep_freed_memory()
        loop, args = asyncio.get_running_loop(), self.args
        service = Service(self.proxy_instance, args)
        stop = loop.create_future()
        if worker is not None:
            await worker.join(service, stop)
        else:
            for number in STOP_SIGNALS:
                loop.add_signal_handler(number, stopper(stop, args.drain_timeout))
        service.servers = servers = await self.listen(service)
        service.tick()
        await self.prepare(service)
        for server in servers:
            await server.start_serving()
        if worker is not None:
            worker.link.tell("ready")
        else:
            self.announce(servers[0].sockets[0])
        first = worker is None or worker.first
        if first and service.engine_key and not service.client_keys:
            warn_beyond_loopback(servers)
        await stop
        for server in servers:
            server.close()
        await service.drain(args.drain_timeout)
        self.finish()
        for cycler in (service.proxy.prefill_cycler, service.proxy.decode_cycler):
            for instance in cycler.instances:
                instance.close()

    async def prepare(self, service: Service) -> None:
        """What comes before the first client; may raise SystemExit."""

    def finish(self) -> None:
        """What comes after the last client."""

    def announce(self, sock: Any) -> None:
        """Says where clients are served."""
        host, port = sock.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        how = " with TLS" if self.args.ssl_certfile else ""
        logger.info("listening on %s:%d%s", host, port, how)

    async def listen(self, service: Service) -> list[asyncio.Server]:
        """Binds the port, before anything else can go wrong; or takes it over."""
        factory = functools.partial(ClientConnection, service)
        if self.worker is None:
            return [await self.bind(factory, host=self.args.host, port=self.port)]
        return [await self.bind(factory, sock=sock) for sock in self.worker.listening]

    async def bind(
        self, factory: Callable[[], asyncio.Protocol], **where: Any
    ) -> asyncio.Server:
        """A server that does not listen yet; raises SystemExit if the port is taken."""
        loop, tls = asyncio.get_running_loop(), tls_context(self.args)
        try:
            return await loop.create_server(
                factory,
                backlog=LISTEN_BACKLOG,
                start_serving=False,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT if tls else None,
                **where,
            )
        except OSError as err:
            address = f"{self.args.host}:{self.port}"
            raise SystemExit(f"Cannot listen on {address}: {err.strerror}") from None


class ProxyServer(Server):
    """Checks the command line, then serves the instances named there.

    Args:
        args: needs `model`, `prefill`, `decode` and `port`; what `parse_args`
            knows besides has defaults.
        scheduling_policy: what `args` say, round robin by default, if None.
        create_completion: answers `/v1/completions` instead of the proxy.
        create_chat_completion: answers `/v1/chat/completions` instead.

    Raises:
        ValueError: an empty role or a malformed address.

    """

    def __init__(
        self,
        args: argparse.Namespace,
        scheduling_policy: SchedulingPolicy | None = None,
        create_completion: Custom | None = None,
        create_chat_completion: Custom | None = None,
    ) -> None:
        args = argparse.Namespace(**{**DEFAULTS, **vars(args)})
        self.validate_parsed_serve_args(args)
        connector = CONNECTORS[args.kv_connector]()
        prefill, settings = prefill_settings(args)
        proxy = Proxy(
            prefill_instances=prefill,
            decode_instances=args.decode,
            model=args.model,
            scheduling_policy=scheduling_policy or POLICIES[args.scheduling_policy](),
            custom_create_completion=create_completion,
            custom_create_chat_completion=create_chat_completion,
            retries=args.retries,
            connector=connector,
            allow_engine_control=args.allow_engine_control,
            token_handover=args.token_handover,
        )
        for instance, own in zip(proxy.prefill_instances, settings):
            connector.adopt(instance, own)
        super().__init__(proxy, args)

    def validate_parsed_serve_args(self, args: argparse.Namespace) -> None:
        """Raises ValueError, in upstream's words."""
        if not args.prefill:
            raise ValueError("Please specify at least one prefill node.")
        if not args.decode:
            raise ValueError("Please specify at least one decode node.")
        if args.token_handover and CONNECTORS[args.kv_connector].pairs:
            raise ValueError("--token-handover wants --kv-connector auto")
        for address in (*prefill_settings(args)[0], *args.decode):
            parse_address(address)

    async def prepare(self, service: Service) -> None:
        """Looks at each instance once; those that are not there may come later."""
        proxy = service.proxy
        known = (*proxy.prefill_cycler.instances, *proxy.decode_cycler.instances)
        # Of several workers only the first finds any that nobody watches.
        instances = [instance for instance in known if instance.watch is None]
        watches = [proxy.watch(i, service.engine_key) for i in instances]
        checks = await asyncio.gather(*(watch.first for watch in watches))
        for instance, check in zip(instances, checks):
            if check.wrong_model:
                raise SystemExit(check.problem)
            if check.problem is not None:
                logger.warning("%s is not there yet: %s", instance, check.problem)


def prefill_settings(
    args: argparse.Namespace,
) -> tuple[list[str], list[dict[str, object]]]:
    """The prefill instances, and what the connector is told of each.

    A number behind an address is its Mooncake bootstrap port, as in vLLM's own
    Mooncake proxy ("none" for the usual one). A flag of NIXL's push mode has one
    value for all instances, or one for each.

    Raises:
        ValueError: a flag has another number of values.

    """
    addresses: list[str] = []
    settings: list[dict[str, object]] = []
    for word in args.prefill or ():
        if addresses and (word.isdigit() or word.lower() == "none"):
            if word.isdigit():
                settings[-1]["bootstrap_port"] = int(word)
        else:
            addresses.append(word)
            settings.append({})
    for name in PUSH_FLAGS:
        values = getattr(args, f"prefill_{name}")
        if values and len(values) not in (1, len(addresses)):
            flag = f"--prefill-{name.replace('_', '-')}"
            raise ValueError(f"{flag} wants one value, or one for each instance")
        for own, value in zip(settings, (values or []) * len(addresses)):
            own[name] = value
    return addresses, settings


def tls_context(args: argparse.Namespace) -> ssl.SSLContext | None:
    """TLS for clients, if there is a certificate.

    Raises:
        SystemExit: a file is missing, or not what it should be.

    """
    certificate, key = args.ssl_certfile, args.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise SystemExit("--ssl-keyfile needs --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        for name in filter(None, (certificate, key)):
            open(name).close()  # Its error has the file's name.
        # An encrypted key is an error: there may be nobody to type a password.
        context.load_cert_chain(certificate, key, password="")
    except OSError as err:
        raise SystemExit(f"Cannot use the certificate or its key: {err}") from None
    return context


def warn_beyond_loopback(servers: list[asyncio.Server]) -> None:
    """To be called where clients need no key and engines have one."""
    hosts = [sock.getsockname()[0] for server in servers for sock in server.sockets]
    if not all(ipaddress.ip_address(host).is_loopback for host in hosts):
        logger.warning(
            "anybody who reaches this port uses OPENAI_API_KEY: "
            "--api-key would demand a key of clients too"
        )


def raise_descriptor_limit() -> None:
    """Every stream takes two descriptors, a thousand are soon used up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def keep_freed_memory() -> None:
    """Has glibc keep what is freed: else each large body pays for its pages anew.

    It halves the cost of a 100 KB request. mallopt(3); elsewhere nothing happens.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in MALLOC_OPTIONS:
            libc.mallopt(parameter, value)


PUSH_FLAGS: dict[str, tuple[type, str]] = {
    "engine_id": (str, "engine id"),
    "kv_host": (str, "NIXL side-channel host"),
    "side_channel_port": (int, "NIXL side-channel port (5600)"),
    "tp_size": (int, "tensor-parallel size (1)"),
    "pp_size": (int, "pipeline-parallel size (1)"),
}


def argument_parser() -> argparse.ArgumentParser:
    """The command line: upstream's flags, and what running it takes."""
    parser = argparse.ArgumentParser(
        description="vLLM disaggregated proxy server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", "-m", required=True, help="model id")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            f"-{role[0]}",
            nargs="+",
            action="extend",
            default=[],
            metavar="HOST:PORT",
            help=f"{role} instances; a name, an IPv4 or an [IPv6] address",
        )
    add_server_flags(parser, host="127.0.0.1", port=8000)
    parser.add_argument(
        "--kv-connector",
        choices=sorted(CONNECTORS),
        default="auto",
        help="how the KV cache gets from prefill to decode",
    )
    parser.add_argument(
        "--token-handover",
        action="store_true",
        help="give decode the tokens of a chat, which prefill has made already",
    )
    parser.add_argument(
        "--scheduling-policy",
        choices=sorted(POLICIES),
        default="round_robin",
        help="how an instance is chosen for a leg",
    )
    for name, (kind, text) in PUSH_FLAGS.items():
        parser.add_argument(
            f"--prefill-{name.replace('_', '-')}",
            nargs="+",
            type=kind,
            metavar=name.split("_")[-1].upper(),
            help=f"nixl-push: {text}, one for each prefill instance or one for all",
        )
    return parser


def add_server_flags(parser: argparse.ArgumentParser, host: str, port: int) -> None:
    """The flags that do not depend on the connector."""
    parser.add_argument("--host", default=host, help="address to listen on")
    parser.add_argument("--port", type=int, default=port, help="port to listen on")
    parser.add_argument(
        "--workers",
        type=number_of_workers,
        default=1,
        metavar="N",
        help="processes that share the port; 0 for one per core",
    )
    parser.add_argument(
        "--max-body-size",
        type=int,
        default=MAX_BODY_BYTES,
        metavar="BYTES",
        help="largest request body",
    )
    parser.add_argument(
        "--retries",
        type=int,
        default=1,
        metavar="N",
        help="how many more instances a failed leg may try",
    )
    parser.add_argument(
        "--first-byte-timeout",
        type=float,
        default=FIRST_BYTE_TIMEOUT,
        metavar="SECONDS",
        help="how long an engine may take to begin its answer",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=DRAIN_TIMEOUT,
        metavar="SECONDS",
        help="how long running answers may take to finish after SIGTERM",
    )
    add_access_flags(parser)
    add_log_flags(parser)


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """Who may do what, and how the connection is protected."""
    parser.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        metavar="KEY",
        help="keys of which clients must present one, as for `vllm serve`",
    )
    parser.add_argument(
        "--protect-status",
        action="store_true",
        help="/status and /metrics need a key too",
    )
    parser.add_argument(
        "--ssl-certfile",
        metavar="FILE",
        help="serve clients over TLS with this certificate (chain), in PEM",
    )
    parser.add_argument(
        "--ssl-keyfile",
        metavar="FILE",
        help="its private key; default: in the same file",
    )
    parser.add_argument(
        "--allow-engine-control",
        action="store_true",
        help="let clients reach the engines' control routes (sleep, LoRA, ...)",
    )


def add_log_flags(parser: argparse.ArgumentParser) -> None:
    """What is logged, and how."""
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="what is logged",
    )
    parser.add_argument(
        "--log-format",
        choices=["json", "text"],
        default="text",
        help="how: lines for people, or one JSON object a line",
    )
    parser.add_argument(
        "--access-log",
        action="store_true",
        help="log a line for each request: who served it, how long it took",
    )


def number_of_workers(text: str) -> int:
    """Raises ValueError, which argparse reports in its way."""
    number = int(text)
    if number < 0:
        raise ValueError
    return number


DEFAULTS = vars(argument_parser().parse_args(["--model", ""]))


def parse_args() -> argparse.Namespace:
    return argument_parser().parse_args()


def main() -> None:
    args = parse_args()
    configure_logging(args.log_level, args.log_format)
    try:
        server = ProxyServer(args)
    except ValueError as err:
        raise SystemExit(str(err)) from None
    server.run_server()


if __name__ == "__main__":
    main()
