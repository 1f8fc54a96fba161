#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Logs the KV cache events of vLLM engines: every event once, in order.

An engine numbers its batches of events from 0 and offers them twice
(vllm/distributed/kv_events.py of 0.32 and 0.33): a PUB socket sends them live and
silently drops what is read too slowly; a ROUTER repeats those it still keeps, from a
number on. So, for each data-parallel rank:

1. Subscribe first; once connected, ask for a replay; then read live batches, and drop
   those that the replay has brought.
2. A number beyond the next one is a gap: ask for what is between. What nobody has any
   more is reported as `BatchesLost`, and live batches go on.
3. A number that goes back is a restarted publisher: `PublisherRestarted`, ask from 0.
   Its numbers may have passed the old ones by the time they are seen. So, after each
   reconnect, ask for the last known batch too, and see whether it is still the same.
4. No later number shows a loss at the end of a burst: when it gets quiet, ask once.

As a library: `decode_batch`, and `async for rank, seq, event in Subscriber(sources)`.
"""

import argparse
import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
import sys
import time
import urllib.parse
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgpack
import msgspec
import zmq
import zmq.asyncio

logger = logging.getLogger("kv_events")

RECEIVE_HIGH_WATER = 100_000  # messages kept per rank; as many as vLLM itself queues
MAX_MESSAGE_BYTES = 256 << 20  # far above any batch; a wild peer must not fill memory
ROUND = 500  # messages of one rank, before other ranks and signals have their turn
REPLAY_TIMEOUT = 5.0  # seconds without an answer; an idle engine needs 0.1
QUIET = 1.0  # seconds without a live batch, before a check that none is missing
SOURCE_TIMEOUT = 5.0  # seconds for GET /kv_event_sources
MAX_TIME = 1 << 33  # seconds since 1970, in 2242; a later batch would hide all others
MAX_REPORTED = 100  # unknown names remembered as reported; bounds the memory
REDRAW, RELOG = 1.0, 10.0  # seconds between two summaries: on a terminal, in a log
END = b"\xff" * 8  # the number that ends a replay
CLEAR = "\x1b[J"  # for terminals: from here to the end of the screen


# --- Events ---------------------------------------------------------------------------

Hash = int | bytes


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks entered a cache. Fields in the order of the arrays of vLLM <= 0.23."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks left a cache."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The prefix cache was reset."""


class BatchesLost(msgspec.Struct, tag=True):
    """Ours: the batches `first` to `last` can no longer be had."""

    first: int
    last: int
    reason: str


class PublisherRestarted(msgspec.Struct, tag=True):
    """Ours: the publisher is a new one, and its caches are empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared | BatchesLost | PublisherRestarted

EVENT_TYPES: dict[str, type[BlockStored | BlockRemoved | AllBlocksCleared]] = {
    cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)
}
KEYS = {name: {"type", *cls.__struct_fields__} for name, cls in EVENT_TYPES.items()}


class EventBatch(NamedTuple):
    """The events of one engine step; `ts` in seconds since 1970, its clock."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


@functools.lru_cache(MAX_REPORTED)
def _report_once(what: str) -> None:
    logger.warning("skipping %s: not known", what)


def _decode_event(raw: Any) -> Iterator[Event]:
    is_map = isinstance(raw, dict)
    name, *values = [raw["type"]] if is_map else raw
    cls = EVENT_TYPES.get(name)
    if cls is None:
        _report_once(f"events of type {name!r}")
        return
    fields = raw if is_map else dict(zip(cls.__struct_fields__, values))
    for key in fields.keys() - KEYS[name]:
        _report_once(f"field {key!r} of {name}")
    if len(values) > len(fields):
        _report_once(f"field {len(fields) + 1} of {name}")
    yield msgspec.convert(fields, cls)


def decode_batch(payload: bytes) -> EventBatch:
    """Decodes a batch of vLLM 0.10 to 0.33: arrays, maps, and arrays of maps.

    Args:
        payload: last frame of a message.

    Raises:
        ValueError: it is not a batch of events.

    """
    try:
        raw = msgpack.unpackb(payload, strict_map_key=False)
        if isinstance(raw, dict):
            raw = raw["ts"], raw["events"], raw.get("data_parallel_rank")
        ts, events, *rest = raw
        if not 0 <= float(ts) < MAX_TIME:
            raise ValueError(f"time {ts!r}")
        decoded = [event for raw_event in events for event in _decode_event(raw_event)]
        return EventBatch(float(ts), decoded, rest[0] if rest else None)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as err:
        raise ValueError(f"{type(err).__name__} {err}".rstrip()) from err


