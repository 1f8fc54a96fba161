# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""moriio_proxy.py: registrations over ZMQ, and both legs of a request.

What an engine would understand is judged by the simulated engine and by its readers
of request ids, which know the connector's patterns and none of the proxy's code.
"""

import contextlib
import signal
import socket
from collections import Counter
from collections.abc import Iterator

import msgpack
import pytest
from moriio_rig import (
    MORIIO_PROXY,
    REFUSED,
    Fleet,
    Peer,
    Proxy,
    ids,
    registration,
    simulated,
)
from rig import (
    CHAT,
    COMPLETIONS,
    JSON,
    LAST_CHUNK,
    ROOT,
    SSE_HEAD,
    Close,
    End,
    EngineRequest,
    Gate,
    Play,
    Response,
    ScriptedEngine,
    Step,
    chunk,
    event,
    http_request,
    http_response,
    openai_error,
    poll,
    run_to_exit,
)

RECORDED = ROOT / "tests" / "data" / "moriio_registrations.bin"
MODES = ("READ", "WRITE")
PROMPT: JSON = {"prompt": "hello", "max_tokens": 4}
MESSAGES: JSON = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def _shared_fleets() -> Iterator[dict[str, Fleet]]:
    with contextlib.ExitStack() as stack:
        yield {mode: stack.enter_context(Fleet(mode=mode)) for mode in MODES}


@contextlib.contextmanager
def registered(fleet: Fleet) -> Iterator[Fleet]:
    """A shared fleet, in the state in which it was made."""
    for each in fleet.engines:
        fleet.register(each)
    yield fleet
    fleet.settle()


@pytest.fixture(params=MODES)
def fleet(
    request: pytest.FixtureRequest, _shared_fleets: dict[str, Fleet]
) -> Iterator[Fleet]:
    """1P1D in each mode, shared by the module, with fresh records and scripts."""
    with registered(_shared_fleets[request.param]) as fleet:
        yield fleet


@pytest.fixture
def read(_shared_fleets: dict[str, Fleet]) -> Iterator[Fleet]:
    """The one in READ mode."""
    with registered(_shared_fleets["READ"]) as fleet:
        yield fleet


@pytest.fixture
def write(_shared_fleets: dict[str, Fleet]) -> Iterator[Fleet]:
    """The one in WRITE mode."""
    with registered(_shared_fleets["WRITE"]) as fleet:
        yield fleet


def legs(fleet: Fleet) -> tuple[EngineRequest, EngineRequest]:
    """The next leg of the first P and of the first D."""
    return fleet.p[0].next_request(), fleet.d[0].next_request()


def params(leg: EngineRequest) -> JSON:
    """The `kv_transfer_params` of a leg."""
    found: JSON = leg.json()["kv_transfer_params"]
    return found


# --- What each leg carries ------------------------------------------------------------

# Of either mode's P leg, but for the ids.
TO_PREFILL: JSON = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_dp_size": 1,
    "remote_tp_size": 4,
}
# Of a D leg in WRITE mode.
TO_DECODE: JSON = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_dp_size": 1,
    "remote_tp_size": 2,
}
# What a P of vLLM 0.33.0 answers (`request_finished`).
HAND_OVER: JSON = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 5, 7]],
    "remote_engine_id": "10.0.0.1:7000",
    "remote_host": "10.0.0.1",
    "remote_handshake_port": "7000",
    "remote_notify_port": "7001",
    "remote_dp_rank": 0,
    "remote_dp_rank_override": True,
    "remote_dp_size": 1,
    "remote_dp_size_local": 1,
    "tp_size": 2,
    "a_field_of_tomorrow": {"x": [1]},
}


def answer_with(hand_over: JSON | None) -> Play:
    """A P that hands this over, with the transfer id it was given."""

    def play(request: EngineRequest) -> list[Step]:
        handed = hand_over and hand_over | {
            "transfer_id": params(request)["transfer_id"]
        }
        return [http_response(200, {"choices": [], "kv_transfer_params": handed})]

    return play


def test_the_parameters_of_both_legs_in_write_mode() -> None:
    sizes: tuple[JSON, JSON] = ({"tp_size": 2}, {"tp_size": 4})
    with Fleet(mode="WRITE", sizes=sizes) as fleet:
        assert fleet.post(PROMPT).status == 200
        p, d = legs(fleet)
        transfer = {"transfer_id": ids(p).transfer}
        assert params(p) == TO_PREFILL | transfer
        assert params(d) == TO_DECODE | transfer
        for leg in (p, d):
            assert leg.header("x-data-parallel-rank") is None


def test_the_parameters_of_both_legs_in_read_mode() -> None:
    sizes: tuple[JSON, JSON] = ({"tp_size": 2}, {"tp_size": 4})
    with Fleet(mode="READ", sizes=sizes) as fleet:
        fleet.p[0].answer(answer_with(HAND_OVER))
        assert fleet.post(PROMPT).status == 200
        p, d = legs(fleet)
        transfer = {"transfer_id": ids(p).transfer}
        assert params(p) == TO_PREFILL | transfer
        # Its override would silence a D that runs on another rank than P's.
        handed = {**HAND_OVER}
        del handed["remote_dp_rank_override"]
        assert params(d) == TO_DECODE | handed | transfer


def test_every_key_that_the_scheduler_indexes_is_there(fleet: Fleet) -> None:
    assert fleet.post(PROMPT).status == 200
    for leg in legs(fleet):
        assert {"transfer_id", "remote_engine_id", "remote_block_ids"} <= params(
            leg
        ).keys()


def test_the_nodes_of_an_engine_with_several() -> None:
    with Fleet(mode="WRITE") as fleet:
        hosts = ["10.0.0.1", "10.0.0.2"]
        fleet.register(fleet.p[0], dp_size=16, node_hosts=hosts)
        assert fleet.post(PROMPT).status == 200
        p, d = legs(fleet)
        assert params(d)["remote_hosts"] == hosts
        assert params(d)["remote_dp_size_local"] == 8
        assert "remote_hosts" not in params(p)


def test_prefill_ignores_eos_and_stops_for_nothing_else(fleet: Fleet) -> None:
    stops: JSON = {
        "stop": ["x"],
        "stop_token_ids": [1],
        "ignore_eos": False,
        "min_tokens": 3,
    }
    assert fleet.post(PROMPT | stops).status == 200
    p, d = legs(fleet)
    assert p.members()["ignore_eos"] == b"true"
    assert p.members()["max_tokens"] == b"1"
    assert not p.json().keys() & {"stop", "stop_token_ids", "min_tokens"}
    assert d.json().items() >= stops.items()


def test_a_client_sets_neither_parameters_nor_rank(fleet: Fleet) -> None:
    own: JSON = {"do_remote_prefill": True, "remote_host": "evil"}
    body = PROMPT | {"kv_transfer_params": own}
    headers = {"X-data-parallel-rank": "7"}
    assert fleet.post(body, headers=headers).status == 200
    for leg in legs(fleet):
        assert leg.header("x-data-parallel-rank") is None
        assert params(leg).get("remote_host") != "evil"


def test_in_write_mode_both_legs_run_at_once(write: Fleet) -> None:
    gate = Gate()
    write.p[0].answer(gate, http_response(200, {"kv_transfer_params": None}))
    with write.proxy.connect() as client:
        reader = client.post(COMPLETIONS, PROMPT)
        legs(write)
        gate.release()
        assert reader.finish().status == 200


def test_in_read_mode_decode_waits_for_prefill(read: Fleet) -> None:
    gate = Gate()
    read.p[0].answer(gate, http_response(200, {"kv_transfer_params": HAND_OVER}))
    with read.proxy.connect() as client:
        reader = client.post(COMPLETIONS, PROMPT)
        read.p[0].next_request()
        # A request behind it goes through both engines, so D had its chance.
        assert read.post(PROMPT).status == 200
        assert len(read.d[0].requests) == 1
        gate.release()
        assert reader.finish().status == 200
    assert len(read.d[0].requests) == 2


NO_BLOCKS: dict[str, object] = {
    "null": None,
    "empty": {},
    "no block ids": {"do_remote_prefill": True, "remote_engine_id": "e"},
    "null block ids": HAND_OVER | {"remote_block_ids": None},
    "empty block ids": HAND_OVER | {"remote_block_ids": []},
    "empty groups": HAND_OVER | {"remote_block_ids": [[], []]},
    "a string": "later",
    "a list": [1],
}


@pytest.mark.parametrize("handed", NO_BLOCKS.values(), ids=NO_BLOCKS)
def test_without_blocks_decode_gets_no_parameters_at_all(
    read: Fleet, handed: object
) -> None:
    read.p[0].answer(http_response(200, {"kv_transfer_params": handed}))
    assert read.post(PROMPT).status == 200
    assert "kv_transfer_params" not in legs(read)[1].json()


@pytest.mark.parametrize("answer", [b"", b"[]", b"{", b"not JSON"])
def test_a_prefill_answer_that_is_no_object_is_502(read: Fleet, answer: bytes) -> None:
    read.p[0].answer(http_response(200, answer))
    assert read.post(PROMPT).error()["code"] == 502
    assert not read.d[0].requests


def test_what_one_hand_over_cannot_serve_goes_to_decode_alone(fleet: Fleet) -> None:
    assert fleet.post(PROMPT | {"n": 2}).status == 200
    assert "kv_transfer_params" not in fleet.d[0].next_request().json()
    assert not fleet.p[0].requests


@pytest.mark.parametrize("mode", MODES)
def test_simulated_engines_move_the_kv(mode: str) -> None:
    with simulated(mode) as (proxy, sim):
        for stream in (False, True):
            body = PROMPT | {"prompt": "a<eos@1>b", "stream": stream}
            body["ignore_eos"] = True
            response = proxy.request("POST", COMPLETIONS, body)
            assert response.status == 200 and response.end is End.COMPLETE
            # All four: the first is D's own, whatever P has made.
            assert [n for n in range(8) if b".%d" % n in response.body] == [0, 1, 2, 3]
            assert b"GARBAGE" not in response.body
        d = sim.d[0].wait({"running": 0})
        assert d["external_tokens"] > 0 and d["bad_handovers"] == 0
        assert sim.p[0].wait({"handovers.used": 2})["handovers"]["pinned"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_of_one_token_still_hands_over(mode: str) -> None:
    with simulated(mode) as (proxy, sim):
        # Its first token ends the sequence, which ends P's if it is not told to go on.
        response = proxy.request("POST", COMPLETIONS, PROMPT | {"prompt": "<eos@0>"})
        assert response.json()["usage"]["completion_tokens"] == 1
        assert sim.p[0].wait({"handovers.used": 1})


# --- B28: token limits ----------------------------------------------------------------


@pytest.mark.parametrize("limit", [b"", b"null", b"1", b"2", b"100"])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_b28_decode_gets_the_clients_token_limit(
    fleet: Fleet, name: str, limit: bytes
) -> None:
    for target, start in (
        (COMPLETIONS, b'{"prompt":"a"'),
        (CHAT, b'{"messages":[]'),
    ):
        member = b',"%s":%s' % (name.encode(), limit) if limit else b""
        assert fleet.post(start + member + b"}", target).status == 200
        p, d = legs(fleet)
        assert d.members().get(name, b"") == limit
        assert p.members()["max_tokens"] == b"1"
        assert p.members().get("max_completion_tokens", b"1") == b"1"


# --- B38: ids -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "::1", "node-1.example"])
def test_b38_both_engines_find_each_other_in_the_request_id(
    fleet: Fleet, host: str, stream: bool
) -> None:
    p_address = f"host:{host},handshake:6301,notify:61005"
    d_address = f"host:{host},handshake:6302,notify:61006"
    fleet.register(fleet.p[0], zmq_address=p_address)
    fleet.register(fleet.d[0], zmq_address=d_address)
    response = fleet.post(PROMPT | {"stream": stream})
    assert response.status == 200 and response.end is End.COMPLETE
    p, d = legs(fleet)
    assert p.header("x-request-id") == d.header("x-request-id")
    assert ids(p) == ids(d)
    assert ids(p)[:2] == (p_address, d_address)
    assert len(ids(p).uid) == 32
    assert ids(p).transfer.startswith("tx-")


def test_b38_ids_are_those_of_one_request(fleet: Fleet) -> None:
    for _ in range(20):
        assert fleet.post(PROMPT).status == 200
    found = [ids(leg) for leg in fleet.p[0].requests]
    assert len({each.uid for each in found}) == 20
    assert len({each.transfer for each in found}) == 20


@pytest.mark.parametrize("mode", MODES)
def test_b38_a_retry_is_a_whole_pair_with_fresh_ids(mode: str) -> None:
    with Fleet(prefill=2, decode=1, mode=mode) as fleet:
        fleet.p[0].answer(http_response(500, openai_error(500, "no")))
        assert fleet.post(PROMPT).status == 200
        first, second = (ids(each.next_request()) for each in fleet.p)
        assert first.uid != second.uid and first.transfer != second.transfer
        assert second == ids(fleet.d[0].requests[-1])


# --- B18: one of two legs fails -------------------------------------------------------

FAILURES: dict[str, tuple[Step, int]] = {
    "500": (http_response(500, openai_error(500, "no")), 500),
    "400": (http_response(400, openai_error(400, "no")), 400),
    "reset": (Close.RST, 502),
    "end": (Close.FIN, 502),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_b18_the_leg_that_waits_is_closed_when_the_other_fails(
    write: Fleet, failing: str, failure: str
) -> None:
    bad, good = write.p[0], write.d[0]
    if failing == "decode":
        bad, good = good, bad
    step, status = FAILURES[failure]
    gate = Gate()
    bad.answer(gate, step)
    good.answer(Gate())
    with write.proxy.connect() as client:
        reader = client.post(COMPLETIONS, PROMPT)
        waiting = good.next_request()
        bad.next_request()
        gate.release()
        waiting.wait_abandoned()
        assert reader.finish().status == status
    assert len(bad.requests) == len(good.requests) == 1
    assert write.post(PROMPT).status == 200


def test_b18_a_stream_of_decode_is_held_back_until_prefill_succeeds(
    write: Fleet,
) -> None:
    gate = Gate()
    write.p[0].answer(gate, http_response(500, openai_error(500, "no")))
    write.d[0].answer(SSE_HEAD, chunk(event("one")), Gate())
    with write.proxy.connect() as client:
        reader = client.post(COMPLETIONS, PROMPT | {"stream": True})
        _, d = legs(write)
        gate.release()
        assert reader.finish().status == 500
        d.wait_abandoned()


def test_b18_a_client_that_leaves_aborts_both_legs(write: Fleet) -> None:
    write.p[0].answer(Gate())
    write.d[0].answer(Gate())
    client = write.proxy.connect()
    client.send(http_request("POST", COMPLETIONS, PROMPT))
    waiting = legs(write)
    client.close()
    for leg in waiting:
        leg.wait_abandoned()


def test_an_answer_of_decode_that_is_cut_short_never_ends(fleet: Fleet) -> None:
    fleet.d[0].answer(SSE_HEAD, chunk(event("one")), Close.RST)
    response = fleet.post(PROMPT | {"stream": True})
    assert response.end is End.INCOMPLETE
    assert LAST_CHUNK not in response.raw_body


# --- Registrations --------------------------------------------------------------------


def recorded() -> list[tuple[bytes, bytes]]:
    """What vLLM's heartbeats sent: identity and message, as a ROUTER got them."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(RECORDED.read_bytes())
    return [(identity, message) for identity, message in unpacker]


