# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hostile clients, engines and peers with all limits as they are, in numbers.

    python tests/hostile.py [--only WORD] [--clients 1000]

Each attack runs against a proxy of its own, while another client asks for one
completion after the other. It prints a row of a Markdown table: what came of the
attack, how long it took, by how much the proxy's memory and CPU time grew, and how
long the other client waited at most. The exit status says whether every attack ended
as it should and the other client was always served.
"""

import argparse
import contextlib
import itertools
import os
import selectors
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from moriio_rig import Fleet, Peer
from moriio_rig import Proxy as MoriioProxy
from rig import (
    COMPLETIONS,
    LAST_CHUNK,
    SSE_HEAD,
    Cluster,
    EngineRequest,
    ProxyProcess,
    Step,
    chunk,
    http_request,
    prefill_answer,
)

MEBIBYTE = 1 << 20
# Seconds between two bytes of a slow client, and between two requests of the other.
DRIP = 1.0
PACE = 0.05
# Seconds after which an attack is given up: twice the longest limit.
PATIENCE = 150.0
START = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
POST = START + b"Content-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


class Target(NamedTuple):
    """What is attacked, and with how many connections."""

    proxy: ProxyProcess
    clients: int


# --- Ways to attack -------------------------------------------------------------------


def told(outcomes: Counter[str]) -> str:
    return ", ".join(f"{n} x {each}" for each, n in outcomes.items() if n)


def status(data: bytes) -> str:
    """The status of an answer, or that there is none."""
    return data[9:12].decode() if data else "closed"


def flood(target: Target, start: bytes, drip: bytes) -> str:
    """Many connections that send `start`, then `drip` again and again, until all end.

    Returns what they got first, and how many of them.
    """
    selector = selectors.DefaultSelector()
    got: dict[socket.socket, bytes] = {}
    for _ in range(target.clients):
        client = target.proxy.connect().socket
        client.sendall(start)
        client.setblocking(False)
        selector.register(client, selectors.EVENT_READ, client)
        got[client] = b""
    outcomes: Counter[str] = Counter()
    due = time.monotonic()
    give_up = due + PATIENCE
    while got and due < give_up:
        due += DRIP
        while got and (wait := due - time.monotonic()) > 0:
            for key, _ in selector.select(wait):
                client = key.data
                if data := received(client):
                    got[client] += data
                    continue
                selector.unregister(client)
                outcomes[status(got.pop(client))] += 1
                client.close()
        for client in got:
            with contextlib.suppress(OSError):
                client.send(drip)
    outcomes["never ended"] += len(got)
    return told(outcomes)


def received(client: socket.socket) -> bytes:
    try:
        return client.recv(65536)
    except ConnectionError:
        return b""


def send(target: Target, *pieces: bytes) -> str:
    """One connection that sends all of `pieces`, or what is taken of them."""
    sent = 0
    with target.proxy.connect() as client:
        client.socket.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                client.send(piece)
                sent += len(piece)
        answer = client.wait_closed()
    return f"{status(answer)} after {sent / MEBIBYTE:.1f} MiB"


def post(target: Target, body: bytes) -> str:
    return send(target, POST + b"Content-Length: %d\r\n\r\n" % len(body), body)


def pipelined(target: Target) -> str:
    """One connection with requests as fast as they are taken; it reads no answer."""
    requests = http_request("GET", "/status") * 1000
    sent = 0
    with target.proxy.connect(receive_buffer=4096) as client:
        client.socket.settimeout(5.0)
        with contextlib.suppress(TimeoutError):
            while sent < 100 * MEBIBYTE:
                sent += client.socket.send(requests)
    return f"not read beyond {sent / MEBIBYTE:.1f} MiB"


def upgrades(target: Target) -> str:
    """Offers to change the protocol."""
    outcomes: Counter[str] = Counter()
    for offer in ("h2c", "websocket", "TLS/1.0"):
        fields = {"Connection": "Upgrade", "Upgrade": offer}
        with target.proxy.connect() as client:
            answer = client.post(COMPLETIONS, {"prompt": "a"}, fields).finish()
            outcomes[str(answer.status)] += 1
    return told(outcomes)


def ask_for_much(target: Target) -> str:
    """A request that P answers without end."""
    answer = target.proxy.request("POST", COMPLETIONS, {"prompt": "much"})
    return str(answer.status)


def garbage(target: Target) -> str:
    """Messages that are no registrations; bytes that are no ZMQ."""
    assert isinstance(target.proxy, MoriioProxy)
    where = target.proxy.address[0], target.proxy.discovery
    for _ in range(target.clients // 10):
        with Peer(where[1]) as peer:
            for _ in range(100):
                peer.send(b"\xc1" * 200)
        with contextlib.suppress(OSError), socket.create_connection(where) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
    with Peer(where[1]) as peer:
        peer.send_large(bytes(500 * MEBIBYTE))
    target.proxy.wait_log("messages were refused")
    return f"{len(target.proxy.refusals())} lines in the log"


# --- Stages ---------------------------------------------------------------------------


@contextlib.contextmanager
def disagg() -> Iterator[ProxyProcess]:
    """One prefill and one decode engine; P's answer to "much" never ends."""

    def much(request: EngineRequest) -> Iterable[Step]:
        if request.json()["prompt"] != "much":
            return prefill_answer(request)
        return itertools.chain([SSE_HEAD], itertools.repeat(chunk(bytes(MEBIBYTE))))

    def whole(request: EngineRequest) -> Iterable[Step]:
        return [SSE_HEAD, LAST_CHUNK]

    with Cluster() as cluster:
        cluster.p[0].default, cluster.d[0].default = much, whole
        yield cluster.proxy


