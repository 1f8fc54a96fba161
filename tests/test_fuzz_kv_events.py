# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Spoilt KV events: the subscriber goes on, and says what it has lost."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from fuzzing import examples
from hypothesis import given
from hypothesis import strategies as st
from kv_publisher import CLEARED, Publisher, SubscriberProcess, batch, removed, stored

import kv_events_subscriber as kv

# --- Batches --------------------------------------------------------------------------

ODD = st.sampled_from(
    [
        *[None, True, -1, 0, 1.5, 1 << 63, float("nan"), float("inf"), -1e300, "", "é"],
        *[
            b"\xff",
            [],
            {},
            [[1]],
            {"a": 1},
            [{None: 1}],
            {b"b": {1.5: []}},
            "BlockStored",
        ],
        *[msgpack.ExtType(5, b"abcd"), msgpack.Timestamp(1, 2)],
    ]
)
KNOWN: st.SearchStrategy[Any] = st.sampled_from(
    [
        stored(1),
        stored(b"1", b"2", extra_keys=[["a", None]]),
        removed(1),
        CLEARED,
        ["BlockStored", [1], None, [7], 1],
        ["BlockRemoved", [1]],
        ["AllBlocksCleared"],
    ]
)


@st.composite
def odd_events(draw: st.DrawFn) -> Any:
    """An event of which a member is something else, or the like."""
    event = draw(KNOWN)
    if isinstance(event, dict):
        return {**event, draw(st.sampled_from([*event, "new", b"new", 1])): draw(ODD)}
    at = draw(st.integers(0, len(event)))
    return [*event[:at], draw(ODD), *event[at + 1 :]]


EVENTS = st.lists(KNOWN | KNOWN | odd_events() | ODD, max_size=3)
SPOILERS = [
    bytes([byte]) for byte in b"\x00\x80\x90\x91\xc0\xc1\xc7\xcb\xd6\xdd\xdf\xff"
]
SPOILERS += [b"\xdd\xff\xff\xff\xff", b"\x91" * 2000]


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """Batches of which a few bytes may be others."""
    whole = [draw(st.just(1.0) | ODD), draw(EVENTS), 0][: draw(st.integers(1, 3))]
    data: bytes = msgpack.packb(whole)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 1, 1, 9]))
        put = draw(st.sampled_from([*SPOILERS, b"", data[at : at + length] * 2]))
        data = data[:at] + put + data[at + length :]
    return data


PAYLOADS = payloads() | st.binary(max_size=40)


@examples(300)
@given(PAYLOADS)
def test_a_payload_is_events_that_can_be_logged_or_a_value_error(
    payload: bytes,
) -> None:
    try:
        decoded = kv.decode_batch(payload)
    except ValueError:
        return
    tally = kv.Tally()
    lines = list(kv.json_lines(0, 1, decoded))
    assert len(lines) == len(list(kv.text_lines(0, 1, decoded))) == len(decoded.events)
    for event, line in zip(decoded.events, lines):
        tally.add(event)
        assert json.loads(line)["type"] == type(event).__name__
    assert tally.events == len(lines)
    tally.summary(1.0)


# --- The order of batches -------------------------------------------------------------

WHOLE = batch(CLEARED)
FATES = st.lists(st.sampled_from(["live", "live", "lost", "corrupt"]), max_size=30)


@examples(150)
@given(FATES, st.data(), st.booleans())
def test_every_batch_is_delivered_once_or_reported_lost(
    fates: list[str], data: st.DataObject, can_replay: bool
) -> None:
    """Whatever is lost, corrupt or not replayed, no number is missing or twice."""
    feed = kv.Feed(0, can_replay)
    found: list[int] = []

    def note(deliveries: Iterator[kv.Delivery]) -> None:
        for _, seq, delivered in deliveries:
            match delivered.events:
                case [kv.BatchesLost(first, last, _)]:
                    found.extend(range(first, last + 1))
                case [kv.AllBlocksCleared()]:
                    found.append(seq)
                case other:
                    raise AssertionError(other)

    for seq, fate in enumerate([*fates, "live"]):
        if fate != "lost":
            note(feed.live(seq, WHOLE if fate == "live" else b"\xc1"))
        if feed.wanted is not None:
            kept = range(feed.wanted, seq + 1)
            replay = data.draw(st.lists(st.sampled_from(kept), unique=True).map(sorted))
            note(feed.replayed([(n, WHOLE) for n in replay], data.draw(st.booleans())))
            assert feed.wanted is None
    assert found == list(range(len(fates) + 1))


# --- The script -----------------------------------------------------------------------

NUMBERS = st.integers(0, 5).map(lambda n: n.to_bytes(8, "big")) | st.binary(max_size=9)
MESSAGES = st.lists(NUMBERS | PAYLOADS, max_size=3) | st.tuples(NUMBERS, PAYLOADS)
# Hashes that no example has had before.
_marks = itertools.count(1 << 32)
LATEST = float(kv.MAX_TIME - 1)


@pytest.fixture(scope="module")
def publisher() -> Iterator[Publisher]:
    with Publisher() as publisher:
        yield publisher


@pytest.fixture(scope="module")
def subscriber(publisher: Publisher) -> Iterator[SubscriberProcess]:
    argv = ["--endpoint", publisher.endpoint, "--format", "json"]
    argv += ["--replay-endpoint", publisher.replay_endpoint]
    with SubscriberProcess(*argv) as subscriber:
        publisher.wait_subscribed()
        yield subscriber
        subscriber.stop()


@examples(25)
@given(st.lists(MESSAGES, min_size=1, max_size=5), st.lists(PAYLOADS, max_size=3))
def test_after_any_messages_and_replays_a_valid_batch_is_logged(
    publisher: Publisher,
    subscriber: SubscriberProcess,
    messages: list[list[bytes]],
    kept: list[bytes],
) -> None:
    publisher.kept = list(enumerate(kept))
    for frames in messages:
        publisher.send_raw(*frames)
    mark = next(_marks)
    publisher.publish(len(kept), batch(stored(mark), ts=LATEST))
    while mark not in subscriber.next_event().get("block_hashes", ()):
        pass