def test_the_recorded_frames_of_vllm_are_accepted() -> None:
    frames = recorded()
    assert len(frames) == 6
    with Proxy() as proxy:
        senders = {identity for identity, _ in frames}
        with contextlib.ExitStack() as stack:
            peers = {
                each: stack.enter_context(Peer(proxy.discovery)) for each in senders
            }
            for identity, message in frames:
                peers[identity].send(message)
        for _, message in frames:
            sent = msgpack.unpackb(message)
            entry = proxy.wait_listed(sent["http_address"])
            assert sent.items() <= entry.items()
            assert entry["role"] == {"P": "prefill", "D": "decode"}[sent["type"]]
        assert not proxy.refusals()


def test_status_shows_what_was_registered() -> None:
    with Fleet(sizes=({"dp_size": 8, "tp_size": 2}, {})) as fleet:
        engine = fleet.p[0]
        entry = fleet.proxy.instances()[engine.instance]
        assert fleet.told[engine].items() <= entry.items()
        assert (entry["role"], entry["state"]) == ("prefill", "up")
        assert 0 <= entry["last_ping_age"] < 15
        status = fleet.proxy.status()
        assert status["prefill_nodes"] == [engine.instance]
        assert status["decode_node_count"] == 1


def test_an_engine_on_ipv6_writes_its_address_without_brackets() -> None:
    d = ScriptedEngine("decode", host="::1")
    with Fleet(decode=[d]) as fleet:
        assert fleet.told[d]["http_address"] == f"::1:{d.port}"
        assert fleet.post(PROMPT).status == 200
        assert len(d.requests) == 1


