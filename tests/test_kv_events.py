# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""kv_events_subscriber.py: decoding, the order of batches, sockets, command line.

The first two parts are bytes and values; the others run the script against real
sockets. `tests/data` holds frames recorded from vLLM 0.32.
"""

import asyncio
import contextlib
import json
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_publisher import (
    CLEARED,
    HOST,
    SUBSCRIBER,
    TOPIC,
    Publisher,
    SubscriberProcess,
    batch,
    free_ports,
    removed,
    stored,
)
from rig import HANG_GUARD, JSON, SCALED_PROXY

import kv_events_subscriber as kv

DATA = Path(__file__).parent / "data"
HIGH_HASH = 2**64 - 1

# --- Decoding -------------------------------------------------------------------------

FULL: dict[str, Any] = {
    "block_hashes": [HIGH_HASH, 1],
    "parent_block_hash": 3,
    "token_ids": [5, 6],
    "block_size": 1,
    "lora_id": 7,
    "medium": "GPU",
    "lora_name": "adapter",
    "extra_keys": [None, ["salt"]],
    "group_idx": 2,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 64,
    "locality": "LOCAL",
    "ownership": "tier",
    "session_id": "s",
    "lookahead_token_ids": [[8], [9]],
}
# Release, and how many of the fields above it knows.
ARRAYS = {"0.10.0": 5, "0.10.2": 6, "0.14": 7, "0.17": 8, "0.20": 9, "0.23": 11}
MAPS = {"0.24": 11, "0.26": 12, "0.29": 13, "0.31": 14, "0.33": 15}


def recorded(name: str) -> list[list[bytes]]:
    """The messages of a recording, as lists of frames."""
    with (DATA / name).open("rb") as file:
        return list(msgpack.Unpacker(file))


def fields(event: kv.Event) -> JSON:
    """An event as its wire form, without the fields that have their default."""
    wire: JSON = msgspec.to_builtins(event, builtin_types=(bytes,))
    return wire


def without_nulls(wire: JSON, required: str = "parent_block_hash") -> JSON:
    """What is left of a wire form when fields that are null are left out."""
    return {k: v for k, v in wire.items() if v is not None or k == required}


def decode_one(event: Any) -> kv.Event:
    (decoded,) = kv.decode_batch(batch(event)).events
    return decoded


@pytest.mark.parametrize("release", ARRAYS)
def test_arrays_of_old_releases_are_decoded(release: str) -> None:
    known = dict(list(FULL.items())[: ARRAYS[release]])
    event = decode_one(["BlockStored", *known.values()])
    assert fields(event) == {"type": "BlockStored", **known}


@pytest.mark.parametrize("release", MAPS)
def test_maps_of_newer_releases_are_decoded(release: str) -> None:
    known = dict(list(FULL.items())[: MAPS[release]])
    event = decode_one({"type": "BlockStored", **known})
    assert fields(event) == {"type": "BlockStored", **known}


@pytest.mark.parametrize(
    "wire",
    [
        ["BlockRemoved", [1, b"2"]],
        ["BlockRemoved", [1, b"2"], None],
        {"type": "BlockRemoved", "block_hashes": [1, b"2"], "medium": None},
    ],
)
def test_removals_are_decoded(wire: Any) -> None:
    assert decode_one(wire) == kv.BlockRemoved([1, b"2"])


@pytest.mark.parametrize("wire", [["AllBlocksCleared"], CLEARED])
def test_resets_are_decoded(wire: Any) -> None:
    assert decode_one(wire) == kv.AllBlocksCleared()


def test_one_batch_may_mix_arrays_and_maps() -> None:
    events = kv.decode_batch(batch(["BlockRemoved", [1]], removed(2), CLEARED)).events
    assert events == [
        kv.BlockRemoved([1]),
        kv.BlockRemoved([2], medium="GPU"),
        kv.AllBlocksCleared(),
    ]


@pytest.mark.parametrize(
    ("wire", "rank"),
    [
        ([2.5, [CLEARED]], None),
        ([2.5, [CLEARED], None], None),
        ([2.5, [CLEARED], 3], 3),
        ([2.5, [CLEARED], 3, "new"], 3),
        ({"ts": 2.5, "events": [CLEARED], "data_parallel_rank": 3, "new": 1}, 3),
        ({"ts": 2.5, "events": [CLEARED]}, None),
    ],
)
def test_every_form_of_a_batch_is_decoded(wire: Any, rank: int | None) -> None:
    decoded = kv.decode_batch(msgspec.msgpack.encode(wire))
    assert decoded == kv.EventBatch(2.5, [kv.AllBlocksCleared()], rank)


def test_what_is_unknown_is_reported_once_and_skipped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    payload = batch(
        {"type": "BlockMoved"},
        ["BlockMoved", 1],
        removed(1, colour="red"),
        removed(2, colour="blue"),
        ["BlockRemoved", [3], "GPU", 0, "LOCAL", "tier", "surplus"],
    )
    with caplog.at_level(logging.WARNING):
        first, again = kv.decode_batch(payload), kv.decode_batch(payload)
    assert first == again
    assert [fields(event)["block_hashes"] for event in first.events] == [[1], [2], [3]]
    for name in ("'BlockMoved'", "'colour'", "field 6 of BlockRemoved"):
        assert sum(name in message for message in caplog.messages) == 1, name


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        batch(stored(1))[:-1],
        batch(stored(1)) + b"\x00",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x93\xa2\xff\xff\x90\x00",
        b"\x81\x91\x00\x00",
        msgspec.msgpack.encode(5),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([None, [], 0]),
        batch(ts=-1.0),
        batch(ts=1e19),
        batch(ts=float("nan")),
        msgspec.msgpack.encode({"ts": 1.0}),
        batch(5),
        batch([]),
        batch({}),
        batch([[]]),
        batch(["BlockStored", [1]]),
        batch({**stored(1), "block_hashes": [[1]]}),
        batch({**removed(), "block_hashes": 5}),
        batch({**stored(1), "token_ids": None}),
    ],
)
def test_a_corrupt_batch_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match="."):
        kv.decode_batch(payload)


@given(st.binary(max_size=60))
def test_whatever_arrives_is_a_batch_or_a_value_error(payload: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(kv.decode_batch(payload), kv.EventBatch)


@pytest.mark.parametrize(
    "name", ["int_hashes", "byte_hashes", "cleared", "replay"], ids=str
)
def test_recorded_batches_decode_to_every_recorded_field(name: str) -> None:
    messages = [m for m in recorded(f"kv_events_{name}.bin") if m[-1]]
    assert messages
    for *_, payload in messages:
        ts, events, rank = msgspec.msgpack.decode(payload)
        decoded = kv.decode_batch(payload)
        assert decoded[::2] == (ts, rank)
        assert [fields(e) for e in decoded.events] == [without_nulls(e) for e in events]


# --- The order of batches -------------------------------------------------------------


class Order:
    """A feed, and what it has delivered: numbers, and our own events as text."""

    def __init__(self, can_replay: bool = True) -> None:
        self.feed = kv.Feed(0, can_replay)
        self.seen: list[int | str] = []

    def note(self, deliveries: Iterator[kv.Delivery]) -> None:
        for delivery in deliveries:
            match delivery.batch.events:
                case [kv.BatchesLost(first, last, reason)]:
                    self.seen.append(f"lost {first}-{last} {reason.split()[0]}")
                case [kv.PublisherRestarted()]:
                    self.seen.append("restart")
                case _:
                    self.seen.append(delivery.seq)

    def live(self, *seqs: int, ts: float = 1.0) -> None:
        for seq in seqs:
            self.note(self.feed.live(seq, batch(CLEARED, ts=ts)))

    def corrupt(self, seq: int) -> None:
        self.note(self.feed.live(seq, b"\xc1"))

    def replay(self, *seqs: int, ts: float = 1.0, complete: bool = True) -> None:
        batches = [(seq, batch(CLEARED, ts=ts)) for seq in seqs]
        self.note(self.feed.replayed(batches, complete))

    def counts(self) -> tuple[int, int]:
        """Gaps and replays."""
        return self.feed.gaps, self.feed.replays

    def take(self) -> list[int | str]:
        """What was delivered since the last call."""
        seen, self.seen = self.seen, []
        return seen


def test_batches_in_order_need_no_replay() -> None:
    order = Order()
    order.live(0, 1, 2)
    assert order.take() == [0, 1, 2]
    assert order.counts() == (0, 0)
    assert order.feed.wanted is None


def test_a_gap_wants_a_replay_from_the_number_after_the_last() -> None:
    order = Order()
    order.live(0, 1, 5)
    assert order.take() == [0, 1]
    assert order.feed.wanted == 2
    order.replay(2, 3, 4, 5, 6)
    assert order.take() == [2, 3, 4, 5, 6]
    order.live(6, 7)
    assert order.take() == [7]
    assert order.counts() == (1, 1)
    assert order.feed.wanted is None


def test_what_the_replay_does_not_bring_is_lost_and_live_batches_go_on() -> None:
    order = Order()
    order.live(0, 5)
    order.replay(3, 4)
    assert order.take() == [0, "lost 1-2 missing", 3, 4, 5]
    order.live(8)
    order.replay()
    assert order.take() == ["lost 6-7 missing", 8]


def test_half_a_replay_counts() -> None:
    order = Order()
    order.live(0, 5)
    order.replay(1, 2, complete=False)
    assert order.take() == [0, 1, 2, "lost 3-4 missing", 5]
    assert order.feed.wanted is None


def test_without_a_replay_endpoint_a_gap_is_lost_at_once() -> None:
    order = Order(can_replay=False)
    order.feed.resume()
    assert order.feed.wanted is None
    order.live(3, 4, 7)
    assert order.take() == ["lost 0-2 missing", 3, 4, "lost 5-6 missing", 7]
    assert order.feed.gaps == 2


def test_b81_a_late_start_is_a_replay_from_the_beginning() -> None:
    order = Order()
    order.feed.resume()
    assert order.feed.wanted == 0
    order.replay(0, 1, 2)
    order.live(1, 2, 3)
    assert order.take() == [0, 1, 2, 3]
    assert order.feed.gaps == 0


def test_b81_numbers_that_go_back_are_a_restart() -> None:
    order = Order(can_replay=False)
    order.live(0, 1, 2, 0, 1)
    assert order.take() == [0, 1, 2, "restart", 0, 1]


def test_b81_a_restart_is_replayed_from_the_beginning() -> None:
    order = Order()
    order.live(*range(5))
    order.live(2)
    assert order.feed.wanted == 0
    order.replay(0, 1, 2)
    assert order.take() == [0, 1, 2, 3, 4, "restart", 0, 1, 2]


def test_b81_a_restart_is_seen_by_the_clock_while_the_replay_is_ahead() -> None:
    order = Order()
    order.feed.resume()
    order.replay(0, 1, 2, ts=1.0)
    order.live(1, ts=2.0)
    assert order.take() == [0, 1, 2, "restart"]
    assert order.feed.wanted == 0


def test_b81_a_new_publisher_that_has_passed_the_old_numbers_is_recognised() -> None:
    order = Order()
    order.live(0, 1, 2, ts=1.0)
    order.feed.resume()
    assert order.feed.wanted == 2
    order.replay(2, 3, 4, ts=9.0)
    assert order.take() == [0, 1, 2, "restart"]
    assert order.feed.wanted == 0
    order.replay(0, 1, 2, 3, 4, ts=9.0)
    order.live(3, 4, 5, ts=9.0)
    assert order.take() == [0, 1, 2, 3, 4, 5]


def test_b81_a_new_publisher_that_has_nothing_yet_is_recognised() -> None:
    order = Order()
    order.live(0, 1, 2)
    order.feed.resume()
    order.replay()
    assert order.take() == [0, 1, 2, "restart"]
    order.replay()
    order.live(0)
    assert order.take() == [0]


def test_b81_late_batches_of_the_former_publisher_are_dropped() -> None:
    order = Order()
    order.live(0, 1, ts=1.0)
    order.feed.resume()
    order.replay(1, 2, ts=9.0)
    order.replay(0, 1, 2, ts=9.0)
    assert order.take() == [0, 1, "restart", 0, 1, 2]
    order.live(2, 3, 4, ts=2.0)
    order.live(3, ts=9.0)
    assert order.take() == [3]
    assert order.feed.wanted is None


def test_the_same_publisher_is_recognised_after_a_reconnect() -> None:
    order = Order()
    order.live(0, 1, 2)
    order.feed.resume()
    order.replay(2, 3)
    assert order.take() == [0, 1, 2, 3]
    assert order.feed.wanted is None


def test_no_answer_is_no_restart() -> None:
    order = Order()
    order.live(0, 1)
    order.feed.resume()
    order.replay(complete=False)
    order.live(2)
    assert order.take() == [0, 1, 2]


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    order = Order()
    order.feed.resume()
    order.replay(0, 1, ts=9.0)
    order.live(2, ts=9.5)
    order.live(3, 4, ts=1.0)
    assert order.take() == [0, 1, 2, 3, 4]


def test_a_corrupt_batch_in_a_replay_is_no_restart() -> None:
    order = Order()
    order.feed.resume()
    batches = [(0, batch(CLEARED)), (1, b"\xc1")]
    order.note(order.feed.replayed(batches, True))
    order.live(0)
    order.corrupt(1)
    order.live(2)
    assert order.take() == [0, "lost 1-1 corrupt:", 2]


def test_a_corrupt_batch_is_reported_with_its_number_and_skipped() -> None:
    order = Order()
    order.live(0)
    order.corrupt(1)
    order.live(2)
    assert order.take() == [0, "lost 1-1 corrupt:", 2]
    order.corrupt(3)
    order.feed.resume()
    order.note(order.feed.replayed([(3, b"\xc1")], True))
    assert order.take() == ["lost 3-3 corrupt:"]


class Life(NamedTuple):
    """A publisher from start to end: how many batches are out before the connection
    stands, and which of those afterwards arrive live.
    """

    unheard: int
    arrivals: list[bool]


LIVES = st.builds(Life, st.integers(0, 4), st.lists(st.booleans()))


@given(st.lists(LIVES, min_size=1, max_size=3), st.booleans())
def test_every_batch_is_delivered_once_in_order_whatever_is_lost(
    lives: list[Life], is_quiet_at_times: bool
) -> None:
    order = Order()

    def serve(kept: range, ts: float) -> None:
        while order.feed.wanted is not None:
            order.replay(*kept[order.feed.wanted :], ts=ts)

    former = 0
    for ts, life in enumerate(lives, 1):
        order.feed.resume()
        serve(range(life.unheard), ts)
        for seq, arrives in enumerate(life.arrivals, life.unheard):
            if arrives:
                order.live(seq, ts=ts)
            elif is_quiet_at_times:
                order.feed.resume()
            serve(range(seq + 1), ts)
        total = life.unheard + len(life.arrivals)
        order.feed.resume()
        serve(range(total), ts)
        restart: list[int | str] = ["restart"] if former else []
        assert order.take() == [*restart, *range(total)]
        former = total


def test_recorded_frames_are_one_stream_with_their_recorded_replay() -> None:
    live = [
        (int.from_bytes(seq, "big"), payload)
        for _, seq, payload in recorded("kv_events_int_hashes.bin")
    ]
    replay = [
        (int.from_bytes(seq, "big"), payload)
        for *_, seq, payload in recorded("kv_events_replay.bin")[:-1]
    ]
    feed = kv.Feed(0, True)
    seen: list[kv.Delivery] = []
    for seq, payload in [live[0], *live[5:]]:
        seen += feed.live(seq, payload)
        if feed.wanted is not None:
            seen += feed.replayed(replay[feed.wanted :], True)
    assert [delivery.seq for delivery in seen] == [seq for seq, _ in live]
    assert [delivery.batch for delivery in seen] == [
        kv.decode_batch(payload) for _, payload in live
    ]


# --- The tally ------------------------------------------------------------------------


def resident(*wire: JSON) -> str:
    """The part of the summary about resident blocks, after these events."""
    tally = kv.Tally()
    for event in kv.decode_batch(batch(*wire)).events:
        tally.add(event)
    return tally.summary(1.0).split(", ", 2)[2].partition(" resident")[0]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], "0"),
        ([stored(1, 2), removed(1)], "1 GPU"),
        ([stored(1), stored(1), removed(1)], "1 GPU"),
        ([stored(1), stored(1), removed(1), removed(1)], "0 GPU"),
        ([removed(1), stored(1)], "1 GPU"),
        ([stored(1), CLEARED, stored(2)], "1 GPU"),
        (
            [stored(1), stored(1, medium="cpu"), removed(1, medium="CPU")],
            "1 GPU, 0 CPU",
        ),
        ([stored(1, group_idx=0), stored(1, group_idx=1)], "2 GPU"),
        ([stored(1, medium=None), removed(1)], "0 GPU"),
        ([stored(b"a", b"b"), removed(b"a")], "1 GPU"),
    ],
)
def test_resident_blocks_are_counted(events: list[JSON], expected: str) -> None:
    assert resident(*events) == expected


def test_a_restart_leaves_no_block() -> None:
    tally = kv.Tally()
    tally.add(kv.BlockStored([1], None, [], 16))
    tally.add(kv.PublisherRestarted())
    assert not tally.copies


# --- Sockets --------------------------------------------------------------------------


def subscribe(
    publisher: Publisher, *argv: str, replay: bool = True, **options: Any
) -> SubscriberProcess:
    """The subscriber, writing JSON, with or without the replay endpoint."""
    where = ["--endpoint", publisher.endpoint]
    if replay:
        where += ["--replay-endpoint", publisher.replay_endpoint]
    return SubscriberProcess(*where, "--format", "json", *argv, **options)


def numbers(events: list[JSON]) -> list[int]:
    return [event["seq"] for event in events if event["type"].startswith("Block")]


def publish(publisher: Publisher, seqs: range, ts: float = 1.0) -> None:
    for seq in seqs:
        publisher.publish(seq, batch(stored(seq), ts=ts))


def test_an_event_is_one_line_of_json_with_rank_number_and_time() -> None:
    with Publisher() as publisher, subscribe(publisher) as subscriber:
        publisher.wait_subscribed()
        event = stored(HIGH_HASH, b"\x00\xff", extra_keys=[["salt"], None])
        publisher.publish(0, batch(event, CLEARED, ts=2.5))
        assert subscriber.events(2) == [
            {
                "rank": 0,
                "seq": 0,
                "ts": 2.5,
                **without_nulls(event),
                "block_hashes": [HIGH_HASH, "AP8="],
            },
            {"rank": 0, "seq": 0, "ts": 2.5, **CLEARED},
        ]
        assert subscriber.stop() == []


def test_text_shows_the_same() -> None:
    with Publisher() as publisher:
        argv = ["--endpoint", publisher.endpoint]
        with SubscriberProcess(*argv) as subscriber:
            publisher.wait_subscribed()
            publisher.publish(0, batch(removed(5), ts=2.5))
            assert subscriber.next_line() == (
                "rank 0 batch 0 at 2.500 "
                '{"type":"BlockRemoved","block_hashes":[5],"medium":"GPU"}'
            )


@pytest.mark.parametrize("topic_in_replay", [True, False], ids=["0.26", "0.25"])
def test_a_gap_is_filled_by_replay(topic_in_replay: bool) -> None:
    with (
        Publisher(topic_in_replay=topic_in_replay) as publisher,
        subscribe(publisher) as subscriber,
    ):
        publisher.wait_subscribed()
        assert publisher.asked.get(timeout=HANG_GUARD) == 0
        publish(publisher, range(3))
        for seq in range(3, 1500):
            publisher.keep(seq, batch(stored(seq)))
        publish(publisher, range(1500, 1502))
        assert numbers(subscriber.events(1502)) == list(range(1502))
        assert publisher.asked.get(timeout=HANG_GUARD) == 3
        assert subscriber.stop() == []
        assert "1 gaps, 1 replays" in subscriber.log[-1]
        assert "1502 GPU resident" in subscriber.log[-1]


def test_a_gap_without_replay_endpoint_is_reported_and_live_events_go_on() -> None:
    with Publisher() as publisher, subscribe(publisher, replay=False) as subscriber:
        publisher.wait_subscribed()
        publish(publisher, range(0, 1))
        publish(publisher, range(4, 5))
        first, lost, second = subscriber.events(3)
        assert numbers([first, second]) == [0, 4]
        assert (lost["type"], lost["first"], lost["last"]) == ("BatchesLost", 1, 3)
        assert "1" in subscriber.wait_log("BatchesLost")


def test_a_replay_endpoint_that_does_not_answer_is_given_up() -> None:
    with Publisher() as publisher:
        publisher.answers = False
        limits = {"REPLAY_TIMEOUT": 0.2, "QUIET": 0.2}
        with subscribe(publisher, limits=limits) as subscriber:
            publisher.wait_subscribed()
            subscriber.wait_log("no replay")
            publish(publisher, range(0, 1))
            publish(publisher, range(2, 4))
            events = subscriber.events(4)
            assert numbers(events) == [0, 2, 3]
            assert events[1]["type"] == "BatchesLost"
            assert subscriber.stop() == []
        asked = [publisher.asked.get_nowait() for _ in range(publisher.asked.qsize())]
        # At the start and for the gap; never because it was quiet.
        assert asked == [0, 1]


def test_a_loss_at_the_end_of_a_burst_is_found_when_it_is_quiet() -> None:
    with (
        Publisher() as publisher,
        subscribe(publisher, limits={"QUIET": 0.2}) as subscriber,
    ):
        publisher.wait_subscribed()
        publish(publisher, range(2))
        assert numbers(subscriber.events(2)) == [0, 1]
        publisher.keep(2, batch(stored(2)))
        publisher.keep(3, batch(stored(3)))
        assert numbers(subscriber.events(2)) == [2, 3]
        publish(publisher, range(4, 5))
        assert numbers(subscriber.events(1)) == [4]


def test_a_corrupt_message_is_reported_with_its_number_and_skipped() -> None:
    with Publisher() as publisher, subscribe(publisher) as subscriber:
        publisher.wait_subscribed()
        publish(publisher, range(1))
        publisher.publish(1, b"\xc1")
        publisher.send_raw(b"short")
        publisher.send_raw(b"no number", b"x")
        publish(publisher, range(2, 3))
        first, corrupt, second = subscriber.events(3)
        assert numbers([first, second]) == [0, 2]
        assert (corrupt["first"], corrupt["last"]) == (1, 1)
        assert corrupt["reason"].startswith("corrupt")
        subscriber.wait_log("no batch")


def test_b81_a_restarted_publisher_is_noted_and_its_events_are_printed() -> None:
    with Publisher() as publisher, subscribe(publisher) as subscriber:
        publisher.wait_subscribed()
        publish(publisher, range(51))
        assert numbers(subscriber.events(51)) == list(range(51))
        publisher.kept.clear()
        publish(publisher, range(21))
        events = subscriber.events(22)
        assert events[0]["type"] == "PublisherRestarted"
        assert numbers(events) == list(range(21))
        subscriber.wait_log("PublisherRestarted")
        assert subscriber.stop() == []
        assert "21 GPU resident" in subscriber.log[-1]


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "live"])
def test_b81_a_publisher_that_comes_back_on_its_ports_is_followed(replay: bool) -> None:
    live_port = free_ports(2)
    with Publisher(live_port, live_port + 1) as publisher:
        subscriber = subscribe(publisher, replay=replay)
        publisher.wait_subscribed()
        publish(publisher, range(5))
        assert numbers(subscriber.events(5)) == list(range(5))
    with subscriber, Publisher(live_port, live_port + 1) as publisher:
        publisher.wait_subscribed()
        publish(publisher, range(3), ts=2.0)
        events = subscriber.events(4)
        assert events[0]["type"] == "PublisherRestarted"
        assert numbers(events) == [0, 1, 2]


def test_b81_a_restart_is_noted_though_the_new_numbers_go_on_from_the_old() -> None:
    live_port = free_ports(2)
    with Publisher(live_port, live_port + 1) as publisher:
        subscriber = subscribe(publisher)
        publisher.wait_subscribed()
        publish(publisher, range(5))
        assert numbers(subscriber.events(5)) == list(range(5))
    with subscriber, Publisher(live_port, live_port + 1) as publisher:
        for seq in range(5):
            publisher.keep(seq, batch(stored(100 + seq), ts=2.0))
        publisher.wait_subscribed()
        publish(publisher, range(5, 7), ts=2.0)
        events = subscriber.events(8)
        assert events[0]["type"] == "PublisherRestarted"
        assert numbers(events) == list(range(7))
        assert subscriber.stop() == []
        assert "7 GPU resident" in subscriber.log[-1]


def test_b81_a_late_subscriber_gets_everything_by_replay() -> None:
    with Publisher() as publisher:
        publish(publisher, range(40))
        with subscribe(publisher) as subscriber:
            assert numbers(subscriber.events(40)) == list(range(40))
            publisher.wait_subscribed()
            publish(publisher, range(40, 42))
            assert numbers(subscriber.events(2)) == [40, 41]


def test_b81_a_late_subscriber_without_replay_gets_what_comes() -> None:
    with Publisher() as publisher:
        publish(publisher, range(40))
        with subscribe(publisher, replay=False) as subscriber:
            publisher.wait_subscribed()
            publish(publisher, range(40, 42))
            lost, *events = subscriber.events(3)
            assert (lost["first"], lost["last"]) == (0, 39)
            assert numbers(events) == [40, 41]


def test_b81_a_subscriber_may_be_there_before_the_publisher() -> None:
    live_port = free_ports(2)
    argv = ["--endpoint", f"tcp://{HOST}:{live_port}", "--format", "json"]
    argv += ["--replay-endpoint", f"tcp://{HOST}:{live_port + 1}"]
    with SubscriberProcess(*argv) as subscriber:
        subscriber.wait_log("following")
        with Publisher(live_port, live_port + 1) as publisher:
            publisher.wait_subscribed()
            publish(publisher, range(3))
            assert numbers(subscriber.events(3)) == [0, 1, 2]


def test_b82_every_rank_is_followed_and_numbered_apart() -> None:
    live_port, replay_port = free_ports(2), free_ports(2)
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(Publisher(live_port + rank, replay_port + rank))
            for rank in range(2)
        ]
        publish(ranks[0], range(3))
        argv = ["--dp-size", "2"]
        subscriber = stack.enter_context(subscribe(ranks[0], *argv))
        for publisher in ranks:
            publisher.wait_subscribed()
        publish(ranks[0], range(3, 5))
        publish(ranks[1], range(4))
        events = subscriber.events(9)
        for rank, count in enumerate((5, 4)):
            of_rank = [event for event in events if event["rank"] == rank]
            assert numbers(of_rank) == list(range(count))
        assert subscriber.stop() == []
        assert [line.split(",")[0] for line in subscriber.log[-2:]] == [
            "rank 0: 5 blocks stored",
            "rank 1: 4 blocks stored",
        ]


def test_b82_a_rank_without_answer_does_not_cost_the_other_its_events() -> None:
    live_port, replay_port = free_ports(2), free_ports(2)
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(Publisher(live_port + rank, replay_port + rank))
            for rank in range(2)
        ]
        ranks[1].answers = False
        limits = {"REPLAY_TIMEOUT": 0.3}
        subscriber = stack.enter_context(
            subscribe(ranks[0], "--dp-size", "2", limits=limits)
        )
        for publisher in ranks:
            publisher.wait_subscribed()
        publish(ranks[1], range(2, 3))
        publish(ranks[0], range(3))
        events = subscriber.events(5)
        assert numbers([event for event in events if event["rank"] == 0]) == [0, 1, 2]
        assert numbers([event for event in events if event["rank"] == 1]) == [2]


def test_b82_overlapping_port_ranges_are_refused() -> None:
    argv = ["--endpoint", "tcp://localhost:5557", "--dp-size", "2"]
    argv += ["--replay-endpoint", "tcp://localhost:5558"]
    with SubscriberProcess(*argv) as subscriber:
        assert subscriber.wait() == 1
        assert "5558" in subscriber.log[-1]
        assert "--kv-events-config" in subscriber.log[-1]


@pytest.mark.parametrize(
    "argv",
    [
        ["--endpoint", "nonsense"],
        ["--dp-size", "0"],
        ["--endpoint", "tcp://localhost:port", "--dp-size", "2"],
        ["--source", f"http://{HOST}:1"],
    ],
)
def test_an_endpoint_that_cannot_be_is_an_error_of_one_line(argv: list[str]) -> None:
    with SubscriberProcess(*argv) as subscriber:
        assert subscriber.wait() == 1
        assert len(subscriber.log) == 1
        assert subscriber.log[0].startswith("ERROR ")


@pytest.mark.parametrize(("topic", "seen"), [(TOPIC, [1]), ("", [0, 1]), ("x", [])])
def test_topics_are_prefixes(topic: str, seen: list[int]) -> None:
    with (
        Publisher(topic="other") as publisher,
        subscribe(publisher, "--topic", topic, replay=False) as subscriber,
    ):
        publisher.wait_subscribed()
        publisher.send(0, batch(stored(0)))
        publisher.topic = f"{TOPIC}@engine".encode()
        publisher.send(1, batch(stored(1)))
        publisher.topic = topic.encode()
        publisher.send(2, batch(stored(2)))
        while (event := subscriber.next_event())["seq"] < 2:
            if event["type"] == "BlockStored":
                assert event["seq"] == seen.pop(0)
        assert seen == []


# --- Discovery ------------------------------------------------------------------------


@contextlib.contextmanager
def engine_that_names(sources: Any) -> Iterator[str]:
    """An HTTP server whose /kv_event_sources says this."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/kv_event_sources"
            body = json.dumps(sources).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Keeps the test's output clean."""

    with HTTPServer((HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{HOST}:{server.server_port}"
        server.shutdown()
        thread.join()


def test_b82_the_sources_an_engine_names_are_followed() -> None:
    with Publisher(topic="a") as zero, Publisher(topic="") as one:
        sources = {
            "0": {
                "endpoint": zero.endpoint.replace(HOST, "*"),
                "replay_endpoint": None,
                "topic": "a",
            },
            "1": {
                "endpoint": one.endpoint,
                "replay_endpoint": one.replay_endpoint.replace(HOST, "0.0.0.0"),
                "topic": "",
            },
        }
        publish(one, range(2))
        with engine_that_names(sources) as url:
            # A proxy that must not be asked.
            env = {"http_proxy": f"http://{HOST}:1"}
            with SubscriberProcess(
                "--source", url, "--format", "json", env=env
            ) as subscriber:
                zero.wait_subscribed()
                publish(zero, range(1))
                events = subscriber.events(3)
                assert sorted((e["rank"], e["seq"]) for e in events) == [
                    (0, 0),
                    (1, 0),
                    (1, 1),
                ]


@pytest.mark.parametrize(
    ("sources", "message"),
    [({}, "publishes no KV events"), ({"0": {"topic": ""}}, "endpoint"), ([], "array")],
)
def test_an_engine_without_events_is_an_error(sources: Any, message: str) -> None:
    with (
        engine_that_names(sources) as url,
        SubscriberProcess("--source", url) as subscriber,
    ):
        assert subscriber.wait() == 1
        assert len(subscriber.log) == 1
        assert message in subscriber.log[0]


# --- Command line ---------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly_with_a_summary(number: signal.Signals) -> None:
    with (
        Publisher() as publisher,
        subscribe(publisher, "--quiet", replay=False) as subscriber,
    ):
        publisher.wait_subscribed()
        publisher.publish(
            0, batch(stored(1, 2, 3), removed(1), stored(9, medium="CPU"))
        )
        publisher.publish(1, b"\xc1")
        subscriber.wait_log("BatchesLost")
        subscriber.signal(number)
        assert subscriber.wait() == 0
        summary = subscriber.log[-1]
        assert summary.startswith(
            "rank 0: 4 blocks stored, 1 removed, 2 GPU, 1 CPU resident, 4 tokens, "
        )
        assert summary.endswith("1 batches lost, 0 gaps, 0 replays")


def test_a_reader_that_has_had_enough_ends_it_quietly() -> None:
    with Publisher() as publisher:
        argv = [sys.executable, str(SUBSCRIBER), "--endpoint", publisher.endpoint]
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as subscriber:
            assert subscriber.stdout
            assert subscriber.stderr
            publisher.wait_subscribed()
            subscriber.stdout.close()
            publish(publisher, range(1))
            assert subscriber.wait(HANG_GUARD) == 0
            assert b"rror" not in subscriber.stderr.read()


def test_statistics_are_lines_in_a_log() -> None:
    with Publisher() as publisher:
        argv = ["--stats", "--quiet"]
        with subscribe(publisher, *argv, limits={"RELOG": 0.1}) as subscriber:
            publisher.wait_subscribed()
            publish(publisher, range(2))
            subscriber.wait_log("2 blocks stored")
            subscriber.wait_log("2 blocks stored")
            assert not any("\x1b" in line for line in subscriber.log)


def test_statistics_on_a_terminal_are_drawn_in_place() -> None:
    with Publisher() as publisher:
        terminal, inner = pty.openpty()
        command = [sys.executable, str(SCALED_PROXY), str(SUBSCRIBER), "REDRAW=0.1"]
        argv = ["--", "--endpoint", publisher.endpoint, "--stats", "--quiet"]
        with subprocess.Popen([*command, *argv], stderr=inner) as subscriber:
            os.close(inner)
            seen = b""
            while seen.count(b"\x1b[J" + b"rank 0: 0 blocks stored") < 2:
                seen += os.read(terminal, 4096)
            assert b"0 replays\r\n\x1b[1F\x1b[Jrank 0: " in seen
            subscriber.terminate()
            assert subscriber.wait(HANG_GUARD) == 0
        os.close(terminal)


# --- Library --------------------------------------------------------------------------


def test_events_can_be_iterated_over() -> None:
    async def collect(publisher: Publisher) -> list[tuple[int, int, kv.Event]]:
        source = kv.Source(publisher.endpoint, publisher.replay_endpoint, TOPIC, 3)
        events = []
        async with contextlib.aclosing(aiter(kv.Subscriber([source]))) as subscriber:
            async for event in subscriber:
                events.append(event)
                if len(events) == 3:
                    break
        return events

    with Publisher() as publisher:
        publisher.keep(0, batch(removed(1), CLEARED))
        publisher.keep(1, batch(removed(2)))
        events = asyncio.run(asyncio.wait_for(collect(publisher), HANG_GUARD))
    assert events == [
        (3, 0, kv.BlockRemoved([1], medium="GPU")),
        (3, 0, kv.AllBlocksCleared()),
        (3, 1, kv.BlockRemoved([2], medium="GPU")),
    ]