@contextlib.contextmanager
def moriio() -> Iterator[ProxyProcess]:
    """Engines that have registered."""
    with Fleet() as fleet, contextlib.ExitStack() as stack:
        over = threading.Event()

        def beat() -> None:
            while not over.wait(3.0):
                for told in fleet.told.values():
                    peer.register(told)

        peer = stack.enter_context(Peer(fleet.proxy.discovery))
        heart = threading.Thread(target=beat)
        heart.start()
        try:
            yield fleet.proxy
        finally:
            over.set()
            heart.join()


Stage = Callable[[], AbstractContextManager[ProxyProcess]]


class Attack(NamedTuple):
    """What is done, how, and how the outcome has to begin."""

    name: str
    run: Callable[[Target], str]
    expected: str
    stage: Stage = disagg


def floods(clients: int) -> list[Attack]:
    """Attacks by many connections at a time."""
    many = f"{clients:,} connections"
    announced = POST + b"Content-Length: 1000000\r\n\r\n"
    return [
        Attack(
            f"slow heads: {many}, a byte each second",
            lambda t: flood(t, START + b"X: ", b"a"),
            f"{clients} x 408",
        ),
        Attack(
            f"slow bodies: {many}, a byte each second",
            lambda t: flood(t, announced, b" "),
            f"{clients} x 408",
        ),
        Attack(
            f"slow chunks: {many}, a chunk of a byte each second",
            lambda t: flood(t, CHUNKED, b"1\r\n \r\n"),
            f"{clients} x 408",
        ),
        Attack(
            f"idle flood: {many} without a request",
            lambda t: flood(t, b"", b""),
            f"{clients} x closed",
        ),
        Attack(
            f"idle flood: {many} after a request each",
            lambda t: flood(t, http_request("HEAD", "/health"), b""),
            f"{clients} x 200",
        ),
    ]