def test_a_hello_and_further_members_are_no_faults() -> None:
    with Fleet() as fleet, Peer(fleet.proxy.discovery) as peer:
        peer.register({"type": "HELLO"})
        fleet.register(fleet.p[0], added_later=[1, {"x": None}])
        assert not fleet.proxy.refusals()


def test_an_engine_that_does_not_answer_yet_joins_when_it_does() -> None:
    # Only a ping makes the proxy look again within this test.
    limits = {"PROBE_INTERVAL_DOWN": 600}
    p = ScriptedEngine("prefill", listening=False)
    with p, Fleet(prefill=[], limits=limits) as fleet:
        # vLLM's worker sends heartbeats before the HTTP server is there.
        told = registration(p, fleet.mode)
        with Peer(fleet.proxy.discovery) as peer:
            peer.register(told)
            fleet.proxy.wait_listed(p.instance, state="down")
            assert fleet.post(PROMPT).error()["code"] == 503
            p.listen()
            peer.register(told)
            fleet.proxy.wait_listed(p.instance, state="up")
        assert fleet.post(PROMPT).status == 200


# --- B34, B91: messages that are no registration --------------------------------------

# An engine that nobody can reach.
VALID: JSON = {
    "type": "P",
    "http_address": "127.0.0.1:1",
    "zmq_address": "host:10.0.0.1,handshake:6301,notify:61005",
    "dp_size": 1,
    "tp_size": 1,
    "transfer_mode": "WRITE",
}


