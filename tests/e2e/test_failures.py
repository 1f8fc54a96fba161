# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Real engines that die and come back, and clients that leave in every phase.

Prefill engines keep the blocks of a hand-over for a short lease here, so that what
only the lease frees can be told from what was released.
"""

import contextlib
import functools
import itertools
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from e2e import engines, workload
from e2e.engines import MAX_SEQUENCES, Engine, EngineServer, Fleet, request
from e2e.workload import LONG, Question
from rig import JSON, End, ProxyProcess, Response, ResponseReader, ScriptedEngine, poll

# Seconds, as `kv_lease_duration`.
LEASE = 6
# Seconds in which a prefill engine must have freed what was released.
RELEASE_LIMIT = 3.0

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
SUCCEEDED = "vllm:request_success_total"
KV_USAGE = "vllm:kv_cache_usage_perc"


def prefill_engine(server: EngineServer, name: str, port: int | None = None) -> Engine:
    """A prefill engine with the short lease."""
    return engines.nixl(server, name, "kv_producer", LEASE, port)


def decode_engine(server: EngineServer, name: str, port: int | None = None) -> Engine:
    """A decode engine; its heartbeats follow the lease."""
    return engines.nixl(server, name, "kv_consumer", LEASE, port)


@pytest.fixture(scope="module")
def fleet(server: EngineServer, plain: Engine) -> Iterator[Fleet]:
    """Two prefill and two decode engines, each pair of which has met."""
    prefill = [prefill_engine(server, f"failing-prefill-{i}") for i in range(2)]
    decode = [decode_engine(server, f"failing-decode-{i}") for i in range(2)]
    with engines.fleet(plain, prefill, decode) as fleet:
        # The first word between two engines waits for their handshake, and goes out
        # with the decode engine's next step: idle engines would keep it to themselves.
        workload.ask_all(fleet.proxy.address, short_questions("meet", 16))
        yield fleet


def short_questions(salt: str, count: int) -> list[Question]:
    """Requests for a few tokens, every other one streamed."""
    return [
        workload.completion(
            workload.text(f"{salt} {i}", 4), {"max_tokens": 6, "stream": i % 2 == 0}
        )
        for i in range(count)
    ]


# --- Clients that leave ---------------------------------------------------------------


def leave(proxy: ProxyProcess, question: Question, after: float, rst: bool) -> None:
    """Asks, and leaves after so many seconds."""
    deadline = time.monotonic() + after
    with proxy.connect() as client:
        client.post(question.path, question.body)
        with contextlib.suppress(TimeoutError):
            while (left := deadline - time.monotonic()) > 0:
                client.socket.settimeout(left)
                assert client.read_some(), "the proxy left first"
        if rst:
            client.reset()


def test_two_hundred_clients_that_leave_at_random_leave_nothing_behind(
    fleet: Fleet,
) -> None:
    rng = random.Random(4)
    leavers = [
        functools.partial(
            leave,
            fleet.proxy,
            rng.choice([workload.completion, workload.chat])(
                workload.text(f"leave {i}", rng.choice(workload.LENGTHS)),
                LONG | {"stream": rng.random() < 0.5},
            ),
            after=rng.uniform(0.001, 0.3),
            rst=rng.random() < 0.5,
        )
        for i in range(200)
    ]
    with ThreadPoolExecutor(8) as pool:
        for left in [pool.submit(leaver) for leaver in leavers]:
            left.result()
    deadline = LEASE + RELEASE_LIMIT
    for engine in fleet.engines:
        poll(engine.idle, f"{engine.name} is idle", deadline)
    fleet.proxy.wait_idle()


def test_leaving_the_queue_of_a_busy_decode_engine_frees_the_prefill_engine(
    fleet: Fleet,
) -> None:
    busy = [workload.completion(f"busy {i}", LONG) for i in range(2 * MAX_SEQUENCES)]
    queued = [workload.completion(f"queued {i}", LONG) for i in range(10)]
    with contextlib.ExitStack() as clients:
        ask_and_stay(fleet, busy, clients)
        poll(lambda: fleet.decoded(RUNNING) == len(busy), "decode is busy")
        with contextlib.ExitStack() as leaving:
            ask_and_stay(fleet, queued, leaving)
            poll(lambda: fleet.decoded(WAITING) == len(queued), "decode queues them")
            assert fleet.prefilled(KV_USAGE) > 0
        poll(lambda: not fleet.prefilled(KV_USAGE), "prefill is free", RELEASE_LIMIT)
        assert fleet.decoded(RUNNING) == len(busy)
    fleet.wait_idle()


def ask_and_stay(
    fleet: Fleet, asked: list[Question], clients: contextlib.ExitStack
) -> None:
    """Sends requests on connections that stay open as long as `clients`."""
    for question in asked:
        client = clients.enter_context(fleet.proxy.connect())
        client.post(question.path, question.body)


def test_leaving_between_the_legs_releases_the_hand_over(fleet: Fleet) -> None:
    prefill, decode = fleet.prefill[0], fleet.decode[0]
    with contextlib.ExitStack() as opened:
        unreachable = opened.enter_context(ScriptedEngine("decode"))
        decoders = [decode.instance, unreachable.instance]
        argv = ["--model", engines.MODEL, "--prefill", prefill.instance]
        proxy = opened.enter_context(ProxyProcess([*argv, "--decode", *decoders]))
        proxy.wait_all_up()
        unreachable.swallow_connects()
        # Of two requests, one gets its answer; the other's decode leg is stuck in
        # connecting when its client leaves.
        prefilled, decoded = prefill.metric(SUCCEEDED), decode.metric(SUCCEEDED)
        with contextlib.ExitStack() as clients:
            for question in short_questions("between", 2):
                client = clients.enter_context(proxy.connect())
                client.post(question.path, question.body)
            poll(lambda: prefill.metric(SUCCEEDED) == prefilled + 2, "both prefilled")
            poll(lambda: decode.metric(SUCCEEDED) == decoded + 1, "one decoded")
            assert prefill.metric(KV_USAGE) > 0
        poll(prefill.idle, "prefill is free", RELEASE_LIMIT)


def test_what_decode_refuses_unread_frees_the_prefill_engine(fleet: Fleet) -> None:
    unread: list[JSON] = [{"max_tokens": "many"}, {"stop_token_ids": "none"}]
    for number, refused in enumerate([*unread, {"min_tokens": 9, "max_tokens": 4}]):
        question = workload.completion(workload.text(f"refused {number}", 40), refused)
        prefilled = fleet.prefilled(SUCCEEDED)
        answer = fleet.proxy.request("POST", question.path, question.body)
        assert answer.status == 400
        assert fleet.prefilled(SUCCEEDED) == prefilled + 1
        poll(lambda: not fleet.prefilled(KV_USAGE), "prefill is free", RELEASE_LIMIT)


# --- Engines that die -----------------------------------------------------------------

# Requests a second, and how many have to be answered before the next thing happens.
RATE = 20
QUIET_SPELL = 40


@dataclass
class Sent:
    """A request under load, and when it was in flight (seconds, monotonic)."""

    question: Question
    started: float
    response: Response | None = None
    ended: float = float("inf")


class Load:
    """Asks `RATE` questions a second until it is left."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sent: list[Sent] = []
        self._address = address
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(64)
        self._ticker = threading.Thread(target=self._tick)

    def _tick(self) -> None:
        pending: list[Future[None]] = []
        for number in itertools.count():
            question = workload.completion(
                workload.text(f"load {number}", 4),
                {"max_tokens": 6, "stream": number % 2 == 0},
            )
            self.sent.append(Sent(question, time.monotonic()))
            pending.append(self._pool.submit(self._ask, self.sent[-1]))
            if self._stop.wait(1 / RATE):
                break
        for answered in pending:
            answered.result()

    def _ask(self, sent: Sent) -> None:
        question = sent.question
        sent.response = request(self._address, "POST", question.path, question.body)
        sent.ended = time.monotonic()

    def go_on(self) -> float:
        """Returns when further requests were sent and answered; the time it is."""
        target = len(self.sent) + QUIET_SPELL

        def answered() -> bool:
            return len(self.sent) >= target and all(
                each.response for each in self.sent[:target]
            )

        poll(answered, f"{target} requests are answered", engines.ANSWER_TIMEOUT)
        return time.monotonic()

    def __enter__(self) -> "Load":
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._ticker.join()
        self._pool.shutdown()