# --- The order of one publisher, without sockets --------------------------------------


class Delivery(NamedTuple):
    """A batch in its place."""

    rank: int
    seq: int
    batch: EventBatch


class Feed:
    """Puts the live and the replayed batches of one rank into one order.

    While `wanted` is a number, a replay from it has to be fetched and given to
    `replayed` before the next live batch.
    """

    def __init__(self, rank: int, can_replay: bool) -> None:
        self.rank = rank
        self.wanted: int | None = None
        self.last = -1
        self.gaps = self.replays = 0
        self._can_replay = can_replay
        self._ts = 0.0  # of batch `last`
        self._live = -1  # number of the last live batch, delivered or not
        self._known: tuple[int, float] | None = None  # the replay must confirm it
        self._fence = -math.inf  # live batches before it are the former publisher's
        self._held: tuple[int, EventBatch] | None = None  # until the replay is here

    def resume(self) -> None:
        """Wants what follows `last`, and `last` itself to recognise the publisher."""
        if self._can_replay:
            self.wanted = max(self.last, 0)
            self._known = (self.last, self._ts) if self.last >= 0 else None

    def live(self, seq: int, payload: bytes) -> Iterator[Delivery]:
        """Takes a live batch; afterwards a replay may be wanted."""
        batch = self._decode(seq, payload)
        if batch.ts < self._fence:
            return
        self._fence = -math.inf
        if seq <= self._live or (seq <= self.last and batch.ts > self._ts):
            yield self._restart()
        self._live = seq
        if seq > self.last + 1:
            self.gaps += 1
            if self._can_replay:
                self.wanted = self.last + 1
        if self.wanted is None:
            yield from self._accept(seq, batch)
        else:
            self._held = seq, batch

    def replayed(
        self, replay: Iterable[tuple[int, bytes]], complete: bool
    ) -> Iterator[Delivery]:
        """Takes the wanted replay; `complete` if the end marker was seen."""
        batches = ((seq, self._decode(seq, payload)) for seq, payload in replay)
        before, known, held = self.last, self._known, self._held
        self.wanted = self._known = self._held = None
        # A publisher keeps at least its newest batch: none is the answer of a new one.
        first = next(batches, None)
        if (
            known
            and complete
            and (not first or (first[0] == known[0] and first[1].ts != known[1]))
        ):
            yield self._restart()
            return
        if first and self.last < 0:
            self._fence = first[1].ts
        for seq, batch in chain(filter(None, [first]), batches):
            yield from self._accept(seq, batch)
        self.replays += self.last > before
        if held:
            yield from self._accept(*held)

    def _accept(self, seq: int, batch: EventBatch) -> Iterator[Delivery]:
        if seq <= self.last:
            return
        if seq > self.last + 1:
            lost = BatchesLost(self.last + 1, seq - 1, "missing")
            yield Delivery(self.rank, seq - 1, EventBatch(self._ts, [lost]))
        self.last, self._ts = seq, batch.ts
        yield Delivery(self.rank, seq, batch)

    def _restart(self) -> Delivery:
        self.last = self._live = -1
        if self._can_replay:
            self.wanted = 0
        return Delivery(self.rank, 0, EventBatch(self._ts, [PublisherRestarted()]))

    def _decode(self, seq: int, payload: bytes) -> EventBatch:
        try:
            return decode_batch(payload)
        except ValueError as err:
            return EventBatch(self._ts, [BatchesLost(seq, seq, f"corrupt: {err}")])


# --- Sockets --------------------------------------------------------------------------