def without(name: str) -> JSON:
    """A registration that lacks a member."""
    return {key: value for key, value in VALID.items() if key != name}


MALFORMED: dict[str, tuple[bytes, ...]] = {
    "an empty frame": (b"",),
    "no frame of msgpack": (b"\xc1",),
    "a truncated map": (msgpack.packb(VALID)[:-9],),
    "bytes behind it": (msgpack.packb(VALID) + b"\x00",),
    "an integer": (msgpack.packb(7),),
    "a string": (msgpack.packb("P"),),
    "a list": (msgpack.packb(["P"]),),
    "nil": (msgpack.packb(None),),
    "an empty map": (msgpack.packb({}),),
    "an unknown type": (msgpack.packb(VALID | {"type": "X"}),),
    "a type that is no string": (msgpack.packb(VALID | {"type": {"P": 1}}),),
    "no UTF-8": (msgpack.packb(VALID).replace(b"WRITE", b"WR\xff\xfeE"),),
    "a key that is no string": (msgpack.packb(VALID | {5: 1}),),
    "a frame in front, as REQ sends it": (b"", msgpack.packb(VALID)),
    "8 frames": (msgpack.packb(VALID),) * 8,
    **{
        f"{name} = {value!r}": (msgpack.packb(VALID | {name: value}),)
        for name, value in [
            ("http_address", None),
            ("http_address", ["127.0.0.1", 80]),
            ("http_address", "127.0.0.1"),
            ("http_address", "127.0.0.1:-80"),
            ("http_address", "127.0.0.1:0"),
            ("http_address", "127.0.0.1:65536"),
            ("http_address", "127.0.0.1:80/v1"),
            ("http_address", "a" * 600 + ":80"),
            ("zmq_address", 3),
            ("zmq_address", ""),
            ("zmq_address", "10.0.0.1:6301"),
            ("zmq_address", "host:10.0.0.1,b,handshake:6301,notify:61005"),
            ("zmq_address", "host:10.0.0.1,handshake:6301"),
            ("zmq_address", "host:,handshake:6301,notify:61005"),
            ("zmq_address", "host:10.0.0.1,handshake:x,notify:61005"),
            ("zmq_address", "host:10.0.0.1,handshake:-1,notify:61005"),
            ("zmq_address", "host:10.0.0.1,handshake:6301,notify:61005\r\nX: y"),
            ("zmq_address", "host:10.0.0.1,handshake:6301,notify:61005\n"),
            ("zmq_address", "host:a___decode_addr_b,handshake:6301,notify:61005"),
            ("dp_size", 0),
            ("dp_size", -1),
            ("dp_size", "8"),
            ("dp_size", 1.5),
            ("dp_size", True),
            ("dp_size", 1 << 60),
            ("tp_size", None),
            ("transfer_mode", "PUSH"),
            ("transfer_mode", "read"),
            ("node_hosts", "10.0.0.1"),
        ]
    },
    **{f"no {name}": (msgpack.packb(without(name)),) for name in VALID},
}