SINGLE = [
    Attack(
        "pipelining: requests without end, no answer is read", pipelined, "not read"
    ),
    Attack(
        "100,000 header fields", lambda t: send(t, START, b"X: a\r\n" * 100_000), "431"
    ),
    Attack(
        "a header field without end",
        lambda t: send(t, START + b"X: ", *[b"a" * MEBIBYTE] * 50),
        "431",
    ),
    Attack(
        "a target without end",
        lambda t: send(t, b"GET /", *[b"a" * MEBIBYTE] * 50),
        "414",
    ),
    Attack(
        "a chunk extension without end",
        lambda t: send(t, CHUNKED + b"1;", *[b"a" * MEBIBYTE] * 50),
        "400",
    ),
    Attack(
        "trailer fields without end",
        lambda t: send(t, CHUNKED + b"0\r\n", *[b"X: a\r\n" * 100_000] * 50),
        "400",
    ),
    Attack(
        "a million chunks of one byte",
        lambda t: send(t, CHUNKED, b"1\r\n \r\n" * 1_000_000, b"0\r\n\r\n"),
        "400",
    ),
    Attack(
        "JSON: ten million members",
        lambda t: post(t, b'{"prompt":"a"' + b',"b":1' * 10_000_000 + b"}"),
        "200",
    ),
    Attack(
        "JSON: ten million members and half an emoji",
        lambda t: post(t, b'{"prompt":"\\ud83d"' + b',"b":1' * 10_000_000 + b"}"),
        "400",
    ),
    Attack(
        "JSON: lists nested ten million deep",
        lambda t: post(t, b'{"prompt":' + b"[" * 10_000_000),
        "400",
    ),
    Attack("offers to upgrade: h2c, websocket, TLS", upgrades, "3 x 200"),
    Attack("a hand-over without end", ask_for_much, "502"),
    Attack(
        "MoRIIO: 10,000 messages, HTTP and 500 MiB at the discovery port",
        garbage,
        "50 lines",
        moriio,
    ),
]


# --- What came of it ------------------------------------------------------------------


class Neighbour(threading.Thread):
    """A client that asks for one completion after the other, until told to stop."""

    def __init__(self, proxy: ProxyProcess) -> None:
        super().__init__()
        self.proxy = proxy
        self.over = threading.Event()
        # Seconds that the slowest answer took, and those that were no answer.
        self.slowest = 0.0
        self.unserved: list[str] = []

    def run(self) -> None:
        self.ask()
        while not self.over.wait(PACE):
            self.ask()

    def ask(self) -> None:
        """One completion."""
        started = time.monotonic()
        try:
            answer = self.proxy.request("POST", COMPLETIONS, {"prompt": "a"})
            if answer.status != 200:
                self.unserved.append(str(answer))
        except Exception as error:
            self.unserved.append(repr(error))
        self.slowest = max(self.slowest, time.monotonic() - started)

    def stop(self) -> None:
        self.over.set()
        self.join()


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(attack: Attack, clients: int) -> bool:
    """Runs an attack and prints its row; returns whether all was as it should be."""
    with attack.stage() as proxy:
        neighbour = Neighbour(proxy)
        neighbour.start()
        before, cpu = proxy.resident_bytes(), cpu_seconds(proxy.pid)
        started = time.monotonic()
        try:
            outcome = attack.run(Target(proxy, clients))
            seconds = time.monotonic() - started
        finally:
            neighbour.stop()
        cells = (
            attack.name,
            outcome,
            f"{seconds:.1f} s",
            f"{(proxy.peak_resident_bytes() - before) / MEBIBYTE:.0f} MiB",
            f"{cpu_seconds(proxy.pid) - cpu:.2f} s",
            f"{neighbour.slowest * 1000:.0f} ms",
        )
    print(f"| {' | '.join(cells)} |", flush=True)
    for each in neighbour.unserved:
        print("UNSERVED", each, flush=True)
    return outcome.startswith(attack.expected) and not neighbour.unserved


def main() -> None:
    """Prints the table; exits with 1 where something was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="attacks with this in their name")
    parser.add_argument("--clients", type=int, default=1000, help="of a flood")
    args = parser.parse_args()
    print("| attack | outcome | after | memory | CPU time | another client waited |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    chosen = [a for a in (*SINGLE, *floods(args.clients)) if args.only in a.name]
    wrong = [attack.name for attack in chosen if not measure(attack, args.clients)]
    for name in wrong:
        print("WRONG", name)
    sys.exit(bool(wrong or not chosen))


if __name__ == "__main__":
    main()
