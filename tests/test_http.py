# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""HTTP/1.1 on the wire: what clients and engines may send, and what they may not."""

import gzip
import itertools
import socket
import string
from collections.abc import Callable, Iterable, Iterator

import pytest
from rig import (
    CHAT,
    COMPLETIONS,
    DONE,
    HANG_GUARD,
    JSON,
    LAST_CHUNK,
    SSE_HEAD,
    Close,
    Cluster,
    End,
    EngineRequest,
    Gate,
    RawClient,
    Response,
    Step,
    chunk,
    decode_answer,
    dumps,
    event,
    gather,
    hand_over,
    http_request,
    http_response,
    members,
    poll,
    prefill_answer,
)
from wire import (
    DELIVERIES,
    SECOND,
    Pace,
    assert_nobody_was_asked,
    refusal,
)

from disagg_proxy import Chunked

BODY: JSON = {"prompt": "a", "messages": []}
STREAM: JSON = BODY | {"stream": True}
CONTENT = b'{"prompt":"a"}'
KIBIBYTE = 1 << 10
MEBIBYTE = 1 << 20
CHUNKED = b"Transfer-Encoding: chunked"
LENGTH = b"Content-Length: %d" % len(CONTENT)

every_delivery = pytest.mark.parametrize("delivery", DELIVERIES)


def post(
    *fields: bytes,
    body: bytes = b"",
    line: bytes = b"POST /v1/completions HTTP/1.1",
    host: bytes = b"Host: proxy",
) -> bytes:
    """A request put together from raw lines."""
    lines = [line, host, b"Content-Type: application/json", *fields]
    return b"\r\n".join([*filter(None, lines), b"", body])


def in_chunks(data: bytes, size: int, extension: bytes = b"") -> bytes:
    """Data in the chunked coding but for its end: chunks of `size` bytes."""
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(
        b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces
    )


def chunked(*sent: bytes) -> bytes:
    """A request with a chunked body, as it is on the wire."""
    return post(CHUNKED, body=b"".join(sent))


# --- Ambiguous framing (B32) ----------------------------------------------------------

GOOD_CHUNKS = in_chunks(CONTENT, 5) + LAST_CHUNK

AMBIGUOUS = {
    "length_and_coding": post(LENGTH, CHUNKED, body=GOOD_CHUNKS),
    "coding_and_length": post(CHUNKED, LENGTH, body=GOOD_CHUNKS),
    "two_lengths": post(LENGTH, b"Content-Length: 5", body=CONTENT),
    "one_length_twice": post(LENGTH, LENGTH, body=CONTENT),
    "list_of_lengths": post(b"Content-Length: 5, 6", body=CONTENT),
    "list_of_one_length": post(b"Content-Length: 14, 14", body=CONTENT),
    "plus": post(b"Content-Length: +14", body=CONTENT),
    "minus": post(b"Content-Length: -1", body=CONTENT),
    "blank_within": post(b"Content-Length: 1 4", body=CONTENT),
    "underscore": post(b"Content-Length: 1_4", body=CONTENT),
    "hexadecimal": post(b"Content-Length: 0xe", body=CONTENT),
    "other_digits": post("Content-Length: \u0661\u0664".encode(), body=CONTENT),
    "empty_length": post(b"Content-Length:", body=CONTENT),
    "above_64_bits": post(b"Content-Length: %d" % (2**64 + 14), body=CONTENT),
    "length_continued": post(b"Content-Length: 1\r\n 4", body=CONTENT),
    "length_after_blank": post(b"Content-Length : 14", body=CONTENT),
    "length_after_fold": post(b"X: a\r\n Content-Length: 14", body=CONTENT),
    "coding_after_blank": post(b"Transfer-Encoding : chunked", body=GOOD_CHUNKS),
    "coding_after_tab": post(b"Transfer-Encoding:\x0bchunked", body=GOOD_CHUNKS),
    "chunked_not_last": post(b"Transfer-Encoding: chunked, identity", body=GOOD_CHUNKS),
    "chunked_twice": post(CHUNKED, CHUNKED, body=GOOD_CHUNKS),
    "empty_coding": post(b"Transfer-Encoding:", body=GOOD_CHUNKS),
    "coding_in_http_1_0": post(
        CHUNKED, body=GOOD_CHUNKS, line=b"POST /v1/completions HTTP/1.0"
    ),
}
UNKNOWN_CODINGS = {
    "xchunked": post(b"Transfer-Encoding: xchunked", body=GOOD_CHUNKS),
    "identity": post(b"Transfer-Encoding: identity", body=CONTENT),
    "gzip": post(b"Transfer-Encoding: gzip, chunked", body=GOOD_CHUNKS),
    "quoted": post(b'Transfer-Encoding: "chunked"', body=GOOD_CHUNKS),
}


@every_delivery
@pytest.mark.parametrize("case", AMBIGUOUS)
def test_b32_ambiguous_framing_is_refused(
    pair: Cluster, case: str, delivery: str
) -> None:
    assert refusal(pair, DELIVERIES[delivery](AMBIGUOUS[case])).status == 400


@every_delivery
@pytest.mark.parametrize("case", UNKNOWN_CODINGS)
def test_b32_an_unknown_coding_is_refused(
    pair: Cluster, case: str, delivery: str
) -> None:
    pieces = DELIVERIES[delivery](UNKNOWN_CODINGS[case])
    assert refusal(pair, pieces).status in (400, 501)


# --- Chunked requests (B31, B67) ------------------------------------------------------

UTF8 = '{"prompt":"gr\u00fc\u00dfe \U0001f600","max_tokens":7,"x":[1e400, 1.10]}'


@every_delivery
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_b31_a_chunked_request_reaches_both_legs(
    pair: Cluster, size: int, path: str, delivery: str
) -> None:
    body = UTF8.encode()
    request = post(
        CHUNKED,
        b"Trailer: X-T",
        line=f"POST {path} HTTP/1.1".encode(),
        body=in_chunks(body, size, b";a=b;c") + b"0;d\r\nX-T: 1\r\n\r\n",
    )
    with pair.connect() as client, Pace(pair) as pace:
        pace.send(client, DELIVERIES[delivery](request))
        assert client.reader().finish().status == 200
        if delivery == "followed":
            assert client.reader().finish().status == 200
    for engine in pair.engines:
        leg = engine.next_request()
        assert leg.header("content-length") == str(len(leg.body))
        for name in ("transfer-encoding", "trailer", "x-t"):
            assert leg.header(name) is None
    sent, received = members(body), leg.members()
    assert {name: received[name] for name in sent} == sent
    assert received.keys() - sent.keys() == {"kv_transfer_params"}


def test_b31_large_chunks_cross_the_reads(pair: Cluster) -> None:
    prompt = "\u00e9" * (2 * MEBIBYTE)
    body = dumps({"prompt": prompt})
    with pair.connect() as client:
        client.send(chunked(in_chunks(body, 100_000), LAST_CHUNK))
        assert client.reader().finish().status == 200
    for engine in pair.engines:
        assert engine.next_request().json()["prompt"] == prompt