def kill(engines_of_role: list[Engine]) -> tuple[Engine, float, float]:
    """Kills the first engine of a role: it, and the time before and after."""
    victim = engines_of_role.pop(0)
    before = time.monotonic()
    victim.stop(signal.SIGKILL)
    return victim, before, time.monotonic()


# An answer that takes seconds, by a limit that its engine's log shows.
MARKED = {"max_tokens": 1799, "ignore_eos": True, "stream": True}


def open_streams(
    fleet: Fleet, engine: Engine, clients: contextlib.ExitStack
) -> list[ResponseReader]:
    """Begins long streams, until one of them comes from this decode engine."""
    streams: list[ResponseReader] = []
    while not marked_requests(engine):
        question = workload.completion(f"stream {len(streams)}", MARKED)
        client = clients.enter_context(fleet.proxy.connect())
        streams.append(client.post(question.path, question.body))
        streams[-1].body_until(b"data: ")
    return streams


def marked_requests(engine: Engine) -> int:
    """How many long streams a decode engine has logged."""
    return engine.log.read_text(errors="replace").count("max_tokens=1799,")


def failed(response: Response) -> bool:
    """Whether an answer is cut, an error, or a stream with an error in it."""
    return (
        response.end is not End.COMPLETE
        or response.status != 200
        or b'data: {"error"' in response.body
    )


