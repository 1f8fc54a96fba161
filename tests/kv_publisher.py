# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A publisher with the framing of vLLM's, and the subscriber as a process.

    with Publisher() as publisher:
        with SubscriberProcess("--endpoint", publisher.endpoint) as subscriber:
            publisher.wait_subscribed()
            publisher.publish(0, batch(stored(1)))
            assert "BlockStored" in subscriber.next_line()

Payloads are made by msgspec, as vLLM makes them; the subscriber reads with msgpack.
"""

import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq
from rig import HANG_GUARD, JSON, ROOT, SCALED_PROXY, poll

SUBSCRIBER = ROOT / "kv_events_subscriber.py"
TOPIC = "kv-events"
HOST = "127.0.0.1"
# Below what Linux hands out by itself, so that a range stays free until it is bound.
PORTS = range(20000, 32000)
END_MARKER = (-1).to_bytes(8, "big", signed=True)


def free_ports(count: int = 1) -> int:
    """The first of `count` ports in a row that nothing listens on."""
    while True:
        first = random.choice(PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server((HOST, port)))
            return first


def session_members(session: int) -> list[int]:
    """The processes of a session, zombies included."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session:
            members.append(int(path.parent.name))
    return members


# --- Payloads -------------------------------------------------------------------------


def stored(*hashes: int | bytes, **fields: Any) -> JSON:
    """A `BlockStored` as vLLM 0.24 and later send it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": None,
        "token_ids": [7] * len(hashes),
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **fields,
    }


def removed(*hashes: int | bytes, **fields: Any) -> JSON:
    """A `BlockRemoved` as vLLM 0.24 and later send it."""
    return {
        "type": "BlockRemoved",
        "block_hashes": list(hashes),
        "medium": "GPU",
        **fields,
    }


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: Any, ts: float = 1.0, rank: int | None = 0) -> bytes:
    """A batch as vLLM sends it: an array."""
    return msgspec.msgpack.encode([ts, list(events), rank])


# --- The publisher --------------------------------------------------------------------


class Publisher:
    """PUB and ROUTER of one rank.

    Args:
        live_port: 0 for any.
        replay_port: 0 for any.
        topic: first frame of live batches.
        topic_in_replay: as in vLLM >= 0.26; False for what was before.

    """

    def __init__(
        self,
        live_port: int = 0,
        replay_port: int = 0,
        topic: str = TOPIC,
        topic_in_replay: bool = True,
    ) -> None:
        self.topic = topic.encode()
        # What a replay brings; cut it to forget.
        self.kept: list[tuple[int, bytes]] = []
        # False: requests are read and never answered.
        self.answers = True
        # First numbers of the replays that were asked for.
        self.asked: queue.Queue[int] = queue.Queue()
        self._replay_head = [self.topic] if topic_in_replay else []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # XPUB is PUB that also says who subscribes, so that tests need not guess.
        self._live = self._socket(zmq.XPUB, live_port)
        self._live.xpub_verbose = True
        self._router = self._socket(zmq.ROUTER, replay_port)
        self._stop, self._stopped = socket.socketpair()
        self.endpoint = self._live.get_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._router.get_string(zmq.LAST_ENDPOINT)
        self._server = threading.Thread(target=self._serve)
        self._server.start()

    def _socket(self, kind: int, port: int) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        sock.linger = 0
        sock.sndhwm = 0

        def bound() -> bool:
            # ZeroMQ gives up the port of a closed socket a little later.
            with contextlib.suppress(zmq.ZMQError):
                sock.bind(f"tcp://{HOST}:{port or '*'}")
                return True
            return False

        poll(bound, f"port {port} is free")
        return sock

    def wait_subscribed(self) -> None:
        """Returns once a subscriber is there: nothing later is lost to it."""
        assert self._live.poll(int(HANG_GUARD * 1000)), "nobody subscribed"
        assert self._live.recv()[:1] == b"\x01"

    def publish(self, seq: int, payload: bytes) -> None:
        """Sends a batch, and keeps it."""
        self.keep(seq, payload)
        self.send(seq, payload)

    def send(self, seq: int, payload: bytes) -> None:
        """Sends a batch without keeping it."""
        self._live.send_multipart([self.topic, seq.to_bytes(8, "big"), payload])

    def send_raw(self, *frames: bytes) -> None:
        """Sends what no publisher would."""
        self._live.send_multipart([self.topic, *frames])

    def keep(self, seq: int, payload: bytes) -> None:
        """Keeps a batch that is lost on its way."""
        self.kept.append((seq, payload))

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while True:
            if self._stopped.fileno() in dict(poller.poll()):
                return
            identity, empty, start = self._router.recv_multipart()
            assert (empty, len(start)) == (b"", 8)
            self.asked.put(int.from_bytes(start, "big"))
            if self.answers:
                self._answer([identity, b""], int.from_bytes(start, "big"))

    def _answer(self, address: list[bytes], start: int) -> None:
        head = [*address, *self._replay_head]
        for seq, payload in self.kept:
            if seq >= start:
                self._router.send_multipart([*head, seq.to_bytes(8, "big"), payload])
        end = [b""] * len(self._replay_head)
        self._router.send_multipart([*address, *end, END_MARKER, b""])

    def close(self) -> None:
        """Ends as an engine does that dies: whatever is not sent is lost."""
        self._stop.send(b"x")
        self._server.join()
        self._context.destroy(linger=0)
        self._stop.close()
        self._stopped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- The subscriber -------------------------------------------------------------------


class SubscriberProcess:
    """kv_events_subscriber.py as a process.

    Args:
        argv: its arguments.
        limits: module constants to scale down.
        env: additional environment variables.

    """

    def __init__(
        self,
        *argv: str,
        limits: Mapping[str, float] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        command = [sys.executable, str(SUBSCRIBER)]
        if limits:
            scaled = [f"{name}={value}" for name, value in limits.items()]
            command = [
                sys.executable,
                str(SCALED_PROXY),
                str(SUBSCRIBER),
                *scaled,
                "--",
            ]
        self._process = subprocess.Popen(
            [*command, *argv],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.pid = self._process.pid
        self._out: queue.Queue[str | None] = queue.Queue()
        self._err: queue.Queue[str | None] = queue.Queue()
        self.log: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=pair)
            for pair in (
                (self._process.stdout, self._out),
                (self._process.stderr, self._err),
            )
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(pipe: Any, lines: queue.Queue[str | None]) -> None:
        for line in pipe:
            lines.put(line.decode().rstrip("\n"))
        lines.put(None)

    def next_line(self) -> str:
        """The next line of stdout."""
        line = self._out.get(timeout=HANG_GUARD)
        assert line is not None, f"it ended: {self.log}"
        return line

    def next_event(self) -> JSON:
        """The next line of stdout, as JSON."""
        event: JSON = json.loads(self.next_line())
        return event

    def events(self, count: int) -> list[JSON]:
        """The next `count` events."""
        return [self.next_event() for _ in range(count)]

    def wait_log(self, text: str) -> str:
        """The next line of stderr that contains `text`."""
        while True:
            line = self._err.get(timeout=HANG_GUARD)
            assert line is not None, f"no {text!r} in {self.log}"
            self.log.append(line)
            if text in line:
                return line

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit status, once it has ended; the log is complete afterwards."""
        status = self._process.wait(HANG_GUARD)
        for reader in self._readers:
            reader.join()
        while not self._err.empty():
            if (line := self._err.get()) is not None:
                self.log.append(line)
        return status

    def stop(self) -> list[str]:
        """Ends it as a user does, and returns the lines that were not read yet."""
        self.signal(signal.SIGTERM)
        status = self.wait()
        assert status == 0, f"status {status}: {self.log}"
        return list(iter(lambda: self._out.get(timeout=HANG_GUARD), None))

    def close(self) -> None:
        """Kills what is left."""
        if self._process.poll() is None:
            self._process.kill()
        self.wait()
        assert self._process.stdout
        assert self._process.stderr
        self._process.stdout.close()
        self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