CHUNKS_REFUSED = {
    "bare_lf_after_size": chunked(b"e\n", CONTENT, b"\r\n", LAST_CHUNK),
    "bare_lf_after_data": chunked(b"e\r\n", CONTENT, b"\n", LAST_CHUNK),
    "bare_lf_at_the_end": chunked(in_chunks(CONTENT, 14), b"0\r\n\n"),
    "bare_cr_after_size": chunked(b"e\r", CONTENT, b"\r\n", LAST_CHUNK),
    "nothing_after_data": chunked(b"e\r\n", CONTENT, LAST_CHUNK),
    "data_beyond_the_size": chunked(b"d\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "no_digit": chunked(b"\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "only_extension": chunked(b";a\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "not_a_digit": chunked(b"1g\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "blank_first": chunked(b" e\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "blank_last": chunked(b"e \r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "prefix": chunked(b"0xe\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "plus": chunked(b"+e\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "minus": chunked(b"-e\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "underscore": chunked(b"0_e\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "17_digits": chunked(b"1000000000000000e\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "lf_in_quotes": chunked(b'e;a="b\nc"\r\n', CONTENT, b"\r\n", LAST_CHUNK),
    "crlf_in_quotes": chunked(b'e;a="b\r\nc"\r\n', CONTENT, b"\r\n", LAST_CHUNK),
    "cr_in_extension": chunked(b"e;a\rb\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "nul_in_extension": chunked(b"e;\0\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "control_in_extension": chunked(b"e;\x01\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "trailer_without_colon": chunked(in_chunks(CONTENT, 14), b"0\r\nX\r\n\r\n"),
    "trailer_without_name": chunked(in_chunks(CONTENT, 14), b"0\r\n: x\r\n\r\n"),
    "trailer_with_blank": chunked(in_chunks(CONTENT, 14), b"0\r\nX : x\r\n\r\n"),
    "trailer_folded": chunked(in_chunks(CONTENT, 14), b"0\r\nX: x\r\n y\r\n\r\n"),
    "trailer_with_cr": chunked(in_chunks(CONTENT, 14), b"0\r\nX: x\ry\r\n\r\n"),
    "trailer_with_lf": chunked(in_chunks(CONTENT, 14), b"0\r\nX: x\n\r\n"),
    "trailer_with_nul": chunked(in_chunks(CONTENT, 14), b"0\r\nX: \0\r\n\r\n"),
    "trailer_that_frames": chunked(GOOD_CHUNKS[:-2], b"Content-Length: 5\r\n\r\n"),
    "trailer_with_control": chunked(in_chunks(CONTENT, 14), b"0\r\nX: \x0b\r\n\r\n"),
}


@every_delivery
@pytest.mark.parametrize("case", CHUNKS_REFUSED)
def test_b67_malformed_chunks_are_refused(
    pair: Cluster, case: str, delivery: str
) -> None:
    assert refusal(pair, DELIVERIES[delivery](CHUNKS_REFUSED[case])).status == 400


ENDLESS = {
    "size": chunked(b"0" * MEBIBYTE),
    "extension": chunked(b"e;", b"a" * MEBIBYTE, b"\r\n"),
    "end_of_chunk": chunked(b"e\r\n", CONTENT, b"x" * MEBIBYTE),
    "trailer": chunked(in_chunks(CONTENT, 14), b"0\r\nX: ", b"x" * MEBIBYTE),
    "trailers": chunked(in_chunks(CONTENT, 14), b"0\r\n", b"X: xxx\r\n" * 100_000),
}


@pytest.mark.parametrize("piece", [MEBIBYTE * 2, 1000], ids=["whole", "dribbled"])
@pytest.mark.parametrize("case", ENDLESS)
def test_b67_endless_lines_between_chunks_are_refused(
    pair: Cluster, case: str, piece: int
) -> None:
    before = pair.proxy.resident_bytes()
    data = ENDLESS[case]
    pieces = [data[at : at + piece] for at in range(0, len(data), piece)]
    assert refusal(pair, pieces).status == 400
    assert pair.proxy.resident_bytes() - before < 16 * MEBIBYTE


@pytest.mark.parametrize(
    "start",
    [
        chunked(in_chunks(CONTENT, 14)),
        chunked(in_chunks(CONTENT, 14), b"0\r\n"),
        chunked(b"e\r\n", CONTENT[:-1]),
        post(LENGTH, body=CONTENT[:-1]),
        post(LENGTH),
        post(LENGTH)[:-1],
    ],
    ids=["last_chunk", "last_line", "data", "body", "all_of_body", "head"],
)
@pytest.mark.parametrize("leave", [RawClient.half_close, RawClient.reset])
def test_b67_b65_b71_a_request_that_ends_early_reaches_nobody(
    pair: Cluster, start: bytes, leave: Callable[[RawClient], None]
) -> None:
    with pair.connect() as client, Pace(pair) as pace:
        pace.send(client, [start])
        leave(client)
        if leave is RawClient.half_close:
            assert client.wait_closed() == b""
    assert_nobody_was_asked(pair)


# --- Syntax of heads (B68) ------------------------------------------------------------

HEADS_REFUSED = {
    "blank_before_colon": post(b"X : a", LENGTH, body=CONTENT),
    "no_colon": post(b"X", LENGTH, body=CONTENT),
    "no_name": post(b": a", LENGTH, body=CONTENT),
    "name_with_blank": post(b"X Y: a", LENGTH, body=CONTENT),
    "name_above_ascii": post(b"X\xff: a", LENGTH, body=CONTENT),
    "folded": post(b"X: a\r\n b", LENGTH, body=CONTENT),
    "folded_with_tab": post(b"X: a\r\n\tb", LENGTH, body=CONTENT),
    "folded_at_once": post(host=b" Host: proxy"),
    "no_host": post(LENGTH, host=b"", body=CONTENT),
    "empty_host": post(LENGTH, host=b"Host:", body=CONTENT),
    "two_hosts": post(b"Host: proxy", LENGTH, body=CONTENT),
    "host_with_blank": post(LENGTH, host=b"Host: a b", body=CONTENT),
    "host_with_path": post(LENGTH, host=b"Host: a/b", body=CONTENT),
    "host_with_user": post(LENGTH, host=b"Host: u@a", body=CONTENT),
    "nul_in_value": post(b"X: a\0b", LENGTH, body=CONTENT),
    "cr_in_value": post(b"X: a\rb", LENGTH, body=CONTENT),
    "cr_at_the_end_of_a_value": post(b"X: a\r", LENGTH, body=CONTENT),
    "cr_before_a_name": post(b"\rX: a", LENGTH, body=CONTENT),
    "lf_after_value": post(b"X: a\nY: b", LENGTH, body=CONTENT),
    "control_in_value": post(b"X: a\x01b", LENGTH, body=CONTENT),
    "delete_in_value": post(b"X: a\x7fb", LENGTH, body=CONTENT),
    "lf_after_request_line": b"POST /v1/completions HTTP/1.1\nHost: a\n\n",
    "lf_first": b"\n" + post(LENGTH, body=CONTENT),
    "blank_first": b" " + post(LENGTH, body=CONTENT),
    "two_blanks": post(line=b"POST  /v1/completions HTTP/1.1"),
    "two_blanks_later": post(line=b"POST /v1/completions  HTTP/1.1"),
    "blank_last": post(line=b"POST /v1/completions HTTP/1.1 "),
    "tab_for_blank": post(line=b"POST\t/v1/completions HTTP/1.1"),
    "no_version": post(line=b"POST /v1/completions"),
    "no_target": post(line=b"POST HTTP/1.1"),
    "lower_case_version": post(line=b"POST /v1/completions http/1.1"),
    "version_0_9": post(line=b"POST /v1/completions HTTP/0.9"),
    "version_2_0": post(line=b"POST /v1/completions HTTP/2.0"),
    "another_protocol": post(line=b"POST /v1/completions RTSP/1.0"),
    "control_in_target": post(line=b"POST /v1/comp\x01letions HTTP/1.1"),
    "target_above_ascii": post(line=b"POST /v1/comp\xe9 HTTP/1.1"),
    "relative_target": post(line=b"POST v1/completions HTTP/1.1"),
    "asterisk": post(line=b"OPTIONS * HTTP/1.1"),
    "authority": post(line=b"CONNECT proxy:80 HTTP/1.1"),
    "other_scheme": post(line=b"POST ftp://proxy/v1/completions HTTP/1.1"),
    "no_authority": post(line=b"POST http:///v1/completions HTTP/1.1"),
    "http_2_preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "length_before_request_line": b"\r\nContent-Length: 0\r\n" + post(),
}


@every_delivery
@pytest.mark.parametrize("case", HEADS_REFUSED)
def test_b68_malformed_heads_are_refused(
    pair: Cluster, case: str, delivery: str
) -> None:
    assert refusal(pair, DELIVERIES[delivery](HEADS_REFUSED[case])).status == 400


TOKEN = "!#$%&'*+-.^_`|~" + string.digits + string.ascii_letters

HEADS_SERVED = {
    "empty_line_first": b"\r\n" + post(LENGTH, body=CONTENT),
    "empty_lines_first": b"\r\n\r\n\r\n" + post(LENGTH, body=CONTENT),
    "absolute_form": post(
        LENGTH, line=b"POST http://h/v1/completions HTTP/1.1", body=CONTENT
    ),
    "absolute_form_with_port": post(
        LENGTH, line=b"POST HTTP://[::1]:80/v1/completions HTTP/1.1", body=CONTENT
    ),
    "query": post(LENGTH, line=b"POST /v1/completions?x=1&y HTTP/1.1", body=CONTENT),
    "bytes_above_ascii": post(b"X: \xff\x80", LENGTH, body=CONTENT),
    "empty_value": post(b"X:", LENGTH, body=CONTENT),
    "blanks_around_value": post(b"X: \t a \t ", LENGTH, body=CONTENT),
    "no_blank_before_value": post(b"X:a", LENGTH, body=CONTENT),
    "any_token": post(f"{TOKEN}: a".encode(), LENGTH, body=CONTENT),
    "blanks_around_length": post(b"content-length:\t 14 \t", body=CONTENT),
    "length_with_zeros": post(b"Content-Length: 00014", body=CONTENT),
    "coding_in_capitals": post(b"TRANSFER-ENCODING: CHUNKED", body=GOOD_CHUNKS),
    "offer_to_upgrade": post(
        b"Connection: upgrade", b"Upgrade: h2c", LENGTH, body=CONTENT
    ),
    "host_with_port": post(LENGTH, host=b"Host: [fe80::1]:8000", body=CONTENT),
    "host_with_dots": post(LENGTH, host=b"host:  a-b.example_1:80 ", body=CONTENT),
    "chunk_extension": chunked(in_chunks(CONTENT, 14, b";a=b"), LAST_CHUNK),
    "chunk_extension_with_blanks": chunked(
        in_chunks(CONTENT, 14, b' ; a="b c"'), LAST_CHUNK
    ),
    "capital_digits": chunked(b"E\r\n", CONTENT, b"\r\n", LAST_CHUNK),
    "zeros_before_size": chunked(b"00000000e\r\n", CONTENT, b"\r\n", b"000\r\n\r\n"),
    "trailers": chunked(GOOD_CHUNKS[:-2], b"X: \xff\tb\r\nHost:\r\n\r\n"),
}


@every_delivery
@pytest.mark.parametrize("case", HEADS_SERVED)
def test_b68_b67_what_is_legal_is_served(
    pair: Cluster, case: str, delivery: str
) -> None:
    pieces = DELIVERIES[delivery](HEADS_SERVED[case])
    with pair.connect() as client, Pace(pair) as pace:
        pace.send(client, pieces)
        prompts = ["a"]
        assert client.reader().finish().status == 200
        if delivery == "followed":
            prompts.append("second")
            assert client.reader().finish().status == 200
    for engine in pair.engines:
        assert [each.json()["prompt"] for each in engine.requests] == prompts


UPGRADES = {
    "websocket": {
        "Connection": "keep-alive, Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    },
    "h2c": {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": "h2c",
        "HTTP2-Settings": "AAMAAABkAAQAAP__",
    },
    "tls": {"Connection": "upgrade", "Upgrade": "TLS/1.2, HTTP/1.1"},
    "two lines": {"Connection": "Upgrade", "Upgrade": "websocket\r\nUpgrade: h2c"},
}


@pytest.mark.parametrize("offer", UPGRADES)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_offer_to_upgrade_is_ignored(pair: Cluster, method: str, offer: str) -> None:
    body = {"prompt": "a"} if method == "POST" else None
    with pair.connect() as client:
        # What follows is a request, not the other protocol.
        for _ in range(2):
            response = client.request(
                method, "/v1/realtime", body, UPGRADES[offer]
            ).finish()
            assert response.status == 200
            assert response.header("upgrade") is None
            leg = pair.d[0].next_request()
            for name in ("upgrade", "connection", "http2-settings"):
                assert leg.header(name) in (None, "keep-alive")


def test_b68_a_value_reaches_the_engine_byte_for_byte(pair: Cluster) -> None:
    with pair.connect() as client:
        client.send(post(b"X: \xff\x80 a\tb", LENGTH, body=CONTENT))
        assert client.reader().finish().status == 200
    for engine in pair.engines:
        assert dict(engine.next_request().headers)[b"X"] == b"\xff\x80 a\tb"


@pytest.mark.parametrize(
    ("sent", "reached"),
    [
        (b"http://h/v1/models?x=1", "/v1/models?x=1"),
        (b"HTTPS://u.example:1/a", "/a"),
        (b"http://h", "/"),
    ],
)
def test_b68_an_absolute_target_is_sent_on_as_a_path(
    pair: Cluster, sent: bytes, reached: str
) -> None:
    with pair.connect() as client:
        client.send(post(line=b"GET %b HTTP/1.1" % sent))
        assert client.reader("GET").finish().status == 200
    [leg] = pair.d[0].requests or pair.d[0].probes[-1:]
    assert leg.target == reached


def test_b68_an_unknown_path_is_the_engines_to_refuse(pair: Cluster) -> None:
    pair.d[0].answer(http_response(404, b'{"detail":"Not Found"}'))
    with pair.connect() as client:
        response = client.post("/nowhere", b"{}").finish()
        assert (response.status, response.body) == (404, b'{"detail":"Not Found"}')
        assert client.post(COMPLETIONS, BODY).finish().status == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", COMPLETIONS, {"POST"}),
        ("PUT", CHAT, {"POST"}),
        ("POST", "/status", {"GET"}),
        ("GET", "/instances/add", {"POST"}),
    ],
)
@pytest.mark.parametrize("body", [None, b"{}"])
def test_b68_a_wrong_method_is_405_and_the_connection_stays(
    pair: Cluster, method: str, path: str, allowed: set[str], body: bytes | None
) -> None:
    with pair.connect() as client:
        response = client.request(method, path, body).finish()
        assert response.status == 405
        assert response.error()["code"] == 405
        allow = response.header("allow")
        assert allow and allowed <= set(allow.split(", "))
        assert client.request("GET", "/status").finish().status == 200
    assert_nobody_was_asked(pair)


# --- Limits of heads (B69) ------------------------------------------------------------

MAX_HEAD_BYTES = 64 * KIBIBYTE
MAX_HEADERS = 256
MAX_TARGET_BYTES = 16 * KIBIBYTE


def padded(size: int) -> bytes:
    """A request whose head has `size` bytes."""
    rest = len(post(b"X: ", LENGTH))
    return post(b"X: " + b"x" * (size - rest), LENGTH, body=CONTENT)


def long_target(size: int) -> bytes:
    target = b"/v1/completions?" + b"x" * (size - 16)
    return post(LENGTH, line=b"POST %b HTTP/1.1" % target, body=CONTENT)


def many_fields(count: int) -> bytes:
    """A request with `count` fields besides its length."""
    fields = [b"X-%d: x" % number for number in range(count - 2)]
    return post(*fields, LENGTH, body=CONTENT)


@pytest.mark.parametrize(
    "data",
    [padded(MAX_HEAD_BYTES), long_target(MAX_TARGET_BYTES), many_fields(MAX_HEADERS)],
    ids=["head", "target", "fields"],
)
@pytest.mark.parametrize("size", [1 << 20, 1000], ids=["whole", "dribbled"])
def test_b69_heads_up_to_the_limits_are_served(
    pair: Cluster, data: bytes, size: int
) -> None:
    with pair.connect() as client, Pace(pair) as pace:
        pace.send(client, (data[at : at + size] for at in range(0, len(data), size)))
        assert client.reader().finish().status == 200


LARGE = 4 * MEBIBYTE
TOO_LARGE = {
    "head": (padded(MAX_HEAD_BYTES + 1), 431),
    "target": (long_target(MAX_TARGET_BYTES + 1), 414),
    "fields": (many_fields(MAX_HEADERS + 1), 431),
    "100000_fields": (many_fields(100_000), 431),
    "enormous_field": (post(b"X: " + b"x" * LARGE), 431),
    "enormous_name": (post(b"X" * LARGE), 431),
    "enormous_target": (long_target(LARGE), 414),
    "enormous_method": (b"P" * LARGE, 414),
}


@pytest.mark.parametrize("size", [1 << 30, 10_000], ids=["whole", "dribbled"])
@pytest.mark.parametrize("case", TOO_LARGE)
def test_b69_a_head_beyond_the_limits_is_refused(
    pair: Cluster, case: str, size: int
) -> None:
    data, status = TOO_LARGE[case]
    before = pair.proxy.resident_bytes()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert refusal(pair, pieces).status in (status, 400)
    assert pair.proxy.resident_bytes() - before < 16 * MEBIBYTE


@pytest.mark.soak
@pytest.mark.parametrize("start", [post(b"X: ")[:-4], b"POST /"])
def test_b69_soak_50_megabytes_of_head(pair: Cluster, start: bytes) -> None:
    before = pair.proxy.peak_resident_bytes()
    assert refusal(pair, [start, b"x" * (50 * MEBIBYTE)]).status in (431, 414)
    assert pair.proxy.peak_resident_bytes() - before < 16 * MEBIBYTE


# --- Slow requests (B70, B63) ---------------------------------------------------------

HASTY = {
    "TICK": 0.02,
    "HEAD_TIMEOUT": 0.2,
    "BODY_STALL_TIMEOUT": 0.2,
    "MIN_BODY_PROGRESS": 1000,
    "KEEP_ALIVE_TIMEOUT": 0.2,
}
# Seconds between two pieces of a sender that is slow, but not too slow.
STROLL = 0.02


@pytest.fixture(scope="module")
def _hasty() -> Iterator[Cluster]:
    with Cluster(limits=HASTY) as cluster:
        yield cluster


@pytest.fixture
def hasty(_hasty: Cluster) -> Iterator[Cluster]:
    """1P1D behind a proxy that waits 0.2 s for clients."""
    yield _hasty
    _hasty.settle()


def dribble(client: RawClient, pieces: Iterable[bytes]) -> Response:
    """Sends pieces at intervals until there is an answer; returns it."""
    reader = client.reader()
    client.socket.settimeout(STROLL)
    for piece in pieces:
        client.send(piece)
        try:
            client.unread(client.read_some())
        except TimeoutError:
            continue
        return reader.finish()
    raise AssertionError("all of it was taken")


SLOW = {
    "head": [post()[:-4], *[b"x"] * 1000],
    "body": [post(b"Content-Length: 1000000"), *[b"x"] * 1000],
    "chunks": [post(CHUNKED), *[chunk(b"x")] * 1000],
    "extension": [post(CHUNKED) + b"e;", *[b"x"] * 1000],
}


@pytest.mark.parametrize("case", SLOW)
def test_b70_a_request_that_drips_has_an_absolute_deadline(
    hasty: Cluster, case: str
) -> None:
    def drip() -> None:
        with hasty.connect() as client:
            response = dribble(client, SLOW[case])
            assert response.status == 408
            assert response.error()["code"] == 408
            assert client.wait_closed() == b""

    def serve() -> None:
        assert hasty.get("/status").status == 200

    gather([drip] * 20 + [serve] * 20)
    assert_nobody_was_asked(hasty)


@pytest.mark.parametrize(
    "start",
    [post()[:-4], post(LENGTH, body=CONTENT[:-1]), post(CHUNKED, body=b"5\r\n")],
    ids=["head", "body", "chunks"],
)
def test_b70_a_request_that_stops_is_408(hasty: Cluster, start: bytes) -> None:
    assert refusal(hasty, [start]).status == 408


def test_b70_a_connection_without_a_request_is_closed(hasty: Cluster) -> None:
    with hasty.connect() as silent, hasty.connect() as blank:
        blank.send(b"\r\n\r\n")
        assert silent.wait_closed() == b""
        assert blank.wait_closed() == b""


def stalled(cluster: Cluster) -> RawClient:
    """A client that will be sent away for sending half a request."""
    client = cluster.connect()
    client.send(post(LENGTH, body=CONTENT[:-1]))
    return client


@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_b70_a_slow_but_steady_upload_passes(hasty: Cluster, coding: str) -> None:
    white = b" " * 500
    with hasty.connect() as client:
        if coding == "chunked":
            client.send(post(CHUNKED, body=in_chunks(CONTENT, 14)))
            white = chunk(white)
        else:
            client.send(post(b"Content-Length: 100000", body=CONTENT))
        sent = len(CONTENT)
        # Others that stop come and go meanwhile, so several limits have passed.
        for _ in range(3):
            with stalled(hasty) as other:
                other.socket.settimeout(STROLL)
                while True:
                    client.send(white)
                    sent += 500
                    try:
                        other.read_some()
                        break
                    except TimeoutError:
                        continue
        end = LAST_CHUNK if coding == "chunked" else b" " * (100_000 - sent)
        client.send(end)
        assert client.reader().finish().status == 200


@pytest.mark.soak
def test_b70_soak_1400_slow_clients() -> None:
    starts = [post()[:-4]] * 1000 + [b""] * 200 + [post(CHUNKED, body=b"5\r\n")] * 200
    with Cluster(limits={"HEAD_TIMEOUT": 20.0, "BODY_STALL_TIMEOUT": 10.0}) as cluster:
        before = cluster.proxy.open_descriptors()
        clients = [cluster.connect() for _ in starts]
        for client, start in zip(clients, starts):
            client.send(start)
        dripping = clients[:1000]
        while dripping:
            for client in list(dripping):
                client.socket.settimeout(0)
                try:
                    client.send(b"x")
                    client.unread(client.read_some())
                    dripping.remove(client)
                except BlockingIOError:
                    continue
            assert cluster.get("/status").status == 200
        for client in clients:
            client.socket.settimeout(30)
            client.wait_closed()
            client.close()
        poll(lambda: cluster.proxy.open_descriptors() <= before, "all are gone", 30)


def expire(cluster: Cluster) -> None:
    """Returns when a connection that is idle from now on has been closed."""
    with cluster.connect() as idle:
        assert idle.request("GET", "/status").finish().status == 200
        assert idle.wait_closed() == b""


def test_b63_pipelined_requests_outlive_the_idle_limit(hasty: Cluster) -> None:
    gate = Gate()
    answer: list[Step] = [SSE_HEAD, chunk(event("1")), gate, chunk(DONE), LAST_CHUNK]
    hasty.d[0].answer(*answer)
    with hasty.connect() as client:
        client.send(
            http_request("POST", COMPLETIONS, STREAM)
            + http_request("GET", "/status")
            + http_request("POST", CHAT, BODY)
        )
        stream = client.reader()
        stream.body_until(event("1"))
        expire(hasty)
        expire(hasty)
        # Nothing of the second POST may be under way: answers keep their order.
        assert len(hasty.p[0].requests) == 1
        gate.release()
        assert stream.finish().events() == ["1", "[DONE]"]
        assert "instances" in client.reader("GET").finish().json()
        last = client.reader().finish()
        assert (last.status, last.extra) == (200, b"")
        assert last.json()["object"] == "chat.completion"


def test_b63_a_request_that_has_begun_is_not_idle() -> None:
    limits = HASTY | {"HEAD_TIMEOUT": 30.0}
    with Cluster(limits=limits) as cluster, cluster.connect() as client:
        assert client.request("GET", "/status").finish().status == 200
        request = http_request("GET", "/status")
        client.send(request[:-1])
        expire(cluster)
        client.send(request[-1:])
        assert client.reader("GET").finish().status == 200


def test_b63_a_request_that_arrives_with_the_end_of_an_answer(pair: Cluster) -> None:
    # What came before the answer was out must be read before what comes after it.
    gate = Gate()
    pair.d[0].answer(lambda request: [gate, *decode_answer(request)])
    with pair.connect() as client, Pace(pair) as pace:
        client.send(http_request("POST", COMPLETIONS, BODY))
        [d] = pair.d
        leg = d.next_request()
        pace.send(client, [SECOND[:50]])
        with pair.proxy.stopped():
            gate.release()
            poll(lambda: leg.answered, "the engine has answered")
            client.send(SECOND[50:])
        assert client.reader().finish().status == 200
        assert client.reader().finish().status == 200
    assert d.next_request().json()["prompt"] == "second"


# --- Pipelining without reading (B64) -------------------------------------------------

STATUS = http_request("GET", "/status")
# More than the kernel holds for one connection, both ways together.
FLOOD = 64 * MEBIBYTE
# Answers on the pace connection after which a sender that is blocked stays so: each
# takes the proxy one round of its loop at least, in which it handles one request.
ROUNDS = 2000


def flood(cluster: Cluster, client: RawClient, request: bytes) -> int:
    """Sends a request again and again until no more is taken; returns the bytes sent.

    Fails if `FLOOD` bytes are taken.
    """
    block = request * (65536 // len(request))
    sent = 0
    client.socket.setblocking(False)
    with Pace(cluster) as pace:
        rounds = 0
        while rounds < ROUNDS:
            try:
                sent += client.socket.send(block[sent % len(request) :])
                rounds = 0
            except BlockingIOError:
                pace.wait()
                rounds += 1
            assert sent < FLOOD, "the client is read without end"
    client.socket.settimeout(HANG_GUARD)
    return sent


def count_answers(client: RawClient, expected: int) -> None:
    """Returns when so many answers with a 200 have come."""
    start = b"HTTP/1.1 200 OK\r\n"
    found, rest = 0, b""
    while found < expected:
        received = client.read_some()
        assert received, f"{found} of {expected} answers"
        rest += received
        found += rest.count(start)
        rest = rest[1 - len(start) :]


def test_b64_a_client_that_does_not_read_is_not_read(pair: Cluster) -> None:
    before = pair.proxy.resident_bytes()
    with pair.connect(receive_buffer=1 << 14) as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        sent = flood(pair, client, STATUS)
        assert pair.proxy.resident_bytes() - before < 16 * MEBIBYTE
        assert_nobody_else_waits(pair)
        # Nothing was lost: all is answered once the client reads.
        count_answers(client, sent // len(STATUS))


def test_b64_streams_run_one_after_the_other(pair: Cluster) -> None:
    gate = Gate()
    start: list[Step] = [SSE_HEAD, chunk(event("1")), gate]
    endless = itertools.chain(start, itertools.repeat(chunk(b"x" * KIBIBYTE)))
    pair.d[0].answer(lambda _: endless)
    before = pair.proxy.resident_bytes()
    with pair.connect(receive_buffer=1 << 12) as client:
        flood(pair, client, http_request("POST", COMPLETIONS, STREAM))
        leg = pair.d[0].next_request()
        assert len(pair.p[0].requests) == 1
        assert pair.proxy.resident_bytes() - before < 16 * MEBIBYTE
        assert_nobody_else_waits(pair)
    gate.release()
    leg.wait_abandoned()
    pair.proxy.wait_idle()
    # One for the flood, one for the other client.
    assert [len(each.requests) for each in pair.engines] == [2, 2]


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset])
def test_b64_a_client_that_leaves_is_noticed_though_it_is_not_read(
    leave: Callable[[RawClient], None],
) -> None:
    with Cluster(limits={"TICK": 0.05}) as cluster:
        cluster.p[0].answer(Gate())
        client = cluster.connect()
        client.send(http_request("POST", COMPLETIONS, BODY))
        leg = cluster.p[0].next_request()
        client.send(STATUS * 2000)
        leave(client)
        leg.wait_abandoned()
        cluster.proxy.wait_idle()
        assert cluster.d[0].requests == []


def assert_nobody_else_waits(cluster: Cluster) -> None:
    """Fails if another client is not served."""
    assert cluster.post(COMPLETIONS, BODY).status == 200


# --- Clients that go (B65, B71) -------------------------------------------------------


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", ["prefill", "head", "body"])
def test_b65_a_client_that_half_closes_is_gone(
    pair: Cluster, phase: str, body: JSON
) -> None:
    gate = Gate()
    [p], [d] = pair.p, pair.d
    if phase == "prefill":
        p.answer(gate)
    else:
        d.answer(*[SSE_HEAD, chunk(event("1"))] * (phase == "body"), gate)
    with pair.connect() as client:
        reader = client.post(COMPLETIONS, body)
        leg = (p if phase == "prefill" else d).next_request()
        if phase == "body":
            reader.body_until(event("1"))
        client.half_close()
        leg.wait_abandoned()
        response = reader.finish()
        assert response.end is End.INCOMPLETE
        assert bool(response.status) == (phase == "body")
    assert len(d.requests) == (phase != "prefill")


def test_b65_requests_before_a_half_close_are_not_served(pair: Cluster) -> None:
    gate = Gate()
    pair.d[0].answer(gate)
    with pair.connect() as client:
        client.send(http_request("POST", COMPLETIONS, BODY) + SECOND)
        leg = pair.d[0].next_request()
        client.half_close()
        leg.wait_abandoned()
        assert client.wait_closed() == b""
    pair.p[0].next_request()
    assert_nobody_was_asked(pair)


def upload_and_leave(count: int) -> None:
    with Cluster() as cluster:
        before = cluster.proxy.open_sockets()
        half = post(b"Content-Length: %d" % MEBIBYTE, body=b" " * (MEBIBYTE // 2))
        clients = [cluster.connect() for _ in range(count)]
        for number, client in enumerate(clients):
            client.send(half)
            (RawClient.reset, RawClient.close)[number % 2](client)
        assert_nobody_was_asked(cluster)
        # The marker's connections to the engines may stay, and one probe.
        poll(lambda: cluster.proxy.open_sockets() <= before + 3, "all are gone")
        assert len(cluster.proxy.log) < 20, cluster.proxy.log


def test_b71_clients_that_vanish_while_they_upload() -> None:
    upload_and_leave(40)


@pytest.mark.soak
def test_b71_soak_500_clients_vanish() -> None:
    upload_and_leave(500)


# --- Early answers to uploads (B66) ---------------------------------------------------

LIMIT = 64 * KIBIBYTE


@pytest.fixture(scope="module")
def _limited() -> Iterator[Cluster]:
    with Cluster(args=["--max-body-size", str(LIMIT)]) as cluster:
        yield cluster


@pytest.fixture
def limited(_limited: Cluster) -> Iterator[Cluster]:
    """1P1D behind a proxy that takes bodies of 64 KiB."""
    yield _limited
    _limited.settle()


def uploads(size: int) -> dict[str, tuple[bytes, int]]:
    """Uploads that are refused before they end, and their status."""
    white, length = b" " * size, b"Content-Length: %d" % size
    text = post(length, body=white).replace(b"application/json", b"text/plain")
    chunks = chunked(chunk(b" " * 1000) * (size // 1000), LAST_CHUNK)
    engine_control = post(length, line=b"POST /sleep HTTP/1.1", body=white)
    return {
        "too_large": (post(length, body=white), 413),
        "too_large_in_chunks": (chunks, 413),
        "wrong_type": (text, 415),
        "wrong_method": (post(length, line=b"PUT /status HTTP/1.1", body=white), 405),
        "forbidden": (engine_control, 403),
        "malformed": (post(length, CHUNKED, body=white), 400),
    }


def refuse_uploads(cluster: Cluster, case: str, size: int, count: int) -> None:
    data, status = uploads(size)[case]
    before = cluster.proxy.resident_bytes()
    for _ in range(count):
        # The client writes everything before it reads.
        assert refusal(cluster, [data]).status == status
    assert cluster.proxy.resident_bytes() - before < 16 * MEBIBYTE


@pytest.mark.parametrize("case", uploads(0))
def test_b66_a_refused_upload_sees_why(
    pair: Cluster, limited: Cluster, case: str
) -> None:
    refuse_uploads(limited if "large" in case else pair, case, 4 * MEBIBYTE, 3)


@pytest.mark.soak
@pytest.mark.parametrize("case", uploads(0))
def test_b66_soak_fifty_large_uploads(
    pair: Cluster, limited: Cluster, case: str
) -> None:
    refuse_uploads(limited if "large" in case else pair, case, 20 * MEBIBYTE, 50)


@pytest.mark.parametrize("coding", ["length", "chunked"])
@pytest.mark.parametrize(("size", "status"), [(LIMIT, 200), (LIMIT + 1, 413)])
def test_b66_b33_the_limit_is_exact(
    limited: Cluster, coding: str, size: int, status: int
) -> None:
    body = CONTENT.ljust(size)
    with limited.connect() as client:
        if coding == "length":
            client.send(post(b"Content-Length: %d" % size, body=body))
        else:
            client.send(chunked(in_chunks(body, 1000), LAST_CHUNK))
        response = client.reader().finish()
    assert response.status == status
    for engine in limited.engines:
        assert len(engine.requests) == (status == 200)


def test_b66_an_upload_that_never_ends_is_dropped() -> None:
    limits = {"TICK": 0.02, "LINGER_TIMEOUT": 0.2}
    with Cluster(limits=limits) as cluster, cluster.connect() as client:
        client.send(post(b"Content-Length: 5", CHUNKED))
        assert client.reader().finish().status == 400
        white = b" " * KIBIBYTE
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while True:
                client.send(white)


# --- Content type and JSON (B53, B54) -------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "media_type",
    [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON",
        'application/json ;charset="utf-8"',
        "application/json;",
    ],
)
def test_b53_every_spelling_of_json_is_taken(
    pair: Cluster, path: str, media_type: str
) -> None:
    headers = {"Content-Type": media_type}
    assert pair.post(path, BODY, headers).status == 200
    for engine in pair.engines:
        assert engine.next_request().header("content-type") == media_type


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "field",
    [
        b"Content-Type: text/plain",
        b"Content-Type: application/jsonl",
        b"Content-Type: application/x-www-form-urlencoded",
        b"Content-Type:",
        b"",
    ],
)
def test_b53_other_types_are_415(pair: Cluster, path: str, field: bytes) -> None:
    start = b"POST %b HTTP/1.1\r\nHost: proxy\r\n" % path.encode()
    lines = start + (field + b"\r\n" if field else b"") + LENGTH
    with pair.connect() as client:
        client.send(lines + b"\r\n\r\n" + CONTENT)
        response = client.reader().finish()
        assert response.status == 415
        assert response.error()["code"] == 415
        # The request was all there, so the connection is in step.
        assert client.request("GET", "/status").finish().status == 200
    assert_nobody_was_asked(pair)


MALFORMED_JSON = {
    "empty": b"",
    "cut": b"{",
    "list": b"[]",
    "string": b'"x"',
    "null": b"null",
    "number": b"1",
    "two": b"{}{}",
    "trailing_comma": b'{"prompt":"a",}',
    "single_quotes": b"{'prompt':'a'}",
    "nan": b'{"prompt":"a","temperature":NaN}',
    "bad_utf_8": b'{"prompt":"\xff"}',
    "surrogate_in_utf_8": b'{"prompt":"\xed\xa0\x80"}',
    "utf_16": '{"prompt":"a"}'.encode("utf-16"),
    "byte_order_mark": b'\xef\xbb\xbf{"prompt":"a"}',
    "nested_lists": b"[" * 100_000,
    "nested_lists_within": b'{"prompt":' + b"[" * 100_000,
    "nested_objects": b'{"a":' * 100_000,
    "nested_and_closed": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "cut_emoji_and_more": b'{"prompt":"\\ud83d"',
    "nested_behind_cut_emoji": b'{"a":"\\ud83d","b":' + b"[" * 100_000,
    "members_behind_cut_emoji": b'{"a":"\\ud83d"' + b',"b":1' * 100_000 + b"}",
    "cut_emoji_in_a_name": b'{"\\ud83d":1}',
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("case", MALFORMED_JSON)
def test_b54_malformed_json_is_400(pair: Cluster, path: str, case: str) -> None:
    with pair.connect() as client:
        response = client.post(path, MALFORMED_JSON[case]).finish()
        assert response.status == 400
        assert response.error()["code"] == 400
        assert client.request("GET", "/status").finish().status == 200
    assert_nobody_was_asked(pair)


# --- Answers to errors keep the connection in step (B93) ------------------------------


def test_b93_a_connection_survives_every_error() -> None:
    limits = {"PROBE_INTERVAL_DOWN": 0.05, "PROBE_INTERVAL_UP": 1000.0}
    with Cluster(limits=limits) as cluster, cluster.connect() as client:
        [p], [d] = cluster.p, cluster.d

        def ask(path: str, body: bytes, **headers: str) -> Response:
            response = client.post(path, body, headers).finish()
            assert (response.end, response.extra) == (End.COMPLETE, b"")
            assert response.header("connection") is None
            return response

        d.answer(http_response(404, b'{"detail":"Not Found"}'))
        white = b" " * (50 * KIBIBYTE)
        assert ask("/nowhere", CONTENT + white).status == 404
        assert ask(COMPLETIONS, CONTENT, **{"Content-Type": "text/plain"}).status == 415
        assert ask(COMPLETIONS, b"{").status == 400
        d.answer(http_response(422, b"no"))
        assert ask(COMPLETIONS, CONTENT).status == 422
        d.answer(Close.RST)
        assert ask(COMPLETIONS, CONTENT).status == 502
        p.refuse()
        assert ask(COMPLETIONS, CONTENT).status == 502
        unavailable = ask(COMPLETIONS, CONTENT)
        assert unavailable.status == 503
        assert unavailable.header("retry-after")
        p.listen()
        cluster.proxy.wait_all_up()
        assert ask(COMPLETIONS, CONTENT).status == 200


# --- Expect: 100-continue (B62) -------------------------------------------------------

EXPECT = b"Expect: 100-continue"


@pytest.mark.parametrize("name", [EXPECT, b"expect:100-Continue"])
@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_b62_the_body_is_asked_for(pair: Cluster, coding: str, name: bytes) -> None:
    body = CONTENT.ljust(2 * MEBIBYTE)
    framing = b"Content-Length: %d" % len(body) if coding == "length" else CHUNKED
    with pair.connect() as client:
        client.send(post(name, framing))
        # Before any byte of the body.
        interim = client.read_some()
        assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
        whole = body if coding == "length" else in_chunks(body, 60_000) + LAST_CHUNK
        client.send(whole)
        response = client.reader().finish()
        assert (response.status, response.interim) == (200, [])
    for engine in pair.engines:
        assert engine.next_request().header("expect") is None


REFUSED_AT_ONCE = {
    "wrong_type": (
        post(EXPECT, b"Content-Length: 2000000").replace(b"n/json", b"n/xml"),
        415,
    ),
    "too_large": (post(EXPECT, b"Content-Length: %d" % (1 << 40)), 413),
    "wrong_method": (
        post(EXPECT, LENGTH, line=b"PUT /v1/completions HTTP/1.1"),
        405,
    ),
    "unknown_expectation": (post(b"Expect: 200-ok", LENGTH), 417),
    "two_expectations": (post(b"Expect: 100-continue, x", LENGTH), 417),
}


@pytest.mark.parametrize("case", REFUSED_AT_ONCE)
def test_b62_a_request_that_is_refused_needs_no_body(pair: Cluster, case: str) -> None:
    data, status = REFUSED_AT_ONCE[case]
    response = refusal(pair, [data])
    assert (response.status, response.interim) == (status, [])


def test_b62_http_1_0_knows_no_interim_answers(pair: Cluster) -> None:
    line = b"POST /v1/completions HTTP/1.0"
    with pair.connect() as client, Pace(pair) as pace:
        pace.send(client, [post(EXPECT, LENGTH, line=line), CONTENT])
        response = client.reader().finish()
        assert (response.status, response.interim) == (200, [])


def test_b62_a_body_that_is_there_is_not_asked_for(pair: Cluster) -> None:
    with pair.connect() as client:
        client.send(post(EXPECT, LENGTH, body=CONTENT))
        response = client.reader().finish()
        assert (response.status, response.interim) == (200, [])
        client.send(post(EXPECT, b"Content-Length: 0", line=b"GET /status HTTP/1.1"))
        response = client.reader().finish()
        assert (response.status, response.interim) == (200, [])


# --- HEAD, 204 and 304 (B60) ----------------------------------------------------------


def test_b60_head_of_the_proxys_own_routes(pair: Cluster) -> None:
    with pair.connect() as client:
        for path, status in (("/status", 200), ("/health", 200), (COMPLETIONS, 405)):
            head = client.request("HEAD", path).finish()
            assert (head.status, head.raw_body, head.extra) == (status, b"", b"")
            get = client.request("GET", path).finish()
            assert get.status == status
            assert head.header("content-length") == str(len(get.body))
            assert get.extra == b""


HEAD_REFUSALS = {
    "path": (b"HEAD //x HTTP/1.1", 400),
    "engine_control": (b"HEAD /sleep HTTP/1.1", 403),
}


@pytest.mark.parametrize("fields", [[], [b"Content-Length: 5"], [CHUNKED]])
@pytest.mark.parametrize("case", HEAD_REFUSALS)
def test_b60_a_refused_head_has_no_body(
    pair: Cluster, case: str, fields: list[bytes]
) -> None:
    line, status = HEAD_REFUSALS[case]
    with pair.connect() as client:
        client.send(post(*fields, line=line))
        response = client.reader("HEAD").finish()
        assert (response.status, response.extra) == (status, b"")
        if fields:
            assert client.read_some() == b""
        else:
            assert client.request("GET", "/status").finish().status == 200
    assert_nobody_was_asked(pair)


BODILESS = {
    "head": ("HEAD", 200, b"Content-Length: 5\r\n"),
    "head_without_length": ("HEAD", 200, b""),
    "head_chunked": ("HEAD", 200, b"Transfer-Encoding: chunked\r\n"),
    "204": ("GET", 204, b""),
    "204_with_length": ("GET", 204, b"Content-Length: 5\r\n"),
    "204_chunked": ("GET", 204, b"Transfer-Encoding: chunked\r\n"),
    "304": ("GET", 304, b""),
    "304_with_length": ("GET", 304, b"Content-Length: 5\r\n"),
    "304_chunked": ("GET", 304, b"Transfer-Encoding: chunked\r\n"),
}


@pytest.mark.parametrize("dated", [b"", b"Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"])
@pytest.mark.parametrize("case", BODILESS)
def test_b60_answers_without_a_body_stay_so(
    pair: Cluster, case: str, dated: bytes
) -> None:
    method, status, fields = BODILESS[case]
    head = b"HTTP/1.1 %d X\r\nETag: x\r\n%b%b\r\n" % (status, fields, dated)
    pair.d[0].answer(head)
    with pair.connect() as client:
        client.send(http_request(method, "/x") + STATUS)
        response = client.reader(method).finish()
        assert (response.status, response.end) == (status, End.COMPLETE)
        assert response.raw_body == b""
        assert response.header("etag") == "x"
        if status == 204:
            assert response.header("content-length") is None
            assert response.header("transfer-encoding") is None
        assert "instances" in client.reader("GET").finish().json()
    # The engine's connection is in step, too.
    assert_nobody_else_waits(pair)


# --- HTTP/1.0 clients (B61) -----------------------------------------------------------

OLD = b"POST /v1/completions HTTP/1.0"


def test_b61_a_stream_is_plain_and_ends_with_the_connection(pair: Cluster) -> None:
    for fields in ([], [b"Connection: keep-alive"]):
        body = dumps(STREAM)
        length = b"Content-Length: %d" % len(body)
        with pair.connect() as client:
            client.send(post(length, *fields, line=OLD, host=b"", body=body))
            received = client.wait_closed()
        head, _, stream = received.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert b"\r\nConnection: close" in head
        assert stream.startswith(b"data: {") and stream.endswith(DONE)


def test_b61_a_whole_answer_has_its_length(pair: Cluster) -> None:
    with pair.connect() as client:
        client.send(post(LENGTH, line=OLD, body=CONTENT))
        response = client.reader().finish()
        assert response.header("content-length") == str(len(response.body))
        assert response.header("transfer-encoding") is None
        assert response.header("connection") == "close"
        assert client.wait_closed() == b""


def test_b61_an_old_client_can_keep_its_connection(pair: Cluster) -> None:
    request = post(b"Connection: Keep-Alive", LENGTH, line=OLD, body=CONTENT)
    with pair.connect() as client:
        for _ in range(3):
            client.send(request)
            response = client.reader().finish()
            assert (response.status, response.extra) == (200, b"")
            assert response.header("connection") == "keep-alive"
            assert response.header("content-length") == str(len(response.body))


@pytest.mark.parametrize("status", [400, 500])
def test_b61_an_engines_chunks_are_taken_off(pair: Cluster, status: int) -> None:
    head = SSE_HEAD.replace(b"200 OK", b"%d X" % status)
    pair.d[0].answer(head, chunk(b"one") + chunk(b"two")[:5], b"o\r\n", b"0\r\nX: 1")
    pair.d[0].answer(head, chunk(b"one"), chunk(b"two"), b"0\r\nX: 1\r\n\r\n")
    with pair.connect() as client:
        client.send(post(line=b"GET /x HTTP/1.0"))
        pair.d[0].next_request()
    with pair.connect() as client:
        client.send(post(line=b"GET /x HTTP/1.0"))
        head, _, body = client.wait_closed().partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert body == b"onetwo"


# --- Connection: close (B89) ----------------------------------------------------------

BEHIND = {"request": SECOND, "empty_line": b"\r\n", "garbage": b"\0\0\0"}


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("case", BEHIND)
def test_b89_nothing_is_read_behind_connection_close(
    pair: Cluster, case: str, together: bool, body: JSON
) -> None:
    gate = Gate()
    pair.d[0].answer(lambda request: [gate, *decode_answer(request)])
    request = http_request("POST", COMPLETIONS, body, {"Connection": "close"})
    with pair.connect() as client, Pace(pair) as pace:
        if together:
            client.send(request + BEHIND[case])
        else:
            pace.send(client, [request, BEHIND[case]])
        for engine in pair.engines:
            engine.next_request()
        gate.release()
        response = client.reader().finish()
        assert (response.status, response.end) == (200, End.COMPLETE)
        assert response.header("connection") == "close"
        assert client.read_some() == b""
    assert_nobody_was_asked(pair)


# --- Request ids (B88) ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (b"a-b", b"a-b"),
        (b'"quoted" {id}'.replace(b" ", b""), b'"quoted"{id}'),
        (b"x" * 8192, b"x" * 512),
        (b"", None),
        (b"a b", None),
        (b"caf\xe9", None),
    ],
    ids=["plain", "quotes", "long", "empty", "blank", "not_ascii"],
)
def test_b88_a_clients_request_id_is_bounded_and_never_an_engines(
    pair: Cluster, given: bytes, returned: bytes | None
) -> None:
    with pair.connect() as client:
        client.send(post(b"X-Request-Id: " + given, LENGTH, body=CONTENT))
        response = client.reader().finish()
    assert response.status == 200
    assert dict(response.headers).get(b"X-Request-Id") == returned
    for engine in pair.engines:
        own = engine.next_request().header("x-request-id")
        assert own and own.isalnum() and own.isascii() and len(own) <= 512


def test_b88_an_engines_request_id_stays_with_the_engine(pair: Cluster) -> None:
    pair.d[0].answer(http_response(200, b"{}", {"X-Request-Id": "engine"}))
    assert pair.post(COMPLETIONS, BODY).header("x-request-id") is None


# --- Headers of answers (B56) ---------------------------------------------------------

DATE = "Sun, 06 Nov 1994 08:49:37 GMT"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_b56_headers_of_one_hop_stay_there(pair: Cluster, role: str) -> None:
    answer = http_response(
        429,
        b'{"x":1}',
        {
            "Connection": "X-Hop, close ,x-Hop-2",
            "X-Hop": "1",
            "x-hop-2": "1",
            "Keep-Alive": "timeout=5",
            "Proxy-Connection": "keep-alive",
            "X-Keep": "2",
            "Retry-After": "3",
            "Date": DATE,
            "Server": "engine/1",
        },
    )
    (pair.p if role == "prefill" else pair.d)[0].answer(answer)
    with pair.connect() as client:
        response = client.post(COMPLETIONS, BODY).finish()
        assert (response.status, response.body) == (429, b'{"x":1}')
        for name in ("x-hop", "x-hop-2", "keep-alive", "connection"):
            assert response.header(name) is None
        assert response.header("proxy-connection") is None
        kept = {"x-keep": "2", "retry-after": "3", "date": DATE, "server": "engine/1"}
        assert {name: response.header(name) for name in kept} == kept
        # The engine's Connection: close was about the engine's connection.
        assert client.post(COMPLETIONS, BODY).finish().status == 200


def test_b56_an_answer_has_one_date(pair: Cluster) -> None:
    pair.d[0].answer(http_response(200, b"{}"))
    assert pair.post(COMPLETIONS, BODY).header("date")
    pair.d[0].answer(http_response(200, b"{}", {"date": DATE}))
    assert pair.post(COMPLETIONS, BODY).header("date") == DATE
    assert pair.get("/status").header("date")


def test_b56_a_coding_of_the_content_is_left_alone(pair: Cluster) -> None:
    packed = gzip.compress(b'{"x":1}' * 100)
    pair.d[0].answer(http_response(200, packed, {"Content-Encoding": "gzip"}))
    response = pair.post(COMPLETIONS, BODY, {"Accept-Encoding": "gzip"})
    assert response.body == packed
    assert response.header("content-encoding") == "gzip"
    assert response.header("content-length") == str(len(packed))
    assert pair.p[0].next_request().header("accept-encoding") == "identity"
    assert pair.d[0].next_request().header("accept-encoding") == "gzip"


def test_b56_the_type_of_an_answer_is_the_engines(pair: Cluster) -> None:
    whole = pair.post(COMPLETIONS, BODY)
    assert whole.header("content-type") == "application/json"
    stream = pair.post(COMPLETIONS, STREAM)
    assert stream.header("content-type") == "text/event-stream; charset=utf-8"


def test_b56_repeated_headers_of_an_answer_stay_repeated(pair: Cluster) -> None:
    head = b"HTTP/1.1 200 OK\r\nX: 1\r\nSet-Cookie: a=b\r\nx:2\r\nSet-Cookie: c=d\r\n"
    pair.d[0].answer(head + b"Content-Length: 2\r\n\r\n{}")
    response = pair.post(COMPLETIONS, BODY)
    cookies = [value for name, value in response.headers if name == b"Set-Cookie"]
    assert cookies == [b"a=b", b"c=d"]
    assert b"\r\nX: 1\r\nSet-Cookie: a=b\r\nx:2\r\n" in response.raw


# --- How an engine's answer ends (B59, B76) -------------------------------------------

PLAIN = b"Content-Type: text/plain\r\n"
WITHOUT_LENGTH = {
    "http_1_0": b"HTTP/1.0 200 OK\r\n" + PLAIN + b"\r\n",
    "connection_close": b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + PLAIN + b"\r\n",
    "nothing_said": b"HTTP/1.1 200 OK\r\n" + PLAIN + b"\r\n",
    "keep_alive": b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n" + PLAIN + b"\r\n",
}


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
@pytest.mark.parametrize("case", WITHOUT_LENGTH)
def test_b59_a_body_that_ends_with_its_connection(
    pair: Cluster, case: str, version: bytes
) -> None:
    one, two = Gate(), Gate()
    head = WITHOUT_LENGTH[case]
    pair.d[0].answer(head, b"one", one, b"two", two, b"three", Close.FIN)
    with pair.connect() as client:
        client.send(post(LENGTH, line=b"POST /v1/completions " + version, body=CONTENT))
        reader = client.reader()
        reader.body_until(b"one")
        one.release()
        reader.body_until(b"two")
        two.release()
        response = reader.finish()
        assert (response.body, response.end) == (b"onetwothree", End.COMPLETE)
        chunked_coding = "chunked" if version == b"HTTP/1.1" else None
        assert response.header("transfer-encoding") == chunked_coding
        if chunked_coding:
            assert client.post(COMPLETIONS, BODY).finish().status == 200
    assert_nobody_else_waits(pair)
    connections = [each.connection for each in pair.d[0].requests]
    assert connections[0] not in connections[1:]


@pytest.mark.parametrize("case", WITHOUT_LENGTH)
def test_b59_a_hand_over_that_ends_with_its_connection(
    pair: Cluster, case: str
) -> None:
    def answer(request: EngineRequest) -> list[Step]:
        body = dumps({"kv_transfer_params": hand_over(request)})
        head = WITHOUT_LENGTH[case].replace(b"text/plain", b"application/json")
        return [head, body[:10], body[10:50], body[50:], Close.FIN]

    pair.p[0].answer(answer)
    assert pair.post(COMPLETIONS, BODY).status == 200
    [p], [d] = pair.p[0].requests, pair.d[0].requests
    assert d.members()["kv_transfer_params"] == p.handed_over()
    assert_nobody_else_waits(pair)
    assert pair.p[0].requests[1].connection != p.connection


def test_b59_an_empty_body_that_ends_with_its_connection(pair: Cluster) -> None:
    pair.d[0].answer(WITHOUT_LENGTH["nothing_said"], Close.FIN)
    response = pair.post(COMPLETIONS, BODY)
    assert (response.status, response.body) == (200, b"")
    assert response.end is End.COMPLETE


def whole(body: bytes, *fields: bytes) -> bytes:
    """An answer with a length."""
    lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *fields]
    return b"\r\n".join([*lines, b"", body])


ENDINGS = {
    "length": whole(b"body", b"Connection: close"),
    "chunked": SSE_HEAD + chunk(b"body") + LAST_CHUNK,
    "trailers": SSE_HEAD + chunk(b"body") + b"0\r\nX: 1\r\n\r\n",
    "close": WITHOUT_LENGTH["nothing_said"] + b"body",
    "bodiless": b"HTTP/1.1 204 No Content\r\n\r\n",
}


@pytest.mark.parametrize("case", ENDINGS)
def test_b76_the_last_bytes_and_the_end_arrive_together(
    pair: Cluster, case: str
) -> None:
    gate = Gate()
    pair.d[0].answer(gate, ENDINGS[case], Close.FIN)
    with pair.connect() as client:
        reader = client.post(COMPLETIONS, BODY)
        leg = pair.d[0].next_request()
        with pair.proxy.stopped():
            gate.release()
            # The engine's end of the connection closes when all of it is sent.
            poll(lambda: leg.answered, "the engine has answered")
            pair.d[0].drop_connections()
        response = reader.finish()
        body = b"" if case == "bodiless" else b"body"
        assert (response.body, response.end) == (body, End.COMPLETE)
        assert client.post(COMPLETIONS, BODY).finish().status == 200
    assert pair.d[0].requests[1].connection != leg.connection


def test_b76_a_hand_over_and_the_end_arrive_together(pair: Cluster) -> None:
    gate = Gate()
    pair.p[0].answer(lambda request: [gate, *prefill_answer(request), Close.FIN])
    with pair.connect() as client:
        reader = client.post(COMPLETIONS, BODY)
        leg = pair.p[0].next_request()
        with pair.proxy.stopped():
            gate.release()
            poll(lambda: leg.answered, "the engine has answered")
            pair.p[0].drop_connections()
        assert reader.finish().status == 200
    assert len(pair.p[0].requests) == 1


EVIL = whole(b"evil")
DATE_LINE = b"Date: Mon, 30 Nov 2026 10:00:00 GMT"
EXTRA = {
    "length": whole(b"body"),
    "chunked": SSE_HEAD + chunk(b"body") + LAST_CHUNK,
    "chunked_error": SSE_HEAD.replace(b"200", b"400") + chunk(b"body") + LAST_CHUNK,
    "empty": whole(b""),
    "304": b"HTTP/1.1 304 X\r\nContent-Length: 4\r\n%b\r\n\r\n" % DATE_LINE,
}


# The last is as long as a 304 says that its body would be.
@pytest.mark.parametrize("extra", [EVIL, b"\r\n", b"x", b"evil"])
@pytest.mark.parametrize("case", EXTRA)
def test_b76_bytes_behind_an_answer_reach_nobody(
    pair: Cluster, case: str, extra: bytes
) -> None:
    pair.d[0].answer(EXTRA[case] + extra)
    with pair.connect() as client:
        response = client.post(COMPLETIONS, BODY).finish()
        assert response.body == (b"" if case in ("empty", "304") else b"body")
        assert (response.end, response.extra) == (End.COMPLETE, b"")
        assert client.post(COMPLETIONS, BODY).finish().json()["choices"]
    first, second = pair.d[0].requests
    assert first.connection != second.connection


def test_b76_a_body_behind_the_answer_to_head_reaches_nobody(pair: Cluster) -> None:
    pair.d[0].answer(whole(b"evil", DATE_LINE))
    with pair.connect() as client:
        response = client.request("HEAD", "/v1/models").finish()
        assert (response.header("content-length"), response.body) == ("4", b"")
        assert (response.end, response.extra) == (End.COMPLETE, b"")
        assert client.post(COMPLETIONS, BODY).finish().json()["choices"]
    first, second = pair.d[0].requests
    assert first.connection != second.connection


def test_b76_bytes_behind_a_hand_over_reach_nobody(pair: Cluster) -> None:
    def answer(request: EngineRequest) -> list[Step]:
        [response] = prefill_answer(request)
        assert isinstance(response, bytes)
        return [response + EVIL]

    pair.p[0].answer(answer)
    for _ in "12":
        assert pair.post(COMPLETIONS, BODY).json()["choices"]
    first, second = pair.p[0].requests
    assert first.connection != second.connection


def test_b76_bytes_on_an_idle_connection_end_it(pair: Cluster) -> None:
    gate = Gate()
    pair.d[0].answer(whole(b"body"), gate, EVIL, Gate())
    assert pair.post(COMPLETIONS, BODY).body == b"body"
    [leg] = pair.d[0].requests
    gate.release()
    leg.wait_abandoned()
    assert pair.post(COMPLETIONS, BODY).json()["choices"]


# --- Interim answers ------------------------------------------------------------------

INTERIM = [
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 102 Processing\r\nX: 1\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n",
]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_interim_answers_are_not_the_answer(
    pair: Cluster, role: str, together: bool
) -> None:
    def answer(request: EngineRequest) -> list[Step]:
        final = prefill_answer if role == "prefill" else decode_answer
        steps = [*INTERIM, *final(request)]
        joined = b"".join(each for each in steps if isinstance(each, bytes))
        if together:
            return [joined]
        return [joined[at : at + 1] for at in range(len(joined))]

    (pair.p if role == "prefill" else pair.d)[0].answer(answer)
    with pair.connect() as client:
        response = client.post(COMPLETIONS, BODY).finish()
        assert response.status == 200
        assert response.json()["choices"]
        assert response.header("x") is None
    [d] = pair.d[0].requests
    assert "kv_transfer_params" in d.members()


# --- Malformed answers ----------------------------------------------------------------

OK_LINE = b"HTTP/1.1 200 OK\r\n"
ANSWERS_REFUSED = {
    "length_and_coding": OK_LINE + LENGTH + b"\r\n" + CHUNKED + b"\r\n\r\n",
    "two_lengths": OK_LINE + LENGTH + b"\r\nContent-Length: 2\r\n\r\n",
    "odd_length": OK_LINE + b"Content-Length: +2\r\n\r\n",
    "unknown_coding": OK_LINE + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "folded": OK_LINE + b"X: a\r\n b\r\n\r\n",
    "bare_lf": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n\r\n\r\n",
    "bare_lf_in_head": OK_LINE + b"X: a\nContent-Length: 0\r\n\r\n",
    "nul": OK_LINE + b"X: \0\r\nContent-Length: 0\r\n\r\n",
    "nul_in_reason": b"HTTP/1.1 200 \0\r\nContent-Length: 0\r\n\r\n",
    "blank_before_colon": OK_LINE + b"Content-Length : 0\r\n\r\n",
    "empty_line_first": b"\r\n" + OK_LINE + b"Content-Length: 0\r\n\r\n",
    "version_2_0": b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "version_0_9": b"HTTP/0.9 200 OK\r\nContent-Length: 0\r\n\r\n",
    "another_protocol": b"ICE/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "status_below_100": b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n" + EVIL,
    "status_of_zero": b"HTTP/1.1 000 OK\r\nContent-Length: 0\r\n\r\n" + EVIL,
    "status_of_two_digits": b"HTTP/1.1 20 OK\r\nContent-Length: 0\r\n\r\n",
    "switch_of_protocols": (
        b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n" + EVIL
    ),
    "too_many_bytes": OK_LINE + b"X: " + b"x" * (65 * KIBIBYTE) + b"\r\n\r\n",
    "endless": OK_LINE + b"X: " + b"x" * MEBIBYTE,
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("case", ANSWERS_REFUSED)
def test_a_malformed_answer_is_502(pair: Cluster, case: str, role: str) -> None:
    engine = (pair.p if role == "prefill" else pair.d)[0]
    engine.answer(ANSWERS_REFUSED[case], Gate())
    with pair.connect() as client:
        response = client.post(COMPLETIONS, BODY).finish()
        assert response.status == 502
        response.error()
        engine.requests[0].wait_abandoned()
        assert client.post(COMPLETIONS, BODY).finish().json()["choices"]


@pytest.mark.parametrize("body", [b"x\r\n", b"5\nhello", b"2\r\nabc\r\n", b"-1\r\n"])
@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
def test_malformed_chunks_cut_an_answer_that_has_begun(
    pair: Cluster, body: bytes, version: bytes
) -> None:
    gate = Gate()
    pair.d[0].answer(SSE_HEAD + chunk(b"good"), gate, body, Gate())
    with pair.connect() as client:
        client.send(post(LENGTH, line=b"POST /v1/completions " + version, body=CONTENT))
        reader = client.reader()
        reader.body_until(b"good")
        gate.release()
        response = reader.finish()
        assert response.body == b"good"
        # Without a framing that could be left open there is only a reset.
        old = version == b"HTTP/1.0"
        assert response.reset if old else response.end is End.INCOMPLETE
    pair.d[0].requests[0].wait_abandoned()


def test_an_old_engine_with_chunks_is_not_asked_again_there(pair: Cluster) -> None:
    # RFC 9112 section 6.1: such framing is faulty, so the connection must close.
    head = SSE_HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
    head = head.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n")
    pair.d[0].answer(head, chunk(b"body"), LAST_CHUNK)
    assert pair.post(COMPLETIONS, BODY).body == b"body"
    assert_nobody_else_waits(pair)
    first, second = pair.d[0].requests
    assert first.connection != second.connection


def test_thousands_of_interim_answers_are_none_of_the_clients_business(
    pair: Cluster,
) -> None:
    interim = INTERIM[0] * 5000
    pair.p[0].answer(lambda request: [interim, *prefill_answer(request)])
    pair.d[0].answer(lambda request: [interim, *decode_answer(request)])
    assert pair.post(COMPLETIONS, BODY).status == 200


@pytest.mark.parametrize("raw", [True, False])
def test_b67_bytes_behind_a_chunk_are_refused_before_their_line_ends(raw: bool) -> None:
    body = Chunked(raw)
    assert body.feed(b"3\r\nabc\r") == (b"3\r\nabc\r" if raw else b"abc")
    with pytest.raises(ValueError, match="longer than its size"):
        Chunked(raw).feed(b"3\r\nabcd")