def test_b34_after_every_malformed_message_a_valid_one_is_heard() -> None:
    with Fleet(mode="WRITE") as fleet:
        for number, (name, frames) in enumerate(MALFORMED.items(), start=1):
            with Peer(fleet.proxy.discovery) as peer:
                peer.send(*frames)
            fleet.proxy.wait_refusals(number)
            told = [fleet.register(each)["zmq_address"] for each in fleet.engines]
            assert fleet.post(PROMPT).status == 200, name
            assert ids(legs(fleet)[0])[:2] == (told[0], told[1])
        assert len(fleet.proxy.instances()) == 2


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 100, b"\xff" * 1000, b"GET /health HTTP/1.1\r\nHost: proxy\r\n\r\n"],
    ids=["zeros", "ones", "HTTP"],
)
def test_b34_garbage_at_the_discovery_port_harms_nothing(
    write: Fleet, garbage: bytes
) -> None:
    address = "127.0.0.1", write.proxy.discovery
    with contextlib.suppress(OSError), socket.create_connection(address) as raw:
        raw.sendall(garbage)
        write.register(write.p[0])
    write.register(write.p[0])
    assert write.post(PROMPT).status == 200


def test_b34_who_sends_much_cannot_fill_the_log() -> None:
    limits = {"LOG_LINES": 3, "LOG_PERIOD": 0.5}
    with Proxy(limits=limits) as proxy, Peer(proxy.discovery) as peer:
        for _ in range(100):
            peer.send(b"\xc1")
        proxy.wait_log("100 messages were refused")
        assert len(proxy.refusals()) == 3
        # The next period starts with a line again.
        peer.send(b"\xc1")
        proxy.wait_refusals(4)


def test_b34_what_a_message_says_cannot_forge_a_log_line() -> None:
    forged = "X\n2026-01-01 INFO all is well"
    with Proxy() as proxy, Peer(proxy.discovery) as peer:
        peer.register(VALID | {"type": forged, "http_address": "a\nb:80"})
        # A second line, so that all of the first was read.
        peer.send(b"\xc1")
        proxy.wait_refusals(2)
        assert not any(line.startswith("2026-01-01") for line in proxy.log)


def map_of(count: int) -> bytes:
    """A map with so many keys."""
    packed: bytes = msgpack.packb({f"key {n}": n for n in range(count)})
    return packed


HOSTILE: dict[str, bytes] = {
    "nested 100,000 deep": b"\x91" * 100_000 + b"\xc0",
    "maps nested 100,000 deep": b"\x81\xa1a" * 80_000 + b"\xc0",
    "a list that claims 2^32 - 1 items": b"\xdd\xff\xff\xff\xff",
    "a map that claims 2^32 - 1 items": b"\xdf\xff\xff\xff\xff",
    "a string that claims 2^32 - 1 bytes": b"\xdb\xff\xff\xff\xff",
    "10,000 keys": map_of(10_000),
    "an extension": b"\xc7\x04\x05abcd",
    "a timestamp": b"\xd6\xff\x00\x00\x00\x01",
    "a timestamp as a size": msgpack.packb(VALID)[:-1] + b"\xd6\xff\x00\x00\x00\x01",
    "an integer of 2^64 - 1": msgpack.packb(VALID | {"dp_size": (1 << 64) - 1}),
}