class Source(msgspec.Struct):
    """Where one rank publishes; of vLLM's KVEventsConfig what is needed."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    rank: int = 0


def _drain(socket: zmq.asyncio.Socket) -> Iterator[list[bytes]]:
    # Not the async socket: a future per message would cost more than the rest.
    plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
    with contextlib.suppress(zmq.Again):
        for _ in range(ROUND):
            yield plain.recv_multipart(zmq.NOBLOCK)


def _numbered(messages: list[list[bytes]]) -> Iterator[tuple[int, bytes]]:
    for frames in messages:
        if len(frames) < 3 or len(frames[-2]) != len(END):
            logger.warning("skipping a message that is no batch: %.80r", frames)
        else:
            yield int.from_bytes(frames[-2], "big"), frames[-1]


class Stream:
    """The sockets of one rank: SUB with its monitor, and a DEALER for each replay."""

    def __init__(self, context: zmq.asyncio.Context, source: Source) -> None:
        self.feed = Feed(source.rank, bool(source.replay_endpoint))
        self.check_at = math.inf  # loop time
        self._context = context
        self._replay_endpoint = source.replay_endpoint or ""
        self._answers = True
        self.sub = context.socket(zmq.SUB)
        self.sub.subscribe(source.topic)
        self.monitor = self.sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._connect(self.sub, source.endpoint)

    @staticmethod
    def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
        socket.rcvhwm = RECEIVE_HIGH_WATER
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        # Not always: `localhost` might become ::1, where vLLM does not listen.
        socket.ipv6 = "[" in endpoint
        socket.connect(endpoint)

    async def advance(self) -> list[Delivery]:
        """Takes what has arrived, and fetches the replays that are wanted for it."""
        clock = asyncio.get_running_loop().time
        messages = list(_drain(self.sub))
        # Read second, so that a new connection is known before what came over it.
        connected = any(list(_drain(self.monitor)))
        quiet = not messages and clock() >= self.check_at
        if connected or quiet:
            self.feed.resume()
        deliveries = await self._repair()
        for seq, payload in _numbered(messages):
            deliveries += self.feed.live(seq, payload)
            if self.feed.wanted is not None:
                deliveries += await self._repair()
        if quiet or not self._answers:
            self.check_at = math.inf
        elif connected or messages:
            self.check_at = clock() + QUIET
        return deliveries

    async def _repair(self) -> list[Delivery]:
        deliveries: list[Delivery] = []
        while (start := self.feed.wanted) is not None:
            messages, self._answers = await self._fetch(start)
            deliveries += self.feed.replayed(_numbered(messages), self._answers)
        return deliveries

    async def _fetch(self, start: int) -> tuple[list[list[bytes]], bool]:
        messages: list[list[bytes]] = []
        # A DEALER: the answer is many messages, of which a REQ would take one.
        with self._context.socket(zmq.DEALER) as dealer:
            self._connect(dealer, self._replay_endpoint)
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            while await dealer.poll(int(REPLAY_TIMEOUT * 1000)):
                messages += _drain(dealer)
                if messages[-1][-2:-1] == [END]:
                    return messages[:-1], True
        logger.warning("no replay from %s, tried from %d", self._replay_endpoint, start)
        return messages, False


class Subscriber:
    """Follows the publishers of all ranks; iterates over (rank, seq, event)."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._context = zmq.asyncio.Context()
        self._context.linger = 0  # milliseconds that closed sockets go on sending
        self._streams = [Stream(self._context, source) for source in sources]
        self.feeds = [stream.feed for stream in self._streams]

    async def rounds(self) -> AsyncGenerator[list[Delivery]]:
        """Yields batches as they come, many at a time under load."""
        loop = asyncio.get_running_loop()
        poller = zmq.asyncio.Poller()
        for stream in self._streams:
            poller.register(stream.sub, zmq.POLLIN)
            poller.register(stream.monitor, zmq.POLLIN)
        try:
            while True:
                check_at = min(stream.check_at for stream in self._streams)
                wait = max(0.0, check_at - loop.time())
                await poller.poll(-1 if math.isinf(wait) else math.ceil(wait * 1000))
                # As tasks: replays are waited for together, and signals are seen.
                advances = (stream.advance() for stream in self._streams)
                for deliveries in await asyncio.gather(*advances):
                    yield deliveries
        finally:
            self._context.destroy()

    async def __aiter__(self) -> AsyncGenerator[tuple[int, int, Event]]:
        async for deliveries in self.rounds():
            for rank, seq, batch in deliveries:
                for event in batch.events:
                    yield rank, seq, event


