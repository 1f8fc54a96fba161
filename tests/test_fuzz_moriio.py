# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Spoilt registrations at moriio_proxy.py's discovery port.

Whatever a message is: it is refused, or it is a registration with which both engines
find each other; the next valid one is heard, and requests are served.
"""

from collections.abc import Iterator
from typing import Any

import msgpack
import msgspec
import pytest
from fuzzing import examples
from hypothesis import given
from hypothesis import strategies as st
from moriio_rig import Fleet, Peer
from rig import JSON, poll
from sim_moriio import decode_part, parse_address, prefill_part

from moriio_proxy import MAX_DP_SIZE, Registration, read_registration

# Bytes by which the same messages may differ in what they leave behind.
MAX_GROWTH = 1 << 20

# --- Messages -------------------------------------------------------------------------

# Nobody listens there.
NOBODY = "127.0.0.77:9"
WHOLE: JSON = {
    "type": "P",
    "http_address": NOBODY,
    "zmq_address": "host:127.0.0.77,handshake:6301,notify:61005",
    "dp_size": 1,
    "tp_size": 1,
    "transfer_mode": "WRITE",
}
ODD = st.sampled_from(
    [
        *[None, True, 0, 1, -1, 2, 1024, 1025, 1 << 63, 1.0, "1", "", [], {}, b"P"],
        *[
            "D",
            "READ",
            "HELLO",
            "p",
            "P\n",
            "é",
            "x" * 600,
            ["127.0.0.77"],
            [NOBODY] * 3,
        ],
        *[
            "host:a,handshake:1,notify:2",
            "host:a,b,handshake:1,notify:2",
            "host::1,handshake:0",
        ],
        *["host:a___b,handshake:1,notify:2", "host:a b,handshake:1,notify:2", "host:"],
        *[
            "127.0.0.77",
            "127.0.0.77:",
            "127.0.0.77:0",
            "127.0.0.77:99999",
            ":9",
            "::1:9",
        ],
        msgpack.ExtType(5, b"abcd"),
        msgpack.Timestamp(1, 2),
    ]
)
NAMES = st.sampled_from([*WHOLE, "node_hosts", "x", b"type", 7])


@st.composite
def registrations(draw: st.DrawFn) -> bytes:
    """Registrations in which some members are odd, missing or new."""
    told: dict[Any, Any] = dict(WHOLE, type=draw(st.sampled_from("PD")))
    for name in draw(st.lists(NAMES, max_size=2)):
        if draw(st.booleans()):
            told.pop(name, None)
        else:
            told[name] = draw(ODD)
    packed: bytes = msgpack.packb(told)
    return packed


SPOILERS = [bytes([byte]) for byte in b"\x00\x80\x90\x91\xc0\xc1\xc7\xd6\xdd\xdf\xff:,"]
SPOILERS += [b"\xdd\xff\xff\xff\xff", b"\xd6\xff\x00\x00\x00\x01", b"\x91" * 2000]


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """Registrations of which a few bytes may be others."""
    data = draw(registrations())
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 1, 1, 1, 9]))
        put = draw(st.sampled_from([*SPOILERS, b"", data[at : at + length] * 2]))
        data = data[:at] + put + data[at + length :]
    return data


FRAMES = frames() | frames() | st.binary(max_size=40)
MESSAGES = st.lists(FRAMES, min_size=1, max_size=1) | st.lists(FRAMES, max_size=3)


def reading(message: list[bytes]) -> Registration | None:
    """The registration in a message, if there is one."""
    try:
        return read_registration(message)
    except (ValueError, msgspec.ValidationError):
        return None


# --- What may become of it ------------------------------------------------------------


@examples(300)
@given(MESSAGES)
def test_a_registration_is_one_with_which_engines_find_each_other(
    message: list[bytes],
) -> None:
    told = reading(message)
    if told is None:
        return
    address = told["zmq_address"]
    name = f"___prefill_addr_{address}___decode_addr_{address}_{'0' * 32}"
    assert prefill_part(f"cmpl-{name}-0-12345678") == address
    assert decode_part(f"cmpl-{name}-0-12345678") == address
    assert all(0 < port < 65536 for port in parse_address(address)[1:])
    assert all(text.isascii() and text.isprintable() for text in (address, name))
    assert type(told["dp_size"]) is type(told["tp_size"]) is int
    assert 1 <= told["dp_size"] <= MAX_DP_SIZE
    assert (told["type"], told["transfer_mode"]) in {
        (role, mode) for role in "PD" for mode in ("READ", "WRITE")
    }


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(mode="WRITE") as fleet:
        yield fleet


def connects_nowhere_else(message: list[bytes]) -> bool:
    """Whether the proxy will not probe an address that is not this test's."""
    told = reading(message)
    return told is None or told["http_address"] == NOBODY


@examples(25)
@given(st.lists(MESSAGES.filter(connects_nowhere_else), min_size=1, max_size=6))
def test_after_any_messages_a_valid_one_is_heard(
    fleet: Fleet, messages: list[list[bytes]]
) -> None:
    def only_the_fleet_is_up() -> bool:
        listed = fleet.proxy.instances().items()
        up = {name for name, entry in listed if entry["state"] == "up"}
        return up == {each.instance for each in fleet.engines}

    with Peer(fleet.proxy.discovery) as peer:
        for message in messages:
            peer.send(*message) if message else peer.send(b"")
        for engine in fleet.engines:
            fleet.register(engine)
    poll(only_the_fleet_is_up, "only the fleet is up")
    assert fleet.post({"prompt": "a"}).status == 200
    fleet.settle()


def test_messages_leave_nothing_behind(fleet: Fleet) -> None:
    refused = [b"\xc1"], [msgpack.packb(dict(WHOLE, dp_size=0))], [b"a", b"b"]

    def again() -> int:
        # One peer, as libzmq itself keeps some memory of each that came and went.
        with Peer(fleet.proxy.discovery) as peer:
            for _ in range(1000):
                for message in refused:
                    peer.send(*message)
            fleet.register(fleet.p[0])
        poll(lambda: fleet.proxy.open_descriptors() <= at_rest, "the peer has left")
        return fleet.proxy.resident_bytes()

    at_rest = fleet.proxy.open_descriptors()
    warm = again()
    assert again() - warm < MAX_GROWTH