def test_b91_hostile_msgpack_is_refused() -> None:
    with Fleet(mode="WRITE") as fleet:
        before = fleet.proxy.resident_bytes()
        for number, (name, frame) in enumerate(HOSTILE.items(), start=1):
            with Peer(fleet.proxy.discovery) as peer:
                peer.send(frame)
            fleet.proxy.wait_refusals(number)
            fleet.register(fleet.p[0])
            assert fleet.post(PROMPT).status == 200, name
        assert fleet.proxy.peak_resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("size", [9 << 20, 500 << 20], ids=["1 M keys", "500 MB"])
def test_b91_a_frame_beyond_the_limit_costs_no_memory(size: int) -> None:
    frame = map_of(1_000_000) if size < 100 << 20 else bytes(size)
    assert len(frame) >= size
    with Fleet(mode="WRITE") as fleet:
        before = fleet.proxy.resident_bytes()
        with Peer(fleet.proxy.discovery) as peer:
            peer.send_large(frame)
            peer.register(registration(fleet.p[0], "WRITE"))
            for _ in range(5):
                fleet.register(fleet.p[0])
                assert fleet.post(PROMPT).status == 200
        assert fleet.proxy.peak_resident_bytes() - before < 64 << 20


# --- B36: engines that are gone -------------------------------------------------------

# A heart beats ten times before it counts as still.
BEATING = ("--ping-interval", "0.15")
IMPATIENT = {"PING_EXPIRY": 1.5, "PROBE_INTERVAL_UP": 0.2, "PROBE_INTERVAL_DOWN": 0.1}


def test_b36_a_dead_instance_leaves_and_comes_back() -> None:
    def post() -> Response:
        return proxy.request("POST", COMPLETIONS, PROMPT)

    engines = simulated("READ", *BEATING, prefill=2, decode=2, limits=IMPATIENT)
    with engines as (proxy, sim):
        victim = sim.p[0]
        victim.kill()
        # Nothing was delivered to it, or nothing was answered: another can do it.
        for _ in range(10):
            assert post().status == 200
        proxy.wait_gone(victim.instance)
        assert len(proxy.instances()) == 3
        assert post().status == 200
        victim.restart()
        proxy.wait_listed(victim.instance, state="up")
        for _ in range(4):
            assert post().status == 200
        victim.wait({"handovers.used": 2})


def test_b36_an_instance_that_only_falls_silent_leaves_too() -> None:
    with simulated("WRITE", *BEATING, prefill=2, limits=IMPATIENT) as (proxy, sim):
        victim = sim.p[0]
        victim.control("POST", "heartbeat", {"on": False})
        proxy.wait_gone(victim.instance)
        proxy.wait_log(f"{victim.instance} is draining: no ping for 1.5 s")
        served = victim.stats()["posts"]
        for _ in range(4):
            assert proxy.request("POST", COMPLETIONS, PROMPT).status == 200
        assert victim.stats()["posts"] == served
        victim.control("POST", "heartbeat", {"on": True})
        proxy.wait_listed(victim.instance, state="up")
        assert not proxy.refusals()


def test_b36_without_any_prefill_instance_the_answer_is_503() -> None:
    limits = {"PROBE_INTERVAL_UP": 0.1}
    with simulated("WRITE", prefill=2, limits=limits) as (proxy, sim):
        for each in sim.p:
            each.kill()
        for each in sim.p:
            proxy.wait_listed(each.instance, state="down")
        response = proxy.request("POST", COMPLETIONS, PROMPT)
        assert response.error()["code"] == 503
        assert response.header("retry-after")


def test_b36_what_an_instance_works_on_when_it_expires_may_finish() -> None:
    with Fleet(limits={"PING_EXPIRY": 1.0}) as fleet:
        gate = Gate()
        fleet.d[0].answer(SSE_HEAD, chunk(event("one")), gate, LAST_CHUNK)
        with fleet.proxy.connect() as client:
            reader = client.post(COMPLETIONS, PROMPT | {"stream": True})
            reader.body_until(b"one")
            fleet.proxy.wait_listed(fleet.d[0].instance, state="draining")
            gate.release()
            assert reader.finish().end is End.COMPLETE
        fleet.proxy.wait_gone(fleet.d[0].instance)


# --- B37: changed registrations -------------------------------------------------------


def test_b37_a_new_registration_replaces_the_old_one(write: Fleet) -> None:
    for dp_size in (2, 1):
        told = write.register(write.p[0], dp_size=dp_size)
        assert told["dp_size"] == dp_size
        assert write.post(PROMPT).status == 200
        p, d = legs(write)
        assert ids(p).prefill == told["zmq_address"]
        assert params(d)["remote_dp_size"] == dp_size
        assert (p.header("x-data-parallel-rank") is None) == (dp_size == 1)


