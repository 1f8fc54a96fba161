# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How many KV events per second the subscriber takes, and what one costs.

    python tests/bench/kv_events_rate.py [--rate 100000] [--seconds 10] [--batch 10]

A publisher in this process sends the same stream to two subscribers, one after the
other: kv_events_subscriber.py with `--format json` to a file, and a minimal loop
around msgspec (`--minimal`) that decodes into types, writes JSON lines, and does
nothing else: no order, no gaps, no tally. There is no replay endpoint, so what is
lost stays lost. The exit status says whether every event arrived in its place.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kv_publisher import CLEARED, SUBSCRIBER, Publisher, batch, removed, stored
from rig import poll

BLOCK = 16  # tokens
TICK = 0.005  # seconds between two bursts of the publisher
DRAIN_LIMIT = 120.0  # seconds for a subscriber to finish after the publisher


# --- The minimal subscriber -----------------------------------------------------------


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int | bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def minimal(endpoint: str) -> None:
    """Receives, decodes, writes; for ever."""
    socket = zmq.Context().socket(zmq.SUB)
    socket.rcvhwm = 0
    socket.subscribe("")
    socket.connect(endpoint)
    decode = msgspec.msgpack.Decoder(EventBatch).decode
    encode = msgspec.json.Encoder().encode
    while True:
        _, seq, payload = socket.recv_multipart()
        for event in decode(payload).events:
            head = b'{"seq":%d,' % int.from_bytes(seq, "big")
            sys.stdout.buffer.write(head + encode(event)[1:] + b"\n")
        if not socket.poll(0):
            sys.stdout.buffer.flush()


# --- The stream -----------------------------------------------------------------------


def payloads(size: int) -> Iterator[bytes]:
    """Batches of `size` events: one block after the other is stored, later removed."""
    tokens = list(range(1000, 1000 + BLOCK))
    for step in itertools.count():
        yield batch(
            *(
                stored(block << 32, token_ids=tokens, block_size=BLOCK)
                if block % 2
                else removed(block - 1 << 32)
                for block in range(step * size, (step + 1) * size)
            ),
            ts=time.time(),
        )


def send(
    publisher: Publisher, rate: int, seconds: float, size: int
) -> tuple[int, float]:
    """Sends at a steady rate; returns the number of batches and the seconds it took."""
    source = payloads(size)
    total = int(rate * seconds / size)
    began = time.monotonic()
    for seq in range(total):
        due = began + seq * size / rate
        if due > time.monotonic() + TICK:
            time.sleep(TICK)
        publisher.send(seq, next(source))
    took = time.monotonic() - began
    publisher.send(total, batch(CLEARED))
    return total, took


# --- One run --------------------------------------------------------------------------


def last_line(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 300))
        return file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]


def misplaced(path: Path, batches: int, size: int) -> int:
    """How many events are not where they should be; 0 if all is well."""
    numbers = (number for number in range(batches) for _ in range(size))
    expected = itertools.chain(numbers, [batches])
    with path.open("rb") as file:
        found = (json.loads(line)["seq"] for line in file)
        return sum(a != b for a, b in itertools.zip_longest(expected, found))


def measure(name: str, command: list[str], options: argparse.Namespace) -> int:
    """Runs a subscriber on the stream, prints a line, returns what is misplaced."""
    with tempfile.TemporaryDirectory() as folder, Publisher() as publisher:
        path = Path(folder, "events.jsonl")
        with path.open("wb") as out:
            process = subprocess.Popen(
                [*command, "--endpoint", publisher.endpoint],
                stdout=out,
                stderr=subprocess.DEVNULL,
            )
        publisher.wait_subscribed()
        before = cpu_seconds(process.pid)
        batches, took = send(publisher, options.rate, options.seconds, options.batch)
        poll(lambda: b"AllBlocksCleared" in last_line(path), "all is read", DRAIN_LIMIT)
        cpu = cpu_seconds(process.pid) - before
        process.send_signal(signal.SIGTERM)
        process.wait()
        events = batches * options.batch
        wrong = misplaced(path, batches, options.batch)
    print(
        f"{name:10} {events} events in batches of {options.batch}, "
        f"{events / took:.0f}/s offered, {wrong} lost or misplaced, "
        f"{cpu / events * 1e6:.2f} us CPU per event",
        flush=True,
    )
    return wrong


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=int, default=100_000, help="events per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--batch", type=int, default=10, help="events per message")
    parser.add_argument("--minimal", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.minimal:
        minimal(options.endpoint)
    ours = [sys.executable, str(SUBSCRIBER), "--format", "json"]
    loop = [sys.executable, __file__, "--minimal"]
    wrong = measure("subscriber", ours, options)
    measure("minimal", loop, options)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