# --- What the events add up to --------------------------------------------------------


class Tally:
    """The blocks in the caches of one rank, and what happened so far."""

    def __init__(self) -> None:
        self.stored = self.removed = self.tokens = self.events = self.lost = 0
        # Copies of each block by medium and group: an engine can hold several of one
        # block, and announces the beginning and the end of each.
        self.copies: dict[tuple[str, int | None], dict[Hash, int]] = defaultdict(dict)

    def add(self, event: Event) -> None:
        """Counts an event."""
        self.events += 1
        if isinstance(event, BatchesLost):
            self.lost += event.last - event.first + 1
        elif isinstance(event, AllBlocksCleared | PublisherRestarted):
            self.copies.clear()
        else:
            copies = self.copies[(event.medium or "GPU").upper(), event.group_idx]
            if isinstance(event, BlockStored):
                self.stored += len(event.block_hashes)
                self.tokens += len(event.token_ids)
                for block in event.block_hashes:
                    copies[block] = copies.get(block, 0) + 1
            else:
                self.removed += len(event.block_hashes)
                for block in event.block_hashes:
                    if (left := copies.pop(block, 0) - 1) > 0:
                        copies[block] = left

    def summary(self, seconds: float) -> str:
        """What happened in `seconds`, and how many different blocks are left."""
        resident: Counter[str] = Counter()
        for (medium, _), copies in self.copies.items():
            resident[medium] += len(copies)
        blocks = ", ".join(f"{n} {medium}" for medium, n in resident.items())
        return (
            f"{self.stored} blocks stored, {self.removed} removed, "
            f"{blocks or 0} resident, {self.tokens} tokens, "
            f"{self.events / seconds:.0f} events/s, {self.lost} batches lost"
        )


# --- Lines ----------------------------------------------------------------------------

# Fields that are null are left out, bytes are base64.
_json = msgspec.json.Encoder(enc_hook=str).encode


def json_lines(rank: int, seq: int, batch: EventBatch) -> Iterator[bytes]:
    head = _json({"rank": rank, "seq": seq, "ts": batch.ts})[:-1] + b","
    for event in batch.events:
        yield head + _json(event)[1:] + b"\n"


def text_lines(rank: int, seq: int, batch: EventBatch) -> Iterator[bytes]:
    for event in batch.events:
        yield b"rank %d batch %d at %.3f %s\n" % (rank, seq, batch.ts, _json(event))


class Log:
    """Events go to stdout; notices and summaries go to stderr."""

    def __init__(self, feeds: Sequence[Feed], args: argparse.Namespace) -> None:
        self._tallies = {feed.rank: (feed, Tally()) for feed in feeds}
        self._lines = {"json": json_lines, "text": text_lines}[args.format]
        self._quiet = args.quiet
        self._began = time.monotonic()

    def write(self, deliveries: list[Delivery]) -> None:
        """Logs batches."""
        for rank, seq, batch in deliveries:
            for event in batch.events:
                self._tallies[rank][1].add(event)
                if isinstance(event, BatchesLost | PublisherRestarted):
                    logger.warning("rank %d: %s", rank, event)
            if not self._quiet:
                sys.stdout.buffer.writelines(self._lines(rank, seq, batch))
        sys.stdout.buffer.flush()

    def summary(self) -> str:
        """A line per rank."""
        seconds = time.monotonic() - self._began
        return "".join(
            f"rank {rank}: {tally.summary(seconds)}, {feed.gaps} gaps, "
            f"{feed.replays} replays\n"
            for rank, (feed, tally) in self._tallies.items()
        )

    async def report(self) -> None:
        """Writes summaries for ever; on a terminal, whatever comes next is over it."""
        terminal = sys.stderr.isatty()
        back = f"\x1b[{len(self._tallies)}F" if terminal else ""
        while True:
            await asyncio.sleep(REDRAW if terminal else RELOG)
            print(
                CLEAR * terminal + self.summary(), end=back, file=sys.stderr, flush=True
            )


# --- Command line ---------------------------------------------------------------------