def test_b37_an_instance_changes_its_role() -> None:
    with Fleet() as fleet:
        turncoat = fleet.p[0]
        entry = fleet.register(turncoat, type="D")
        assert entry["role"] == "decode"
        assert fleet.proxy.status()["prefill_node_count"] == 0
        assert fleet.post(PROMPT).error()["code"] == 503
        fleet.register(turncoat, type="P")
        assert fleet.proxy.status()["decode_nodes"] == [fleet.d[0].instance]
        assert fleet.post(PROMPT).status == 200


def test_b37_a_second_socket_with_the_same_identity_is_heard() -> None:
    with Fleet() as fleet, Peer(fleet.proxy.discovery, b"same") as first:
        first.register(registration(fleet.p[0], fleet.mode, dp_size=2))
        fleet.proxy.wait_listed(fleet.p[0].instance, dp_size=2)
        with Peer(fleet.proxy.discovery, b"same") as second:
            second.register(registration(fleet.p[0], fleet.mode, dp_size=3))
            fleet.proxy.wait_listed(fleet.p[0].instance, dp_size=3)


# --- B41: bursts ----------------------------------------------------------------------

DEALERS = 200
STREAMS = 100


def burst(proxy: Proxy, number: int) -> None:
    """Many peers register at once, five times each, then are silent."""
    addresses = [f"127.1.0.{n + 1}:1" for n in range(DEALERS)]
    told = VALID | {"dp_size": number}

    def all_listed() -> bool:
        listed = proxy.instances()
        return all(listed.get(a, {}).get("dp_size") == number for a in addresses)

    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(proxy.discovery)) for _ in addresses]
        for _ in range(5):
            for peer, address in zip(peers, addresses):
                peer.register(told | {"http_address": address})
        poll(all_listed, "all are listed")
        with Peer(proxy.discovery) as late:
            late.register(told | {"http_address": "127.1.1.1:1"})
            proxy.wait_listed("127.1.1.1:1", dp_size=number)


def streaming_bursts(count: int) -> None:
    """Bursts while streams run, which then end as they should."""
    with Fleet() as fleet, contextlib.ExitStack() as stack:
        gates = [Gate() for _ in range(STREAMS)]
        for gate in gates:
            fleet.d[0].answer(SSE_HEAD, chunk(event("one")), gate, LAST_CHUNK)
        clients = [stack.enter_context(fleet.proxy.connect(wait=False)) for _ in gates]
        readers = [
            each.post(COMPLETIONS, PROMPT | {"stream": True}) for each in clients
        ]
        for reader in readers:
            reader.body_until(b"one")
        for number in range(1, count + 1):
            burst(fleet.proxy, number)
        for gate in gates:
            gate.release()
        ends = Counter(reader.finish().end for reader in readers)
    assert ends == {End.COMPLETE: STREAMS}


def test_b41_all_of_a_burst_of_registrations_are_heard() -> None:
    streaming_bursts(1)


@pytest.mark.soak
def test_b41_all_of_a_hundred_bursts_are_heard() -> None:
    streaming_bursts(100)


def test_b41_registrations_that_came_while_the_proxy_stood_still() -> None:
    with Proxy() as proxy, Peer(proxy.discovery) as peer:
        with proxy.stopped():
            for number in range(600):
                peer.register(VALID | {"http_address": f"127.1.0.1:{number + 1}"})
        poll(lambda: len(proxy.instances()) == 600, "all are listed")


def test_instances_beyond_the_limit_are_refused() -> None:
    with Proxy(limits={"MAX_INSTANCES": 2}) as proxy, Peer(proxy.discovery) as peer:
        for number in (1, 2, 3, 1, 2):
            peer.register(VALID | {"http_address": f"127.1.0.1:{number}"})
        proxy.wait_refusals(1)
        assert set(proxy.instances()) == {"127.1.0.1:1", "127.1.0.1:2"}


# --- B78: start and end ---------------------------------------------------------------

START = ("--host", "127.0.0.1", "--port", "0", "--service-discovery-port")


def test_b78_a_discovery_port_in_use_ends_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, log = run_to_exit([*START, port], script=MORIIO_PROXY)
    assert status != 0
    assert f"127.0.0.1:{port}" in log and "in use" in log
    assert "Traceback" not in log


def test_b78_two_proxies_on_one_discovery_port_are_refused() -> None:
    with Proxy() as proxy:
        status, log = run_to_exit([*START, str(proxy.discovery)], script=MORIIO_PROXY)
    assert status != 0 and str(proxy.discovery) in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_b78_it_ends_in_order_and_starts_again_at_once(number: signal.Signals) -> None:
    port = 0
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            with Proxy(discovery=port) as proxy:
                port = proxy.discovery
                peers = [stack.enter_context(Peer(port)) for _ in range(10)]
                for peer in peers:
                    peer.register(VALID)
                proxy.wait_listed(VALID["http_address"])
                with proxy.stopped():
                    # Messages that wait for it, from peers it can reach no more.
                    for peer in peers:
                        peer.register(VALID)
                    proxy.signal(number)
                assert proxy.wait_exit() == 0