def test_killed_engines_cost_nothing_but_the_streams_they_were_part_of(
    server: EngineServer, fleet: Fleet
) -> None:
    with Load(fleet.proxy.address) as load:
        load.go_on()
        prefill, *prefill_killed = kill(fleet.prefill)
        load.go_on()
        with contextlib.ExitStack() as clients:
            streams = open_streams(fleet, fleet.decode[0], clients)
            decode, *decode_killed = kill(fleet.decode)
            ends = [stream.finish() for stream in streams]
        load.go_on()
        restarted = [
            prefill_engine(server, "restarted-prefill", prefill.port),
            decode_engine(server, "restarted-decode", decode.port),
        ]
        fleet.prefill.append(restarted[0])
        fleet.decode.append(restarted[1])
        for engine in restarted:
            poll(engine.ready, f"{engine.name} is ready", engines.READY_TIMEOUT)
        fleet.proxy.wait_all_up()
        load.go_on()
    assert all(engine.metric(SUCCEEDED) > 0 for engine in restarted)

    cut = [end for end in ends if end.end is End.INCOMPLETE]
    assert len(cut) == marked_requests(decode)
    assert not any(b"[DONE]" in end.body for end in cut)

    answered = [each for each in load.sent if not failed(whole(each))]
    for each in load.sent:
        if failed(whole(each)):
            assert each.question.body["stream"], each
            assert any(
                each.started <= after and each.ended >= before
                for before, after in (prefill_killed, decode_killed)
            ), each
    expected = plain_answers(fleet, [each.question for each in answered])
    assert [workload.facts(whole(each)) for each in answered] == expected
    fleet.wait_idle()


def whole(sent: Sent) -> Response:
    """The response of a request that has ended."""
    assert sent.response
    return sent.response


def plain_answers(fleet: Fleet, asked: list[Question]) -> list[JSON]:
    """The plain engine's answers, a batch at a time."""
    batches = range(0, len(asked), workload.REQUESTS)
    return [
        answer
        for start in batches
        for answer in workload.ask_all(
            fleet.plain.address, asked[start : start + workload.REQUESTS]
        )
    ]