def ranks(endpoint: str, replay: str | None, topic: str, dp_size: int) -> list[Source]:
    """The sources of `dp_size` ranks: vLLM adds the rank to both ports.

    Raises:
        ValueError: the ports are no numbers, or overlap.

    """

    def offset(base: str, rank: int) -> str:
        host, _, port = base.rpartition(":")
        return f"{host}:{int(port) + rank}" if rank else base

    live = [offset(endpoint, rank) for rank in range(dp_size)]
    repeat = [replay and offset(replay, rank) for rank in range(dp_size)]
    ports = {each.rpartition(":")[2] for each in live}
    if clash := ports.intersection((each or "").rpartition(":")[2] for each in repeat):
        raise ValueError(
            f"ports {', '.join(sorted(clash))} would publish and replay: set the two "
            f"at least {dp_size} apart in vLLM's --kv-events-config"
        )
    return [Source(live[rank], repeat[rank], topic, rank) for rank in range(dp_size)]


def discover(url: str) -> list[Source]:
    """The sources that an engine names at GET /kv_event_sources.

    Raises:
        OSError: no answer.
        ValueError: the engine publishes no events.

    """
    # No proxies: `http_proxy` is not meant for engines.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url.rstrip('/')}/kv_event_sources", None, SOURCE_TIMEOUT) as r:
        found = msgspec.json.decode(r.read(), type=dict[int, Source])
    if not found:
        raise ValueError(f"{url} publishes no KV events: see vLLM's --kv-events-config")
    host = urllib.parse.urlsplit(url).hostname or ""
    host = f"[{host}]" if ":" in host else host

    for rank, source in found.items():
        source.rank = rank
        for everywhere in ("//*:", "//0.0.0.0:", "//[::]:"):
            source.endpoint = source.endpoint.replace(everywhere, f"//{host}:")
            replay = source.replay_endpoint or ""
            source.replay_endpoint = replay.replace(everywhere, f"//{host}:")
    return list(found.values())


async def run(sources: Sequence[Source], args: argparse.Namespace) -> None:
    """Logs events until SIGINT or SIGTERM."""
    task = asyncio.current_task()
    assert task
    for stop in signal.SIGINT, signal.SIGTERM:
        asyncio.get_running_loop().add_signal_handler(stop, task.cancel)
    subscriber = Subscriber(sources)
    for source in sources:
        logger.info("following %s", source)
    log = Log(subscriber.feeds, args)
    reporter = asyncio.create_task(log.report()) if args.stats else None
    try:
        async with contextlib.aclosing(subscriber.rounds()) as rounds:
            async for deliveries in rounds:
                log.write(deliveries)
    except asyncio.CancelledError:
        print(CLEAR * sys.stderr.isatty() + log.summary(), end="", file=sys.stderr)
    finally:
        if reporter:
            reporter.cancel()


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Log the KV cache events of vLLM.")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--endpoint",
        default="tcp://localhost:5557",
        help="of rank 0; rank N is at port + N",
    )
    where.add_argument(
        "--source", metavar="URL", help="engine to ask for endpoints, topics and ranks"
    )
    parser.add_argument(
        "--replay-endpoint", help="of rank 0 as above; without, gaps stay gaps"
    )
    parser.add_argument(
        "--topic",
        default="kv-events",
        help="prefix; empty for all, which is vLLM's own default",
    )
    parser.add_argument(
        "--dp-size",
        type=int,
        default=1,
        help="ranks to follow; the two ports have to be that far apart",
    )
    parser.add_argument(
        "--format",
        choices=["text", "json"],
        default="text",
        help="lines for readers, or an object for each event",
    )
    parser.add_argument("--stats", action="store_true", help="summaries on stderr")
    parser.add_argument("--quiet", action="store_true", help="do not print events")
    return parser


def main() -> int:
    parser = argument_parser()
    args = parser.parse_args()
    # The summary of a terminal stands below the cursor.
    clear = CLEAR * (args.stats and sys.stderr.isatty())
    logging.basicConfig(level=logging.INFO, format=clear + "%(levelname)s %(message)s")
    try:
        sources = (
            discover(args.source)
            if args.source
            else ranks(args.endpoint, args.replay_endpoint, args.topic, args.dp_size)
        )
        asyncio.run(run(sources, args))
    except BrokenPipeError:
        # The reader has had enough. Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, zmq.ZMQError) as err:
        logger.error("%s", err)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