def test_b78_descriptors_are_not_used_up_by_peers_that_come_and_go() -> None:
    with Fleet() as fleet:
        fleet.register(fleet.p[0])
        before = fleet.proxy.open_sockets()
        for _ in range(50):
            fleet.register(fleet.p[0])
        fleet.proxy.wait_idle()
        poll(lambda: fleet.proxy.open_sockets() <= before + 5, "sockets are closed")


# --- B79: no instances, mixed modes ---------------------------------------------------


def test_b79_without_a_whole_pair_the_answer_is_503() -> None:
    with Fleet(prefill=[], decode=[]) as none:
        assert "prefill" in refused(none)
    with Fleet(decode=[]) as only_prefill:
        assert "decode" in refused(only_prefill)
        assert not only_prefill.p[0].requests
    with Fleet(prefill=[]) as only_decode:
        assert "prefill" in refused(only_decode)
        assert not only_decode.d[0].requests


def refused(fleet: Fleet) -> str:
    """The message of the 503 for a request."""
    response = fleet.post(PROMPT)
    error = response.error()
    assert error["code"] == response.status == 503
    assert response.header("retry-after")
    return str(error["message"])


def test_b79_another_transfer_mode_is_refused() -> None:
    with Fleet(mode="READ") as fleet, ScriptedEngine("decode") as other:
        with Peer(fleet.proxy.discovery) as peer:
            peer.register(registration(other, "WRITE"))
        line = fleet.proxy.wait_log(REFUSED)
        assert "READ" in line and "WRITE" in line and other.instance in line
        for _ in range(4):
            assert fleet.post(PROMPT).status == 200
        assert not other.requests
        assert len(fleet.d[0].requests) == len(fleet.p[0].requests) == 4


def test_b79_an_engine_that_changes_its_mode_no_longer_serves() -> None:
    with Fleet(prefill=2, mode="READ") as fleet:
        turncoat = fleet.p[0]
        with Peer(fleet.proxy.discovery) as peer:
            peer.register(registration(turncoat, "WRITE"))
        fleet.proxy.wait_gone(turncoat.instance)
        fleet.proxy.wait_refusals(1)
        for _ in range(4):
            assert fleet.post(PROMPT).status == 200
        assert not turncoat.requests


def test_b79_when_all_have_gone_another_mode_may_come() -> None:
    with Fleet(mode="READ", limits={"PING_EXPIRY": 1.0}) as fleet:
        for each in fleet.engines:
            fleet.proxy.wait_gone(each.instance)
        fleet.mode = "WRITE"
        for each in fleet.engines:
            fleet.register(each)
        assert not fleet.proxy.refusals()


# --- Routes ---------------------------------------------------------------------------


def test_health_is_the_proxys_own() -> None:
    with Proxy() as proxy:
        response = proxy.request("GET", "/health")
        assert (response.status, response.body) == (200, b"ok")


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_profile_commands_reach_every_engine(path: str) -> None:
    with Fleet(prefill=2, decode=2) as fleet:
        for each in fleet.engines:
            # vLLM's answer.
            each.answer(http_response(200, b""))
        response = fleet.post({"seconds": 3}, path)
        assert response.status == 200
        assert response.json() == {"instances": [e.instance for e in fleet.engines]}
        for each in fleet.engines:
            leg = each.next_request()
            assert (leg.target, leg.json()) == (path, {"seconds": 3})


def test_a_profile_command_without_a_body() -> None:
    with simulated("WRITE") as (proxy, sim):
        assert proxy.request("POST", "/start_profile").status == 200
        for each in sim.engines:
            assert each.stats()["requests"]["POST /start_profile"] == 1


def test_a_failed_profile_command_names_the_engines_that_failed() -> None:
    with Fleet(prefill=2, decode=2) as fleet:
        fleet.p[1].answer(http_response(500, b"no"))
        fleet.d[0].answer(Close.RST)
        for each in (fleet.p[0], fleet.d[1]):
            each.answer(http_response(200, b""))
        message = fleet.post({}, "/start_profile").error()["message"]
        assert f"{fleet.p[1].instance} 500" in message
        assert fleet.d[0].instance in message
        assert fleet.p[0].instance not in message
        assert fleet.d[1].instance not in message


def test_a_profile_command_without_engines_is_503() -> None:
    with Proxy() as proxy:
        assert proxy.request("POST", "/start_profile", {}).error()["code"] == 503
        response = proxy.request("GET", "/start_profile")
        assert (response.status, response.header("allow")) == (405, "POST")


def test_other_routes_go_to_a_decode_instance(write: Fleet) -> None:
    for method, path in (("GET", "/v1/whatever"), ("POST", "/instances/add")):
        assert write.proxy.request(method, path).status == 200
        assert write.d[0].next_request().target == path
    assert write.proxy.request("POST", "/sleep").error()["code"] == 403
    assert not write.p[0].requests
