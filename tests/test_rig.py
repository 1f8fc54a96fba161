# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The rig against itself: what a test reads from it is what was on the wire."""

from collections.abc import Iterator

import pytest
from rig import (
    COMPLETIONS,
    DONE,
    LAST_CHUNK,
    SSE_HEAD,
    Close,
    End,
    Gate,
    RawClient,
    ScriptedEngine,
    chunk,
    event,
    http_request,
    http_response,
    members,
)


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine("decode") as engine:
        yield engine


@pytest.fixture
def client(engine: ScriptedEngine) -> Iterator[RawClient]:
    with RawClient((engine.host, engine.port)) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", {}),
        (b" { } \r\n", {}),
        (b'{"a":1e-7}', {"a": b"1e-7"}),
        (b'{ "a" : [1, 2] ,\t"b": {"a": "}"} }', {"a": b"[1, 2]", "b": b'{"a": "}"}'}),
        (b'{"\\u0061":"\\ud83d"}', {"a": b'"\\ud83d"'}),
        ('{"ä":"é"}'.encode(), {"ä": '"é"'.encode()}),
    ],
)
def test_members_keep_raw_values(body: bytes, expected: dict[str, bytes]) -> None:
    assert members(body) == expected


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"a":1', b'{"a":1,}', b'{"a":1,"a":2}', b'{"a":1}x', b'{"a" 1}'],
)
def test_members_refuse_what_is_not_one_object_with_unique_names(body: bytes) -> None:
    with pytest.raises(ValueError):
        members(body)


def test_a_request_is_recorded_as_sent_whatever_its_segments(
    engine: ScriptedEngine, client: RawClient
) -> None:
    request = http_request("POST", "/x?y=1", b'{"a":1}', {"X-Case": "V"})
    client.send(*(request[at : at + 1] for at in range(len(request))))
    assert client.reader().finish().json() == {"served": "/x?y=1"}
    seen = engine.next_request()
    assert seen.line == b"POST /x?y=1 HTTP/1.1"
    assert seen.headers[-1] == (b"X-Case", b"V")
    assert seen.body == b'{"a":1}'
    assert not seen.abandoned.is_set()


def test_pipelined_requests_are_answered_in_order(client: RawClient) -> None:
    client.send(http_request("POST", "/a", b"{}") + http_request("POST", "/b", b"{}"))
    assert client.reader().finish().json() == {"served": "/a"}
    assert client.reader().finish().json() == {"served": "/b"}


def test_a_gate_holds_the_answer(engine: ScriptedEngine, client: RawClient) -> None:
    gate = Gate()
    engine.answer(SSE_HEAD, chunk(event("1")), gate, chunk(DONE), LAST_CHUNK)
    reader = client.post("/x", b"{}")
    assert reader.body_until(b"1\n\n") == event("1")
    gate.release()
    assert reader.finish().events() == ["1", "[DONE]"]


@pytest.mark.parametrize("close", Close)
@pytest.mark.parametrize(
    "start",
    [
        SSE_HEAD + chunk(b"data"),
        http_response(200, b"12345")[:-1],
        b"HTTP/1.1 200",
        b"",
    ],
)
def test_a_cut_response_is_incomplete(
    engine: ScriptedEngine, client: RawClient, start: bytes, close: Close
) -> None:
    gate = Gate()
    engine.answer(start, gate, close)
    reader = client.post("/x", b"{}")
    received = b""
    while len(received) < len(start):
        received += client.read_some()
    client.unread(received)
    gate.release()
    response = reader.finish()
    assert response.end is End.INCOMPLETE
    assert response.reset == (close is Close.RST)
    assert response.raw == start


def test_bytes_after_the_end_are_extra(
    engine: ScriptedEngine, client: RawClient
) -> None:
    engine.answer(http_response(200, b"12345") + b"!", Close.FIN)
    response = client.post("/x", b"{}").finish()
    assert (response.body, response.end) == (b"12345", End.COMPLETE)
    assert response.extra == b"!"
    assert client.wait_closed() == b"!"


def test_a_response_that_is_not_http_is_refused(
    engine: ScriptedEngine, client: RawClient
) -> None:
    engine.answer(b"nonsense\r\n\r\n")
    with pytest.raises(Exception, match="illegal"):
        client.post("/x", b"{}").finish()


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset])
def test_an_engine_notices_that_its_peer_leaves(
    engine: ScriptedEngine, client: RawClient, leave: object
) -> None:
    assert callable(leave)
    engine.answer(Gate())
    client.send(http_request("POST", "/x", b"{}"))
    request = engine.next_request()
    leave(client)
    request.wait_abandoned()


def test_an_early_answer_does_not_wait_for_the_body(
    engine: ScriptedEngine, client: RawClient
) -> None:
    engine.answer_early(http_response(413))
    request = http_request("POST", "/x", b"12345")
    client.send(request[:-1])
    assert client.reader().finish().status == 413
    client.send(request[-1:])
    assert client.post("/y", b"{}").finish().json() == {"served": "/y"}


def test_an_engine_refuses_and_returns_on_its_port(engine: ScriptedEngine) -> None:
    address = engine.host, engine.port
    engine.refuse()
    with pytest.raises(ConnectionRefusedError):
        RawClient(address)
    engine.listen()
    with RawClient(address) as client:
        assert client.request("GET", "/health").finish().status == 200


def test_swallowed_connects_stay_open(engine: ScriptedEngine) -> None:
    engine.swallow_connects()
    with RawClient((engine.host, engine.port), wait=False) as client:
        client.socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.send(http_request("GET", "/health"))


def test_what_is_not_http_is_a_fault(client: RawClient, engine: ScriptedEngine) -> None:
    client.send(b"nonsense\r\n\r\n")
    client.wait_closed()
    with pytest.raises(AssertionError):
        engine.check()


def test_hand_overs_differ() -> None:
    with (
        ScriptedEngine("prefill") as engine,
        RawClient((engine.host, engine.port)) as client,
    ):
        bodies = [client.post(COMPLETIONS, {"max_tokens": 1}).finish() for _ in "12"]
    assert (
        len({each.json()["kv_transfer_params"]["remote_request_id"] for each in bodies})
        == 2
    )
