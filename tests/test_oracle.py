# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The proxy's HTTP/1.1 against h11's: the same bytes must mean the same.

Hypothesis makes messages, spoils some of them and cuts them at every place. What
counts is what is acted upon: a message that both hold to be whole must be the same
message, and one that either refuses or still waits for must not be acted upon by
the other. `REQUEST_DISAGREEMENTS` and `RESPONSE_DISAGREEMENTS` list all exceptions.
"""

import itertools
import select
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import h11
import httptools
import pytest
from fuzzing import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from rig import Close, Cluster, End, RawClient, Step
from wire import Pace, assert_nobody_was_asked

from disagg_proxy import (
    Chunked,
    Counted,
    Framing,
    MalformedAnswer,
    ProxyError,
    RequestHead,
    ResponseHead,
    UntilClose,
    parse_response_head,
    read_request_head,
    response_framing,
)

CRLF = b"\r\n"
HEX_DIGITS = b"0123456789abcdefABCDEF"
# RFC 9110 section 7.6.1, and what each leg gets from the proxy itself.
NOT_FORWARDED = set(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection "
    b"te transfer-encoding upgrade accept-encoding authorization content-length "
    b"content-type expect host trailer x-data-parallel-rank x-request-id".split()
)
NOT_RELAYED = set(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection "
    b"te transfer-encoding upgrade content-length x-request-id".split()
)
# Fields whose values the proxy reads.
READ = NOT_FORWARDED - {b"connection", b"transfer-encoding", b"content-length"}

Fields = list[tuple[bytes, bytes]]


class Reading(NamedTuple):
    """A whole message, as a receiver understands it."""

    # Method and target of a request, or status and reason of a response.
    start: tuple[bytes, bytes]
    # Those that go on to the other side, sorted.
    fields: Fields
    # Those that the proxy reads, several lines joined.
    read: dict[bytes, bytes]
    # Whether the connection goes on. None in HTTP/1.0, where h11 does not know, and
    # for answers to HEAD, behind which the proxy keeps fewer connections than it may.
    keep_alive: bool | None
    body: bytes
    rest: bytes


def joined(fields: Fields, names: set[bytes]) -> dict[bytes, bytes]:
    """The values of some fields by name; several lines as one list."""
    found: dict[bytes, bytes] = {}
    for name, value in fields:
        if name in names:
            found[name] = found[name] + b", " + value if name in found else value
    return found


def end_to_end(fields: Fields, dropped: set[bytes]) -> Fields:
    """The fields that an intermediary passes on, sorted."""
    connection = joined(fields, {b"connection"}).get(b"connection", b"").lower()
    named = {item.strip(b" \t") for item in connection.split(b",")}
    return sorted(each for each in fields if each[0] not in dropped | named)


def split_lines(lines: bytes) -> Fields:
    """Field lines as (lower-case name, value)."""
    pairs = (line.partition(b":") for line in lines.split(CRLF) if line)
    return [(name.lower(), value.strip(b" \t")) for name, _, value in pairs]


# --- What the proxy reads -------------------------------------------------------------


def cut(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """The pieces of `data` between places; places beyond its end do not count."""
    places = [0, *sorted({min(at, len(data)) for at in cuts}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


def feed(framing: Framing, pieces: Iterable[bytes]) -> tuple[bytes, bytes]:
    """Feeds a body; returns it and what came behind it.

    Raises:
        ValueError: it is malformed.

    """
    body, rest = b"", b""
    for piece in pieces:
        if framing.done:
            rest += piece
        else:
            body += framing.feed(piece)
    return body, framing.extra + rest


def our_request(data: bytes, cuts: Sequence[int] = ()) -> Reading | None:
    """What the proxy makes of a request; None: it does not act on it."""
    start = 0
    while data.startswith(CRLF, start):
        start += 2
    end = data.find(b"\r\n\r\n", start) + 4
    if end < 4:
        return None
    try:
        head, length = read_request_head(data[start:end])
        framing = Chunked(raw=False) if head.chunked else Counted(length)
        body, rest = feed(framing, cut(data[end:], cuts))
    except (ProxyError, ValueError):
        return None
    if not framing.done:
        return None
    return Reading(
        start=(head.method, head.target),
        fields=end_to_end(split_lines(head.forwarded), NOT_FORWARDED),
        read={name: head.owned[name] for name in READ if name in head.owned},
        keep_alive=head.keep_alive if head.modern else None,
        body=body,
        rest=rest,
    )


def our_response(
    data: bytes, to_head: bool = False, cuts: Sequence[int] = ()
) -> Reading | None:
    """What the proxy makes of an answer with which the connection ends."""
    try:
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                return None
            modern = data.startswith(b"HTTP/1.1")
            head, data = parse_response_head(data[:end]), data[end:]
            if head.status >= 200:
                break
        framing = response_framing(head, to_head, raw=False)
        body, rest = feed(framing, cut(data, cuts))
    except (MalformedAnswer, ValueError):
        return None
    if not framing.feed_eof():
        return None
    line, _, lines = head.relayed.partition(CRLF)
    reason = line[len(b"HTTP/1.1 200 ") :]
    return Reading(
        start=(b"%d" % head.status, reason),
        fields=end_to_end(split_lines(lines), NOT_RELAYED),
        read={},
        keep_alive=head.reusable if modern and not to_head else None,
        body=body,
        rest=rest,
    )


# --- What h11 reads -------------------------------------------------------------------


def origin_form(target: bytes) -> bytes:
    """A target as it is sent to an origin server, RFC 9112 section 3.2.1."""
    if target.startswith(b"/"):
        return target
    _, slash, path = target.partition(b"://")[2].partition(b"/")
    return slash + path or b"/"


def their_request(data: bytes, cuts: Sequence[int] = ()) -> Reading | None:
    """What h11 makes of a request; None: it does not act on it."""
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    pieces = iter(cut(data, cuts))
    request: h11.Request | None = None
    body = b""
    try:
        while True:
            happened = parser.next_event()
            if happened is h11.NEED_DATA:
                piece = next(pieces, None)
                if piece is None:
                    return None
                if piece:
                    parser.receive_data(piece)
            elif isinstance(happened, h11.Request):
                request = happened
            elif isinstance(happened, h11.Data):
                body += bytes(happened.data)
            else:
                assert isinstance(happened, h11.EndOfMessage), happened
                break
    except h11.RemoteProtocolError:
        return None
    assert request is not None
    modern = request.http_version == b"1.1"
    # An answer settles whether an offer to upgrade is taken: it is not.
    parser.send(h11.Response(status_code=204, headers=[]))
    fields = [(name, bytes(value)) for name, value in request.headers]
    return Reading(
        start=(request.method, origin_form(request.target)),
        fields=end_to_end(fields, NOT_FORWARDED),
        read=joined(fields, READ),
        keep_alive=parser.their_state is not h11.MUST_CLOSE if modern else None,
        body=body,
        rest=parser.trailing_data[0] + b"".join(pieces),
    )


def their_response(
    data: bytes, to_head: bool = False, cuts: Sequence[int] = ()
) -> Reading | None:
    """What h11 makes of an answer with which the connection ends."""
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    method = "HEAD" if to_head else "GET"
    parser.send(h11.Request(method=method, target="/", headers=[("Host", "a")]))
    parser.send(h11.EndOfMessage())
    pieces = iter([*filter(None, cut(data, cuts)), b""])
    response: h11.Response | None = None
    body = b""
    keep_alive = False
    try:
        while True:
            happened = parser.next_event()
            if happened is h11.NEED_DATA:
                piece = next(pieces, None)
                if piece is None:
                    return None
                parser.receive_data(piece)
            elif isinstance(happened, h11.Response):
                response = happened
            elif isinstance(happened, h11.Data):
                body += bytes(happened.data)
            elif isinstance(happened, h11.EndOfMessage):
                ended = parser.trailing_data[1]
                keep_alive = not ended and parser.their_state is h11.DONE
                break
            elif isinstance(happened, h11.ConnectionClosed):
                return None
    except h11.RemoteProtocolError:
        return None
    assert response is not None
    modern = response.http_version == b"1.1"
    fields = [(name, bytes(value)) for name, value in response.headers]
    return Reading(
        start=(b"%d" % response.status_code, bytes(response.reason)),
        fields=end_to_end(fields, NOT_RELAYED),
        read={},
        keep_alive=keep_alive if modern and not to_head else None,
        body=body,
        rest=parser.trailing_data[0] + b"".join(pieces),
    )


# --- Where the two differ on purpose --------------------------------------------------


def head_of(data: bytes) -> bytes:
    """A message up to its first empty line, whatever ends the lines."""
    lines = data.lstrip(CRLF).replace(CRLF, b"\n")
    return lines.partition(b"\n\n")[0]


def body_of(data: bytes) -> bytes:
    """What follows the first empty line."""
    return data.lstrip(CRLF).partition(b"\r\n\r\n")[2]


def with_interim(data: bytes) -> Iterator[bytes]:
    """A message, and what is left of it without the interim ones before it."""
    yield data
    while data.startswith(b"HTTP/") and word(data, 1).startswith(b"1"):
        data = body_of(data)
        yield data


def values(data: bytes, *names: bytes) -> list[bytes]:
    """The values of some fields of a head."""
    lines = (line.partition(b":") for line in head_of(data).split(b"\n")[1:])
    return [value.strip() for name, _, value in lines if name.strip().lower() in names]


def word(data: bytes, number: int) -> bytes:
    """A word of the start line, b"" if there is none."""
    found = head_of(data).partition(b"\n")[0].split(b" ")
    return found[number] if len(found) > number else b""


def is_chunked(data: bytes) -> bool:
    return bool(values(data, b"transfer-encoding"))


def chunk_lines(data: bytes) -> list[bytes]:
    """Lines of a chunked body that may be chunk sizes, or trailers."""
    lines = body_of(data).split(CRLF) if is_chunked(data) else []
    return [line for line in lines if line[:1].isalnum()]


def has_bare_lf(data: bytes) -> bool:
    return b"\n" in data.replace(CRLF, b"")


def has_fold(data: bytes) -> bool:
    return b"\n " in data or b"\n\t" in data


def has_control(data: bytes) -> bool:
    text = data if is_chunked(data) else head_of(data)
    return any(byte in range(0x20) and byte not in b"\t\r\n" for byte in text) or (
        b"\x7f" in text
    )


def has_repeated_length(data: bytes) -> bool:
    return b"," in b",".join(values(data, b"content-length"))


def has_long_length(data: bytes) -> bool:
    return any(len(value) > 18 for value in values(data, b"content-length"))


def has_two_framings(data: bytes) -> bool:
    return is_chunked(data) and bool(values(data, b"content-length"))


def has_many_fields(data: bytes) -> bool:
    return head_of(data).count(b"\n") > 256


def has_blank_behind_size(data: bytes) -> bool:
    return any(line.endswith((b" ", b"\t")) for line in chunk_lines(data))


def has_blank_before_extension(data: bytes) -> bool:
    return any(b" ;" in line or b"\t;" in line for line in chunk_lines(data))


def has_long_size(data: bytes) -> bool:
    sizes = (line.partition(b";")[0].strip() for line in chunk_lines(data))
    return any(len(size) > 15 and not size.strip(HEX_DIGITS) for size in sizes)


def has_cr_in_extension(data: bytes) -> bool:
    return any(b"\r" in line.partition(b";")[2] for line in chunk_lines(data))


def has_framing_trailer(data: bytes) -> bool:
    lines = [line.lower() for line in chunk_lines(data)]
    return any(
        line.startswith((b"transfer-encoding:", b"content-length:")) for line in lines
    )


def has_odd_host(data: bytes) -> bool:
    odd = b' \t"#/<>?@\\^`{|}' + bytes(range(0x80, 0x100))
    hosts = values(data, b"host")
    return any(not host or host.translate(None, odd) != host for host in hosts)


def has_repeated_single(data: bytes) -> bool:
    names = (b"authorization", b"content-type", b"expect", b"x-request-id")
    return any(len(values(data, name)) > 1 for name in names)


@dataclass(frozen=True)
class Disagreement:
    """One kind of message that only one of the two acts upon."""

    name: str
    reason: str
    only: str
    seen: Callable[[bytes], bool]
    example: bytes

    def explains(self, data: bytes, ours: object, theirs: object) -> bool:
        """Whether this is why only one of two readings exists."""
        acts = "proxy" if ours else "h11"
        differ = bool(ours) != bool(theirs) and acts == self.only
        return differ and any(map(self.seen, with_interim(data)))


METHODS = [b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH"]
LINE = b"POST /x HTTP/1.1\r\n"
START = LINE + b"Host: a\r\n"
CHUNKS = START + b"Transfer-Encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
OK_CHUNKS = OK + b"Transfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def head_disagreements(start: bytes) -> list[Disagreement]:
    """What holds for the heads of requests and responses alike."""
    return [
        Disagreement(
            "bare LF",
            "RFC 9112 section 2.2 allows it as a line end; two readers on one "
            "connection that differ in it can be played off against each other",
            "h11",
            has_bare_lf,
            start + b"X: a\nContent-Length: 0\r\n\r\n",
        ),
        Disagreement(
            "obs-fold",
            "RFC 9112 section 5.2: 400 or replace; no client of vLLM sends it",
            "h11",
            has_fold,
            start + b"X: a\r\n b\r\nContent-Length: 0\r\n\r\n",
        ),
        Disagreement(
            "control characters",
            "RFC 9110 section 5.5: not in the grammar of a value",
            "h11",
            has_control,
            start + b"X: a\x01b\r\nContent-Length: 0\r\n\r\n",
        ),
        Disagreement(
            "one length twice",
            "RFC 9110 section 8.6: reject or take as one; sent by attackers only",
            "h11",
            has_repeated_length,
            start + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n",
        ),
        Disagreement(
            "long length",
            "19 digits and more are beyond any limit, and near 2^63",
            "h11",
            has_long_length,
            start + b"Content-Length: 0000000000000000001\r\n\r\na",
        ),
        Disagreement(
            "length and coding",
            "RFC 9112 section 6.3 item 3: might be smuggling, so an error",
            "h11",
            has_two_framings,
            start + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n" + END,
        ),
    ]


def chunk_disagreements(chunks: bytes) -> list[Disagreement]:
    """What holds for chunked bodies of requests and responses alike."""
    return [
        Disagreement(
            "blank behind a chunk size",
            "RFC 9112 section 7.1: not in the grammar",
            "h11",
            has_blank_behind_size,
            chunks + b"1 \r\na\r\n" + END,
        ),
        Disagreement(
            "blank before a chunk extension",
            "RFC 9112 section 7.1.1: BWS is in the grammar",
            "proxy",
            has_blank_before_extension,
            chunks + b"1 ;a\r\na\r\n" + END,
        ),
        Disagreement(
            "long chunk size",
            "16 digits and more are beyond any limit, zeros or not",
            "h11",
            has_long_size,
            chunks + b"0000000000000001\r\na\r\n" + END,
        ),
        Disagreement(
            "CR in a chunk extension",
            "RFC 9112 section 7.1.1: not in the grammar, and a line end to some",
            "h11",
            has_cr_in_extension,
            chunks + b"1;a\rb\r\na\r\n" + END,
        ),
        Disagreement(
            "framing fields in trailers",
            "RFC 9110 section 6.5.1: must not be sent; llhttp refuses them, too",
            "h11",
            has_framing_trailer,
            chunks + b"0\r\nContent-Length: 5\r\n\r\n",
        ),
    ]


REQUEST_DISAGREEMENTS = [
    *head_disagreements(START),
    *chunk_disagreements(CHUNKS),
    Disagreement(
        "empty lines before the request line",
        "RFC 9112 section 2.2: a server should ignore at least one",
        "proxy",
        lambda data: data.startswith(CRLF),
        CRLF + START + CRLF,
    ),
    Disagreement(
        "methods that llhttp does not know",
        "no engine has a route for one; vLLM's server refuses them, too",
        "h11",
        lambda data: word(data, 0) not in METHODS,
        b"FETCH / HTTP/1.1\r\nHost: a\r\n\r\n",
    ),
    Disagreement(
        "other versions",
        "RFC 9112 section 2.3; nobody sends 1.2",
        "h11",
        lambda data: word(data, 2) not in (b"HTTP/1.0", b"HTTP/1.1"),
        b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
    ),
    Disagreement(
        "targets in other forms",
        "RFC 9112 section 3.2: authority-form and asterisk-form are for CONNECT "
        "and OPTIONS, of which there is no route; absolute-form is for http URLs",
        "h11",
        lambda data: not word(data, 1).startswith(b"/"),
        b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    ),
    Disagreement(
        "chunks in HTTP/1.0",
        "RFC 9112 section 6.1: faulty framing",
        "h11",
        lambda data: is_chunked(data) and word(data, 2) == b"HTTP/1.0",
        CHUNKS.replace(b"HTTP/1.1", b"HTTP/1.0") + END,
    ),
    Disagreement(
        "malformed or empty Host",
        "RFC 9112 section 3.2: must be 400; an http URL has a host",
        "h11",
        has_odd_host,
        b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
    ),
    Disagreement(
        "single fields on several lines",
        "RFC 9110 section 5.3: not allowed; which of them an engine takes is open",
        "h11",
        has_repeated_single,
        START + b"Authorization: a\r\nAuthorization: b\r\n\r\n",
    ),
    Disagreement(
        "unknown expectations",
        "RFC 9110 section 10.1.1: 417 is allowed",
        "h11",
        lambda data: values(data, b"expect") not in ([], [b"100-continue"]),
        START + b"Expect: x\r\n\r\n",
    ),
    Disagreement(
        "many fields",
        "the limit is vLLM's; h11 counts bytes only",
        "h11",
        has_many_fields,
        START + b"X: a\r\n" * 300 + CRLF,
    ),
]

RESPONSE_DISAGREEMENTS = [
    *head_disagreements(OK),
    *chunk_disagreements(OK_CHUNKS),
    Disagreement(
        "other versions",
        "RFC 9112 section 2.3: an engine answers HTTP/1.1 with 1.1 or 1.0",
        "h11",
        lambda data: word(data, 0) not in (b"HTTP/1.0", b"HTTP/1.1"),
        b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    ),
]


def explanations(
    table: list[Disagreement], data: bytes, ours: object, theirs: object
) -> list[str]:
    """Names of the listed disagreements that explain this one."""
    return [each.name for each in table if each.explains(data, ours, theirs)]


def by_name(table: list[Disagreement]) -> dict[str, Disagreement]:
    return {each.name: each for each in table}


@pytest.mark.parametrize("name", by_name(REQUEST_DISAGREEMENTS))
def test_each_disagreement_about_requests_is_real(name: str) -> None:
    data = by_name(REQUEST_DISAGREEMENTS)[name].example
    ours, theirs = our_request(data), their_request(data)
    assert explanations(REQUEST_DISAGREEMENTS, data, ours, theirs) == [name]


@pytest.mark.parametrize("name", by_name(RESPONSE_DISAGREEMENTS))
def test_each_disagreement_about_responses_is_real(name: str) -> None:
    data = by_name(RESPONSE_DISAGREEMENTS)[name].example
    ours, theirs = our_response(data), their_response(data)
    assert explanations(RESPONSE_DISAGREEMENTS, data, ours, theirs) == [name]


# --- Messages -------------------------------------------------------------------------

NAMES = st.text("abcXYZ019-_.!#$%&'*+^`|~", min_size=1, max_size=6).map(str.encode)
# Visible ASCII, blanks and bytes above ASCII.
VALUES = st.lists(
    st.sampled_from([*range(0x20, 0x7F), 9, 0x80, 0xA0, 0xFF]), max_size=10
).map(bytes)
BLANKS = st.sampled_from([b"", b" ", b"\t", b"  "])
FIELDS = st.tuples(NAMES, st.just(b":"), BLANKS, VALUES, BLANKS).map(b"".join)
# Bodies in which a spoilt line end cannot hide.
TEXTS = st.lists(st.sampled_from(b'ab{}":,05; \xff'), max_size=30).map(bytes)
PATHS = st.text("abc/?=&%20:;,.~!$'()*+@#[]{}|^`<>\"", max_size=8).map(str.encode)

KNOWN_FIELDS = {
    "request": [
        b"Connection: close",
        b"connection: Keep-Alive",
        b"Connection: X-Hop, close",
        b"CONNECTION:x-hop",
        b"X-Hop: 1",
        b"Keep-Alive: timeout=5",
        b"Accept-Encoding: gzip",
        b"TE: trailers",
        b"Trailer: X",
        b"Expect: 100-continue",
        b"Content-Type: application/json",
        b"Authorization: Bearer a",
        b"X-Request-Id: 1",
        b"Upgrade: h2c",
        b"Proxy-Authorization: a",
        b"Cookie: a=b; c=d",
        b"x-data-parallel-rank: 1",
    ],
    "response": [
        b"Connection: close",
        b"connection: Keep-Alive",
        b"Connection: X-Hop, close",
        b"X-Hop: 1",
        b"Keep-Alive: timeout=5",
        b"Content-Encoding: gzip",
        b"Date: Sun, 06 Nov 1994 08:49:37 GMT",
        b"Server: engine",
        b"Set-Cookie: a=b",
        b"X-Request-Id: 1",
        b"Trailer: X",
        b"Upgrade: h2c",
        b"Retry-After: 1",
    ],
}


def in_chunks(draw: st.DrawFn, body: bytes) -> bytes:
    """A body in the chunked coding, in one of its many forms."""
    encoded = b""
    while body:
        size = draw(st.integers(1, len(body)))
        digits = draw(st.sampled_from([b"%x", b"%X", b"00%x"])) % size
        extension = draw(st.sampled_from([b"", b"", b";a", b';a="b c"', b";", b"; a"]))
        encoded += digits + extension + CRLF + body[:size] + CRLF
        body = body[size:]
    last = draw(st.sampled_from([b"0", b"0", b"000", b"0;a"]))
    trailers = draw(st.sampled_from([b"", b"", b"X: 1\r\n", b"X: 1\r\nY-Z:\r\n"]))
    return encoded + last + CRLF + trailers + CRLF


def framed(draw: st.DrawFn, body: bytes, coding: str) -> tuple[list[bytes], bytes]:
    """The fields that say how a body ends, and the body on the wire."""
    if coding == "chunked":
        name = draw(st.sampled_from([b"Transfer-Encoding", b"transfer-encoding"]))
        value = draw(st.sampled_from([b"chunked", b"Chunked"]))
        return [name + b": " + value], in_chunks(draw, body)
    if coding == "length":
        form = draw(st.sampled_from([b"Content-Length: %d", b"content-length:00%d "]))
        return [form % len(body)], body
    return [], body


def other_fields(draw: st.DrawFn, kind: str) -> list[bytes]:
    """Fields that do not frame, none of the single ones twice."""
    known = st.lists(st.sampled_from(KNOWN_FIELDS[kind]), unique=True, max_size=4)
    return draw(known) + draw(st.lists(FIELDS, max_size=3))


@st.composite
def requests(draw: st.DrawFn, bodies: st.SearchStrategy[bytes]) -> bytes:
    """Requests that RFC 9112 allows, and the start of what may follow them."""
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.1", b"1.0"]))
    method = draw(st.sampled_from(METHODS))
    start = draw(st.sampled_from([b"/", b"/", b"http://h/", b"HTTPS://h:1/"]))
    codings = ["length", "none"] if version == b"1.0" else ["length", "none", "chunked"]
    coding = draw(st.sampled_from(codings))
    body = b"" if coding == "none" else draw(bodies)
    fields, sent = framed(draw, body, coding)
    host = draw(st.sampled_from([b"Host: a", b"host:  a.b:80 ", b"Host: [::1]:1"]))
    fields = draw(st.permutations([host, *fields, *other_fields(draw, "request")]))
    line = b"%b %b%b HTTP/%b" % (method, start, draw(PATHS), version)
    rest = draw(st.sampled_from([b"", b"", START + CRLF, CRLF, b"x"]))
    return CRLF.join([line, *fields, b"", b""]) + sent + rest


@st.composite
def responses(draw: st.DrawFn, bodies: st.SearchStrategy[bytes]) -> bytes:
    """Answers that RFC 9112 allows, interim ones before them."""
    interim = draw(
        st.lists(st.sampled_from([b"100 Continue", b"103 Hints\r\nX: 1"]), max_size=2)
    )
    before = b"".join(b"HTTP/1.1 %b\r\n\r\n" % each for each in interim)
    status = draw(st.sampled_from([200, 200, 200, 204, 206, 304, 400, 404, 429, 503]))
    reason = draw(st.sampled_from([b" OK", b" ", b"", b" Not \xff Found"]))
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.0"]))
    codings = ["length", "close"] + ["chunked"] * (version == b"1.1")
    coding = draw(st.sampled_from(codings))
    bodiless = status in (204, 304)
    fields, sent = framed(draw, b"" if bodiless else draw(bodies), coding)
    fields = draw(st.permutations([*fields, *other_fields(draw, "response")]))
    line = b"HTTP/%b %d%b" % (version, status, reason)
    rest = draw(st.sampled_from([b"", b"", b"x", OK + CRLF]))
    rest = b"" if coding == "close" and not bodiless else rest
    sent = b"" if bodiless else sent
    return before + CRLF.join([line, *fields, b"", b""]) + sent + rest


# What is put into a message to spoil it.
SPOILERS = [
    *[bytes([byte]) for byte in b'\r\n \t\0:;,05-+_ax\x01\x0b\x7f\x80\xff"#/'],
    CRLF,
    b"\r\n ",
    b"\r\n\r\n",
    b" \r\n",
    b"\r\nX : a",
    b"\r\nHost: b",
    b"\r\nHost:",
    b"\r\nContent-Length: 1",
    b"\r\nContent-Length: 2, 2",
    b"\r\nContent-Length: +1",
    b"\r\nContent-Length : 1",
    b"\r\nTransfer-Encoding: chunked",
    b"\r\nTransfer-Encoding: gzip, chunked",
    b"\r\nTransfer-Encoding: identity",
    b"\r\nConnection: upgrade",
    b"\r\nContent-Type: a",
    b"\r\nExpect: b",
]


# What is put before the digits of a length or a chunk size.
NUMBER_SPOILERS = [b"+", b"-", b" +", b"0x", b"0_", b"0 ", b"0,", b"\x0b", b"1", b"0"]


def places_of_numbers(data: bytes) -> list[int]:
    """Where a length or a chunk size may start."""
    length_at = data.lower().find(b"content-length:") + 15
    places = [length_at] if length_at > 14 else []
    body_at = len(data) - len(body_of(data))
    if is_chunked(data):
        lines = (at for at in range(body_at, len(data)) if data[at - 1 : at] == b"\n")
        places += lines
    return places


@st.composite
def spoilt(draw: st.DrawFn, messages: st.SearchStrategy[bytes]) -> bytes:
    """Messages with one fault or two."""
    data = draw(messages)
    for _ in range(draw(st.integers(1, 2))):
        # Starts and ends of lines, blanks and numbers are where it hurts.
        places = [at for at, byte in enumerate(data) if byte in b"\r :;,0123456789"]
        places += [at for at in range(len(data)) if data[at - 1 : at] == b"\n"]
        anywhere = st.integers(0, len(data))
        at = draw(st.sampled_from(places) | anywhere if places else anywhere)
        length = draw(st.sampled_from([0, 0, 0, 1, 1, 2, 5]))
        twice = draw(st.booleans()) and length > 0
        put = data[at : at + length] * 2 if twice else draw(st.sampled_from(SPOILERS))
        put = draw(st.sampled_from([put, put, b""])) if length else put
        numbers = places_of_numbers(data)
        if numbers and draw(st.integers(0, 3)) == 0:
            at, length = draw(st.sampled_from(numbers)), 0
            put = draw(st.sampled_from(NUMBER_SPOILERS))
        data = data[:at] + put + data[at + length :]
    return data


CUTS = st.lists(st.integers(0, 400), max_size=4)


def agree(
    table: list[Disagreement], data: bytes, ours: Reading | None, theirs: Reading | None
) -> None:
    """Fails where the readings differ and no listed disagreement explains it."""
    if ours and theirs:
        assert ours == theirs, data
    elif ours or theirs:
        assert explanations(table, data, ours, theirs), (data, ours, theirs)


# --- Requests -------------------------------------------------------------------------


@examples(150)
@given(requests(st.binary(max_size=40)), CUTS)
def test_whole_requests_mean_the_same(data: bytes, cuts: list[int]) -> None:
    ours = our_request(data, cuts)
    assert ours is not None
    assert ours == their_request(data, cuts)


@examples(700)
@given(spoilt(requests(TEXTS)), CUTS)
def test_spoilt_requests_mean_the_same_or_nothing(data: bytes, cuts: list[int]) -> None:
    theirs = their_request(data, cuts)
    agree(REQUEST_DISAGREEMENTS, data, our_request(data, cuts), theirs)


@examples(100)
@given(requests(TEXTS) | spoilt(requests(TEXTS)))
def test_a_request_means_the_same_however_it_is_split(data: bytes) -> None:
    body = body_of(data)
    whole = our_request(data)
    for at in range(len(body) + 1):
        assert our_request(data, [at]) == whole
    assert our_request(data, range(len(body))) == whole


# --- Responses ------------------------------------------------------------------------


@examples(150)
@given(responses(st.binary(max_size=40)), st.booleans(), CUTS)
def test_whole_responses_mean_the_same(
    data: bytes, to_head: bool, cuts: list[int]
) -> None:
    ours = our_response(data, to_head, cuts)
    assert ours is not None
    assert ours == their_response(data, to_head, cuts)


@examples(700)
@given(spoilt(responses(TEXTS)), st.booleans(), CUTS)
def test_spoilt_responses_mean_the_same_or_nothing(
    data: bytes, to_head: bool, cuts: list[int]
) -> None:
    theirs = their_response(data, to_head, cuts)
    agree(RESPONSE_DISAGREEMENTS, data, our_response(data, to_head, cuts), theirs)


@examples(100)
@given(responses(TEXTS) | spoilt(responses(TEXTS)), st.booleans())
def test_a_response_means_the_same_however_it_is_split(
    data: bytes, to_head: bool
) -> None:
    whole = our_response(data, to_head)
    for at in range(len(data) + 1):
        assert our_response(data, to_head, [at]) == whole
    assert our_response(data, to_head, range(len(data))) == whole


@examples(150)
@given(responses(TEXTS), CUTS)
def test_what_is_relayed_means_what_the_engine_said(
    data: bytes, cuts: list[int]
) -> None:
    engines = their_response(data)
    assert engines is not None
    head = parse_response_head(data[: data.index(b"\r\n\r\n") + 4])
    while head.status < 200:
        data = body_of(data)
        head = parse_response_head(data[: data.index(b"\r\n\r\n") + 4])
    framing = response_framing(head, to_head=False, raw=True)
    # Close-delimited bodies are framed anew, which is not for these functions.
    assume(not isinstance(framing, UntilClose))
    sent, _ = feed(framing, cut(body_of(data), cuts))
    start = head.relayed if head.status == 204 else head.relayed_whole
    relayed = their_response(start + CRLF + sent)
    assert relayed is not None
    assert (relayed.start, relayed.body) == (engines.start, engines.body)
    assert (relayed.fields, relayed.rest) == (engines.fields, b"")


# --- The same through the proxy itself ------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """1P1D; the decode engine answers whatever it gets with a 200."""
    with Cluster() as cluster:
        yield cluster


JSON_BODIES = st.text("ab \u00e9", max_size=10).map(
    lambda text: f'{{"prompt":"{text}"}}'.encode()
)


@st.composite
def posts(draw: st.DrawFn) -> bytes:
    """Requests that a decode instance serves alone, with a JSON body."""
    coding = draw(st.sampled_from(["length", "chunked"]))
    fields, sent = framed(draw, draw(JSON_BODIES), coding)
    others = other_fields(draw, "request")
    # The proxy asks for the body by an interim answer, which is tested elsewhere.
    others = [each for each in others if not each.startswith(b"Expect")]
    fields = draw(st.permutations([b"Host: a", *fields, *others]))
    return CRLF.join([b"POST /x HTTP/1.1", *fields, b"", b""]) + sent


def lower(headers: Fields) -> Fields:
    return [(name.lower(), value) for name, value in headers]


def is_readable(client: RawClient) -> bool:
    return bool(select.select([client.socket], [], [], 0)[0])


@examples(80)
@given(posts() | spoilt(posts()), CUTS)
def test_requests_mean_the_same_to_the_running_proxy(
    cluster: Cluster, data: bytes, cuts: list[int]
) -> None:
    ours, theirs = our_request(data), their_request(data)
    differ = explanations(REQUEST_DISAGREEMENTS, data, ours, theirs)
    reading = ours if differ else theirs
    with cluster.connect() as client, Pace(cluster) as pace:
        pace.send(client, filter(None, cut(data, cuts)))
        # What answers the last piece was written in the round of the loop in which
        # it was read, so it is here after one more.
        pace.wait()
        if reading is None and not is_readable(client):
            client.half_close()
            assert client.wait_closed() == b""
            assert_nobody_was_asked(cluster)
            return
        response = client.reader().finish()
        assert response.end is End.COMPLETE
        if reading is None:
            assert response.status >= 400
            assert client.wait_closed() == b""
    if reading is None or response.status != 200:
        # What is well-formed may still be no JSON, or no path.
        assert_nobody_was_asked(cluster)
        return
    leg = cluster.d[0].next_request()
    assert leg.line.split(b" ")[:2] == list(reading.start)
    assert leg.body == reading.body
    assert end_to_end(lower(leg.headers), NOT_FORWARDED) == reading.fields
    assert_nobody_was_asked(cluster)


@examples(80)
@given(responses(TEXTS) | spoilt(responses(TEXTS)), CUTS)
def test_responses_mean_the_same_to_the_running_proxy(
    cluster: Cluster, data: bytes, cuts: list[int]
) -> None:
    cluster.d[0].forget()
    ours, theirs = our_response(data), their_response(data)
    differ = explanations(RESPONSE_DISAGREEMENTS, data, ours, theirs)
    reading = ours if differ else theirs
    steps: list[Step] = [*filter(None, cut(data, cuts)), Close.FIN]
    cluster.d[0].answer(*steps)
    # The proxy has seen the end of the last example's connection, and of its faults.
    cluster.d[0].wait_connections(0)
    cluster.proxy.wait_all_up()
    with cluster.connect() as client:
        response = client.request("GET", "/x").finish()
        cluster.d[0].next_request()
        if reading is None:
            assert response.status == 502 or response.end is End.INCOMPLETE
            return
        assert (response.end, response.extra) == (End.COMPLETE, b"")
        assert (b"%d" % response.status, response.body) == (
            reading.start[0],
            reading.body,
        )
        fields = end_to_end(lower(response.headers), NOT_RELAYED)
        if b"date" not in dict(reading.fields):
            fields = [each for each in fields if each[0] != b"date"]
        assert fields == reading.fields
        # What came behind the answer is nobody's.
        assert client.request("GET", "/health").finish().body == b"ok"


# --- What httptools alone would let through -------------------------------------------


class Target:
    """The callback without which httptools keeps no target."""

    def on_url(self, url: bytes) -> None:
        """Takes a piece of it."""


def httptools_takes_request(raw: bytes) -> bool:
    parser = httptools.HttpRequestParser(Target())
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        return True
    except httptools.HttpParserError:
        return False
    return True


def httptools_takes_response(raw: bytes) -> bool:
    parser = httptools.HttpResponseParser(Target())
    try:
        parser.feed_data(raw)
    except httptools.HttpParserError:
        return False
    return True


HOST = b"Host: a\r\n"
# RFC 9112 forbids each of them, httptools 0.9 takes it, the proxy does not.
LENIENT_REQUESTS = {
    "two blanks before the target": b"GET  / HTTP/1.1\r\n" + HOST + CRLF,
    "two blanks behind the target": b"GET /  HTTP/1.1\r\n" + HOST + CRLF,
    "no version": b"GET /\r\n" + HOST + CRLF,
    "version 0.9": b"GET / HTTP/0.9\r\n" + HOST + CRLF,
    "version 2.0": b"GET / HTTP/2.0\r\n" + HOST + CRLF,
    "RTSP": b"DESCRIBE / RTSP/1.0\r\n" + HOST + CRLF,
    "ICE": b"SOURCE / ICE/1.0\r\n" + HOST + CRLF,
    "LF before the request line": b"\nGET / HTTP/1.1\r\n" + HOST + CRLF,
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET / HTTP/1.1\r\n" + HOST + HOST + CRLF,
    "malformed Host": b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
    "an URL without host": b"GET http:///x HTTP/1.1\r\n" + HOST + CRLF,
    "another scheme": b"GET ftp://a/x HTTP/1.1\r\n" + HOST + CRLF,
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "another coding": START + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "an empty coding": START + b"Transfer-Encoding: , chunked\r\n\r\n",
    "two keys": START + b"Authorization: a\r\nAuthorization: b\r\n\r\n",
}
LENIENT_RESPONSES = {
    "version 2.0": b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "version 0.9": b"HTTP/0.9 200 OK\r\nContent-Length: 0\r\n\r\n",
    "ICE": b"ICE/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "RTSP": b"RTSP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "status 000": b"HTTP/1.1 000 X\r\nContent-Length: 0\r\n\r\n",
    "status 099": b"HTTP/1.1 099 X\r\nContent-Length: 0\r\n\r\n",
    "NUL in the reason": b"HTTP/1.1 200 \0\r\nContent-Length: 0\r\n\r\n",
    "empty line first": CRLF + OK + b"Content-Length: 0\r\n\r\n",
    "another coding": OK + b"Transfer-Encoding: xchunked\r\n\r\n",
    "chunked twice": OK + b"Transfer-Encoding: chunked\r\n" * 2 + CRLF,
}


@pytest.mark.parametrize("case", LENIENT_REQUESTS)
def test_httptools_takes_requests_that_the_proxy_refuses(case: str) -> None:
    assert httptools_takes_request(LENIENT_REQUESTS[case])
    with pytest.raises(ProxyError):
        RequestHead(LENIENT_REQUESTS[case])


@pytest.mark.parametrize("case", LENIENT_RESPONSES)
def test_httptools_takes_responses_that_the_proxy_refuses(case: str) -> None:
    assert httptools_takes_response(LENIENT_RESPONSES[case])
    with pytest.raises(MalformedAnswer):
        ResponseHead(LENIENT_RESPONSES[case])


# httptools sets no limit of its own; test_http.py shows the proxy's limits.
UNLIMITED = {
    "target": b"GET /" + b"x" * 1_000_000 + b" HTTP/1.1\r\n" + HOST + CRLF,
    "field": START + b"X: " + b"x" * 10_000_000 + b"\r\n\r\n",
    "name": START + b"X" * 1_000_000 + b": x\r\n\r\n",
    "fields": START + b"X: x\r\n" * 100_000 + CRLF,
    "chunk extension": CHUNKS + b"1;" + b"a" * 1_000_000 + b"\r\na\r\n" + END,
    "trailers": CHUNKS + b"0\r\n" + b"X: x\r\n" * 100_000 + CRLF,
    "empty lines": CRLF * 100_000 + START + CRLF,
    "length": START + b"Content-Length: 9223372036854775807\r\n\r\n",
}


@pytest.mark.parametrize("case", UNLIMITED)
def test_httptools_sets_no_limit(case: str) -> None:
    assert httptools_takes_request(UNLIMITED[case])


# What the proxy leaves to httptools, so that a more lenient one is noticed.
RELIED_ON = {
    "obs-fold": START + b"X: a\r\n b\r\n\r\n",
    "fold behind the request line": LINE + b" Host: a\r\n\r\n",
    "blank before the colon": START + b"X : a\r\n\r\n",
    "no colon": START + b"X\r\n\r\n",
    "no name": START + b": a\r\n\r\n",
    "a name above ASCII": START + b"X\xff: a\r\n\r\n",
    "bare LF": START + b"X: a\nY: b\r\n\r\n",
    "bare CR": START + b"X: a\rY: b\r\n\r\n",
    "NUL": START + b"X: \0\r\n\r\n",
    "a control character": START + b"X: \x01\r\n\r\n",
    "bytes above ASCII in the target": b"GET /\xff HTTP/1.1\r\n" + HOST + CRLF,
    "a tab behind the method": b"GET\t/ HTTP/1.1\r\n" + HOST + CRLF,
    "a blank behind the version": b"GET / HTTP/1.1 \r\n" + HOST + CRLF,
    "an unknown method": b"get / HTTP/1.1\r\n" + HOST + CRLF,
    "chunked not last": START + b"Transfer-Encoding: chunked, gzip\r\n\r\n",
    "a coding alone": START + b"Transfer-Encoding: gzip\r\n\r\n",
}


@pytest.mark.parametrize("case", RELIED_ON)
def test_httptools_refuses_what_is_left_to_it(case: str) -> None:
    assert not httptools_takes_request(RELIED_ON[case])
