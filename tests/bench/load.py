# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The load of the benchmark: clients that judge every byte of every answer.

    echo '{"ports": [8000], "clients": 32, "seconds": 3}' | python tests/bench/load.py

Reads one JSON object with the fields of `Load`, prints one with what was found:
latencies in milliseconds, wrong answers by kind. With `"pace": 9999` the answers stop
after their first token: it prints `open` once all clients have theirs.
"""

import asyncio
import functools
import itertools
import json
import random
import sys
import time
from collections import Counter
from typing import Any, NamedTuple, cast

import httptools
import uvloop
from answers import AT_THE_GATE, USUAL_PROMPT, Template, answer, ident, request

now = time.perf_counter
# Seconds after which an answer counts as lost.
PATIENCE = 20.0
# Clients that connect at the same time, where they need not all at once.
CONNECTING = 128


class Load(NamedTuple):
    """What to do.

    Args:
        ports: whom to ask: each client one of them, in turn.
        clients: how many ask at the same time.
        seconds: for how long; 0 for one request of each client, all at once.
        stream: "no", "yes", or "half" of the requests.
        tokens: of an answer.
        pace: milliseconds between two tokens of a stream.
        prompt: its bytes.
        think: seconds from an answer to the same client's next request, on average.
        first: number of the first request.

    """

    ports: list[int]
    clients: int
    seconds: float = 0.0
    stream: str = "no"
    tokens: int = 16
    pace: int = 0
    prompt: int = USUAL_PROMPT
    think: float = 0.0
    first: int = 0


class Kind(NamedTuple):
    """A kind of request, and the payload of its answer."""

    stream: bool
    request: Template
    answer: Template


class Run:
    """One load, and what came of it."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.loop = asyncio.get_running_loop()
        self.numbers = itertools.count(load.first)
        self.kinds = {
            stream: Kind(stream, made, answer(stream, load.tokens))
            for stream in (False, True)
            for made in [
                request(load.ports[0], stream, load.tokens, load.pace, load.prompt)
            ]
        }
        self.began = now()
        self.asked = self.right = self.reencoded = self.tokens = 0
        self.first_tokens = 0
        self.wrong: Counter[str] = Counter()
        self.latency: dict[bool, list[float]] = {False: [], True: []}
        self.ttft: list[float] = []
        self.left = load.clients
        self.over: asyncio.Future[None] = self.loop.create_future()

    def kind(self, number: int) -> Kind:
        """What kind the request with that number is."""
        stream = self.load.stream
        return self.kinds[stream == "yes" or (stream == "half" and number % 2 == 0)]

    def goes_on(self) -> bool:
        """Whether a client that has its answer asks again."""
        return now() - self.began < self.load.seconds

    def saw_first_token(self, since: float) -> None:
        """Notes the first byte of a stream's payload."""
        self.ttft.append(now() - since)
        self.first_tokens += 1
        if self.load.pace == AT_THE_GATE and self.first_tokens == self.load.clients:
            print("open", flush=True)

    def judge(self, kind: Kind, digits: bytes, status: int, body: bytes) -> bool:
        """Whether an answer is the right one; counts what it is instead."""
        expected = kind.answer.fill(digits)
        if status == 200 and body != expected and same_json(body, expected):
            self.reencoded += 1
        elif status != 200 or body != expected:
            self.wrong[f"status {status}" if status != 200 else "other bytes"] += 1
            return False
        self.right += 1
        self.tokens += self.load.tokens if kind.stream else 0
        return True

    def retire(self) -> None:
        """A client asks no more."""
        self.left -= 1
        if self.left == 0 and not self.over.done():
            self.over.set_result(None)

    def report(self) -> dict[str, Any]:
        """What was found, as JSON has it."""
        return {
            "seconds": now() - self.began,
            "asked": self.asked,
            "right": self.right,
            "reencoded": self.reencoded,
            "tokens": self.tokens,
            "wrong": self.wrong,
            "latency": spread(self.latency[False] or self.latency[True]),
            "ttft": spread(self.ttft),
        }


def same_json(body: bytes, expected: bytes) -> bool:
    """Whether a proxy wrote the same JSON in its own words."""
    try:
        return bool(json.loads(body) == json.loads(expected))
    except ValueError:
        return False


def spread(seconds: list[float]) -> dict[str, float]:
    """The median and the 99th percentile, in milliseconds."""
    ordered = sorted(seconds)
    return {
        name: ordered[int(share * len(ordered))] * 1000
        for name, share in (("p50", 0.5), ("p99", 0.99))
        if ordered
    }


class Client(asyncio.Protocol):
    """One client on one connection; a lost connection is replaced by another."""

    transport: asyncio.Transport

    def __init__(self, run: Run, port: int) -> None:
        self.run = run
        self.port = port
        self.waiting = False
        self.complete = self.keeps = False
        self.body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parser = httptools.HttpResponseParser(self)
        self.next()

    def ask(self) -> None:
        """Sends the next request."""
        run = self.run
        if self.transport.is_closing():
            return
        number = next(run.numbers)
        self.kind, self.digits = run.kind(number), ident(number)
        self.body, self.complete, self.waiting = [], False, True
        # The clients of a burst all began together, however long they took to connect.
        self.since = now() if run.load.seconds else run.began
        run.asked += 1
        self.transport.write(self.kind.request.fill(self.digits))

    # The parser's callbacks.

    def on_body(self, piece: bytes) -> None:
        if not self.body and self.kind.stream:
            self.run.saw_first_token(self.since)
        self.body.append(piece)

    def on_message_complete(self) -> None:
        self.complete = True
        self.keeps = self.parser.should_keep_alive()

    # The connection's callbacks.

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()
            return
        if self.complete:
            self.complete = self.waiting = False
            self._answered()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.waiting:
            self.run.wrong["cut short" if self.body else "no answer"] += 1
        self._replace()

    def _answered(self) -> None:
        run = self.run
        latency = now() - self.since
        status = self.parser.get_status_code()
        if run.judge(self.kind, self.digits, status, b"".join(self.body)):
            run.latency[self.kind.stream].append(latency)
        if not run.goes_on() or not self.keeps:
            self.transport.close()
        else:
            self.next()

    def next(self) -> None:
        """Asks again, at once or after some thought."""
        pause = self.run.load.think * 2 * random.random()
        if pause:
            self.run.loop.call_later(pause, self.ask)
        else:
            self.ask()

    def _replace(self) -> None:
        if self.run.goes_on():
            self.run.loop.create_task(connect(self.run, self.port))
        else:
            self.run.retire()


async def connect(run: Run, port: int) -> None:
    """Brings a client in."""
    try:
        await run.loop.create_connection(
            functools.partial(Client, run, port), "127.0.0.1", port
        )
    except OSError as err:
        run.wrong[f"connect: {err.strerror}"] += 1
        run.retire()


async def main() -> None:
    load = Load(**json.loads(sys.stdin.readline()))
    run = Run(load)
    at_once = load.clients if load.pace != AT_THE_GATE else CONNECTING
    turn = asyncio.Semaphore(at_once)

    async def enter(port: int) -> None:
        async with turn:
            await connect(run, port)

    entering = [
        run.loop.create_task(enter(port))
        for port, _ in zip(itertools.cycle(load.ports), range(load.clients))
    ]
    try:
        await asyncio.wait_for(run.over, load.seconds + PATIENCE)
    except TimeoutError:
        run.wrong["no end"] += run.left
    for task in entering:
        task.cancel()
    print(json.dumps(run.report()), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
