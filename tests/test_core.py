# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How answers, failures and time pass through the proxy."""

import contextlib
import itertools
import random
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import openai
import pytest
from rig import (
    CHAT,
    COMPLETIONS,
    DONE,
    HANG_GUARD,
    JSON,
    LAST_CHUNK,
    SSE_HEAD,
    Close,
    Cluster,
    End,
    EngineRequest,
    Gate,
    Play,
    RawClient,
    Response,
    ScriptedEngine,
    Step,
    chunk,
    decode_answer,
    event,
    gather,
    hand_over,
    http_request,
    http_response,
    openai_error,
    poll,
    prefill_answer,
)

BODY: JSON = {"prompt": "a", "messages": []}
STREAM: JSON = BODY | {"stream": True}


def sse(*steps: bytes | Gate) -> list[Step]:
    """An answer of server-sent events; bytes become one chunk each."""
    framed = [chunk(step) if isinstance(step, bytes) else step for step in steps]
    return [SSE_HEAD, *framed, LAST_CHUNK]


# --- Errors of an engine (B06) --------------------------------------------------------

ERROR_ANSWERS = {
    "400": http_response(400, openai_error(400, "prompt too long")),
    "401": http_response(401, b'{"error":"Unauthorized"}'),
    "404": http_response(404, b'{"detail":"Not Found"}'),
    "422": http_response(422, b'{"detail":[{"type":"missing"}]}'),
    "429": http_response(429, openai_error(429, "slow down"), {"Retry-After": "7"}),
    "500": http_response(500, b"Internal Server Error", {"Content-Type": "text/plain"}),
    "503": http_response(503, openai_error(503, "queue is full"), {"Retry-After": "2"}),
}


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("error", ERROR_ANSWERS)
def test_b06_an_engines_error_arrives_as_it_is(
    pair: Cluster, error: str, role: str, path: str, body: JSON
) -> None:
    failing = pair.p[0] if role == "prefill" else pair.d[0]
    with RawClient((failing.host, failing.port)) as direct:
        failing.answer(ERROR_ANSWERS[error])
        expected = direct.post(path, body).finish()
        failing.forget()
    failing.answer(ERROR_ANSWERS[error])
    with pair.connect() as client:
        response = client.post(path, body).finish()
        assert (response.status, response.body) == (expected.status, expected.body)
        for name in ("content-type", "retry-after"):
            assert response.header(name) == expected.header(name)
        assert len(pair.p[0].requests) == 1
        assert len(pair.d[0].requests) == (role == "decode")
        # The connection is in step, and nobody was evicted.
        assert client.post(path, body).finish().status == 200


def test_b06_errors_reach_the_openai_client_as_its_exceptions(pair: Cluster) -> None:
    host, port = pair.proxy.address
    with openai.OpenAI(
        api_key="k", base_url=f"http://{host}:{port}/v1", max_retries=0
    ) as client:
        pair.p[0].answer(ERROR_ANSWERS["429"])
        with pytest.raises(openai.RateLimitError, match="slow down"):
            client.completions.create(model="m", prompt="a")
        pair.d[0].answer(ERROR_ANSWERS["400"])
        with pytest.raises(openai.BadRequestError, match="prompt too long"):
            client.completions.create(model="m", prompt="a", stream=True)


@pytest.fixture(scope="module")
def _impatient() -> Iterator[Cluster]:
    limits = {
        "TICK": 0.02,
        "PROBE_INTERVAL_DOWN": 0.05,
        # Only requests find out what is wrong, so that each finds what it is for.
        "PROBE_INTERVAL_UP": 1000.0,
        "CONNECT_TIMEOUT": 0.3,
    }
    with Cluster(args=["--first-byte-timeout", "0.3"], limits=limits) as cluster:
        yield cluster


@pytest.fixture
def impatient(_impatient: Cluster) -> Iterator[Cluster]:
    """1P1D behind a proxy that waits 0.3 s to connect and for a first byte."""
    yield _impatient
    for engine in _impatient.engines:
        engine.refuse()
        engine.listen()
    _impatient.proxy.wait_all_up()
    _impatient.settle()


def test_an_answer_that_has_begun_may_take_longer(impatient: Cluster) -> None:
    gate, [d] = Gate(), impatient.d
    d.answer(SSE_HEAD, chunk(event("1")), gate, chunk(DONE), LAST_CHUNK)
    d.answer(Gate())
    with impatient.connect() as client:
        reader = client.post(COMPLETIONS, STREAM)
        reader.body_until(event("1"))
        # As long as another answer, which does not begin, may take.
        assert impatient.post(COMPLETIONS, BODY).status == 504
        gate.release()
        response = reader.finish()
    assert (response.end, response.body) == (End.COMPLETE, event("1") + DONE)


def refused(engine: ScriptedEngine) -> None:
    engine.refuse()


def reset_after_reading(engine: ScriptedEngine) -> None:
    engine.answer(Close.RST)


def reset_before_reading(engine: ScriptedEngine) -> None:
    engine.answer_early(Close.RST)


def closed_without_an_answer(engine: ScriptedEngine) -> None:
    engine.answer(Close.FIN)


def closed_within_the_head(engine: ScriptedEngine) -> None:
    engine.answer(b"HTTP/1.1 200 OK\r\nContent-", Close.FIN)


def nonsense(engine: ScriptedEngine) -> None:
    engine.answer(b"SSH-2.0-OpenSSH_9.2\r\n", Close.FIN)


def connects_swallowed(engine: ScriptedEngine) -> None:
    engine.swallow_connects()


def silent(engine: ScriptedEngine) -> None:
    engine.answer(Gate())


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("break_it", "status"),
    [
        (refused, 502),
        (reset_after_reading, 502),
        (reset_before_reading, 502),
        (closed_without_an_answer, 502),
        (closed_within_the_head, 502),
        (nonsense, 502),
        (connects_swallowed, 504),
        (silent, 504),
    ],
)
def test_b06_an_engine_that_gives_no_answer(
    impatient: Cluster,
    break_it: Callable[[ScriptedEngine], None],
    status: int,
    role: str,
    body: JSON,
) -> None:
    failing = impatient.p[0] if role == "prefill" else impatient.d[0]
    break_it(failing)
    with impatient.connect() as client:
        response = client.post(COMPLETIONS, body).finish()
        assert response.status == status
        assert response.error()["code"] == status
        # One instance in the role: one POST, whatever became of it.
        assert len(failing.requests) <= 1
        if role == "prefill":
            assert impatient.d[0].requests == []
        else:
            assert len(impatient.p[0].requests) == 1
        assert client.request("GET", "/status").finish().status == 200


# --- Idle connections to engines (B04) ------------------------------------------------


def test_b04_a_connection_that_the_engine_closed_is_not_used(pair: Cluster) -> None:
    for number in range(1, 51):
        assert pair.post(COMPLETIONS, BODY).status == 200
        for engine in pair.engines:
            # Returns when FIN is in the proxy's receive buffer, read or not.
            engine.drop_connections()
            assert len(engine.requests) == number


def closing(answer: Play) -> Play:
    """The same answer, and then the engine closes without having said so."""
    return lambda request: [*answer(request), Close.FIN]


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
def test_b04_an_engine_that_closes_after_each_answer(pair: Cluster, body: JSON) -> None:
    pair.p[0].default = closing(prefill_answer)
    pair.d[0].default = closing(decode_answer)
    for _ in range(50):
        response = pair.post(COMPLETIONS, body)
        assert (response.status, response.end) == (200, End.COMPLETE)
    assert [len(each.requests) for each in pair.engines] == [50, 50]


def test_b04_idle_connections_are_kept_and_then_dropped_before_the_engine_does() -> (
    None
):
    with Cluster(limits={"ENGINE_IDLE_TIMEOUT": 0.3, "TICK": 0.02}) as cluster:
        for _ in range(20):
            assert cluster.post(COMPLETIONS, BODY).status == 200
        for engine in cluster.engines:
            used = {each.connection for each in engine.requests}
            # A slow machine may lose one to the limit in between.
            assert len(used) < 5
            engine.wait_connections(0)


@pytest.mark.soak
def test_b04_soak_idle_for_just_about_the_keep_alive_time_of_vllm() -> None:
    with Cluster() as cluster:
        for engine in cluster.engines:
            engine.idle_close = 5.0

        def one(seed: int) -> None:
            randomness = random.Random(seed)
            for _ in range(10):
                assert cluster.post(COMPLETIONS, BODY).status == 200
                # The idle time is the subject.
                time.sleep(randomness.uniform(4.8, 5.2))

        gather((partial(one, seed) for seed in range(30)), limit=120)
        assert [len(each.requests) for each in cluster.engines] == [300, 300]


# --- Silence is no failure (B10) ------------------------------------------------------

# Every limit but the one for the first byte, far below the silence of the engines.
HASTY = {
    "TICK": 0.02,
    "HEAD_TIMEOUT": 0.1,
    "BODY_STALL_TIMEOUT": 0.1,
    "KEEP_ALIVE_TIMEOUT": 0.1,
    "ENGINE_IDLE_TIMEOUT": 0.1,
    "CONNECT_TIMEOUT": 1.0,
    "PROBE_TIMEOUT": 1.0,
}


@pytest.fixture(scope="module")
def hasty() -> Iterator[Cluster]:
    """1P1D behind a proxy with every limit scaled down but that of engines."""
    with Cluster(limits=HASTY) as cluster:
        yield cluster


def let_every_limit_pass(cluster: Cluster) -> None:
    """Returns when clients that came later have met each limit of theirs."""
    with cluster.connect() as slow_head, cluster.connect() as idle:
        slow_head.send(b"POST /v1/completions HTTP/1.1\r\n")
        assert idle.request("GET", "/status").finish().status == 200
        idle.wait_closed()
        slow_head.wait_closed()
    with cluster.connect() as stalled:
        stalled.send(http_request("POST", COMPLETIONS, b"{}")[:-1])
        stalled.wait_closed()


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", ["prefill", "head", "body"])
def test_b10_a_silent_engine_is_waited_for(
    hasty: Cluster, phase: str, body: JSON
) -> None:
    gate = Gate()
    if phase == "prefill":
        hasty.p[0].answer(lambda request: [gate, *prefill_answer(request)])
    elif phase == "head":
        hasty.d[0].answer(lambda request: [gate, *decode_answer(request)])
    else:
        hasty.d[0].answer(*sse(event("1"), gate, DONE))
    with hasty.connect() as client:
        reader = client.post(COMPLETIONS, body)
        if phase == "body":
            reader.body_until(event("1"))
        let_every_limit_pass(hasty)
        gate.release()
        response = reader.finish()
    assert (response.status, response.end) == (200, End.COMPLETE)
    hasty.settle()


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [65, 610])
def test_b10_soak_minutes_of_silence(pair: Cluster, seconds: float) -> None:
    gate = Gate()
    [p], [d] = pair.p, pair.d
    scripts: list[tuple[ScriptedEngine, Play]] = [
        (p, lambda request: [gate, *prefill_answer(request)]),
        (d, lambda request: [gate, *decode_answer(request)]),
        (d, lambda _: sse(event("1"), gate, DONE)),
    ]
    with contextlib.ExitStack() as clients:
        readers = []
        for engine, answer in scripts:
            engine.forget()
            engine.answer(answer)
            client = clients.enter_context(pair.connect())
            readers.append(client.post(COMPLETIONS, STREAM))
            engine.next_request()
        # The silence is the subject.
        time.sleep(seconds)
        gate.release()
        for reader in readers:
            assert reader.finish().end is End.COMPLETE


def test_b10_an_address_that_swallows_connects_delays_nobody_else() -> None:
    limits = {"CONNECT_TIMEOUT": 0.5, "TICK": 0.02, "PROBE_INTERVAL_UP": 1000.0}
    with Cluster(decode=2, limits=limits) as cluster:
        cluster.d[0].swallow_connects()
        calls = [partial(cluster.post, COMPLETIONS, BODY)] * 20
        assert {each.status for each in gather(calls)} == {200}
        assert cluster.d[0].requests == []
        # Nothing had been delivered, so the hand-over went on to the other D.
        assert len(cluster.p[0].requests) == 20
        handed = {each.handed_over() for each in cluster.p[0].requests}
        taken = {each.members()["kv_transfer_params"] for each in cluster.d[1].requests}
        assert handed == taken


# --- Bursts and concurrency (B11, B12) ------------------------------------------------

BURST = 1000
# States of Linux's tcp_info.
TCP_ESTABLISHED, TCP_SYN_SENT = 1, 2


def burst(cluster: Cluster, busy: Callable[[], None] = lambda: None) -> None:
    """`BURST` clients that connect while the proxy is stopped, all to be served."""
    with open("/proc/sys/net/core/somaxconn") as limit:
        if int(limit.read()) < BURST:
            pytest.skip("the kernel accepts no such burst (net.core.somaxconn)")
    with cluster.proxy.stopped():
        clients = [cluster.connect(wait=False) for _ in range(BURST)]
        with selectors.PollSelector() as waiting:
            for client in clients:
                waiting.register(client.socket, selectors.EVENT_WRITE)
            # The kernel alone completes handshakes, as far as the backlog goes.
            while waiting.get_map():
                ready = waiting.select(HANG_GUARD)
                assert ready, f"{len(waiting.get_map())} handshakes are incomplete"
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
        for client in clients:
            client.send(http_request("POST", COMPLETIONS, BODY))
    busy()
    for client in clients:
        assert client.reader().finish().status == 200
        client.close()


def test_b11_a_burst_of_connections_is_served() -> None:
    with Cluster() as cluster:
        burst(cluster)


def test_as_many_connections_wait_as_the_environment_says() -> None:
    with Cluster(env={"PROXY_LISTEN_BACKLOG": "2"}) as cluster:
        with cluster.proxy.stopped():
            clients = [cluster.connect(wait=False) for _ in range(9)]
            # On loopback a handshake is over, or its first packet dropped, by now.
            states = [
                each.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                for each in clients
            ]
        # What the kernel takes beyond the backlog is one; then it drops.
        assert states == [TCP_ESTABLISHED] * 3 + [TCP_SYN_SENT] * 6
        for each in clients:
            each.close()


@pytest.mark.soak
def test_b11_soak_bursts_beside_a_large_upload() -> None:
    large: JSON = {"prompt": "a" * 20_000_000}
    with Cluster() as cluster:

        def upload() -> None:
            assert cluster.post(COMPLETIONS, large).status == 200

        for _ in range(5):
            burst(cluster, upload)


def test_b12_a_hung_engine_does_not_hold_up_the_other() -> None:
    count = 300
    hung, streaming = Gate(), Gate()
    with Cluster(decode=2) as cluster:
        cluster.d[0].default = [hung, http_response(200)]
        cluster.d[1].default = sse(event("1"), streaming, DONE)
        clients = [cluster.connect() for _ in range(count)]
        readers = [
            client.post(COMPLETIONS, STREAM | {"prompt": str(number)})
            for number, client in enumerate(clients)
        ]
        for engine in cluster.d:
            # All of its share runs at the same time: no plateau at 100.
            for _ in range(count // 2):
                engine.next_request()
        served = [int(each.json()["prompt"]) for each in cluster.d[1].requests]
        for number in served:
            assert readers[number].body_until(event("1")) == event("1")
        streaming.release()
        for number in served:
            assert readers[number].finish().end is End.COMPLETE
        hung.release()
        for reader in readers:
            assert reader.finish().status == 200
        for client in clients:
            client.close()


# --- Streaming (B22) ------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses"])
def test_b22_each_event_arrives_before_the_next_exists(
    pair: Cluster, path: str
) -> None:
    gates = [Gate() for _ in range(101)]
    steps: list[Step] = [SSE_HEAD]
    for number, gate in enumerate(gates[:-1]):
        size, data = chunk(event(str(number))).split(b"\r\n", 1)
        steps += [gate, size + b"\r\n", data[:-2], data[-2:]]
    pair.d[0].answer(*steps, gates[-1], chunk(DONE), LAST_CHUNK)
    with pair.connect() as client:
        reader = client.post(path, STREAM)
        assert (
            reader.head().header("content-type") == "text/event-stream; charset=utf-8"
        )
        sent = b""
        for number, gate in enumerate(gates[:-1]):
            gate.release()
            sent += event(str(number))
            assert reader.body_until(event(str(number))) == sent
        gates[-1].release()
        response = reader.finish()
    assert (response.body, response.end) == (sent + DONE, End.COMPLETE)


def test_b22_chunks_are_not_framed_anew(pair: Cluster) -> None:
    body = b"6\r\nabc\n\n\n\r\n00003\r\nx\n\n\r\n1;a=b\r\n!\r\n0\r\n\r\n"
    pair.d[0].answer(SSE_HEAD + body)
    response = pair.post(COMPLETIONS, STREAM)
    assert response.body == b"abc\n\n\nx\n\n!"
    assert response.raw_body == body


# --- Clients that leave (B05) ---------------------------------------------------------

LEAVE = [RawClient.close, RawClient.reset, RawClient.half_close]


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
def test_b05_a_client_that_leaves_during_prefill(
    pair: Cluster, body: JSON, leave: Callable[[RawClient], None]
) -> None:
    pair.p[0].answer(Gate())
    with pair.connect() as client:
        client.post(COMPLETIONS, body)
        leg = pair.p[0].next_request()
        leave(client)
        leg.wait_abandoned()
    assert pair.post(COMPLETIONS, {"prompt": "next"}).status == 200
    assert [each.json()["prompt"] for each in pair.d[0].requests] == ["next"]


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
def test_b05_a_client_that_leaves_before_the_first_byte(
    pair: Cluster, body: JSON, leave: Callable[[RawClient], None]
) -> None:
    pair.d[0].answer(Gate())
    with pair.connect() as client:
        client.post(COMPLETIONS, body)
        leg = pair.d[0].next_request()
        leave(client)
        leg.wait_abandoned()
    assert len(pair.d[0].requests) == 1


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("start", [SSE_HEAD + chunk(event("1")), b"", None])
def test_b05_a_client_that_leaves_within_the_answer(
    pair: Cluster, start: bytes | None, leave: Callable[[RawClient], None]
) -> None:
    whole = http_response(200, b"data: 1\n\n and more")
    pair.d[0].answer(start or whole[:-4], Gate())
    with pair.connect() as client:
        reader = client.post(COMPLETIONS, STREAM if start else BODY)
        leg = pair.d[0].next_request()
        reader.body_until(event("1"))
        leave(client)
        leg.wait_abandoned()


@pytest.mark.parametrize("leave", LEAVE)
def test_b05_a_client_that_leaves_another_route(
    pair: Cluster, leave: Callable[[RawClient], None]
) -> None:
    pair.d[0].answer(Gate())
    with pair.connect() as client:
        client.post("/v1/responses", BODY)
        leg = pair.d[0].next_request()
        leave(client)
        leg.wait_abandoned()


def test_b05_no_descriptor_stays_behind() -> None:
    with Cluster(limits={"ENGINE_IDLE_TIMEOUT": 0.1, "TICK": 0.02}) as cluster:
        for engine in cluster.engines:
            engine.wait_connections(0)
        before = cluster.proxy.open_descriptors()
        cluster.d[0].default = [SSE_HEAD, chunk(event("1")), Gate()]
        clients = [cluster.connect() for _ in range(50)]
        readers = [client.post(COMPLETIONS, STREAM) for client in clients]
        for reader, client in zip(readers, clients):
            reader.body_until(event("1"))
            client.reset()
        for leg in cluster.d[0].requests:
            leg.wait_abandoned()
        cluster.proxy.wait_idle()
        for engine in cluster.engines:
            engine.wait_connections(0)
        poll(
            lambda: cluster.proxy.open_descriptors() <= before,
            f"no more than {before} descriptors",
        )


# --- Enormous prefill answers (B90) ---------------------------------------------------

MEBIBYTE = 1 << 20
WHITE = b" " * MEBIBYTE


def announced(size: int, status: int = 200) -> bytes:
    """The head of a JSON answer with a body of `size` bytes."""
    head = f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {size}\r\n\r\n".encode()


@pytest.mark.parametrize("framing", ["length", "chunked", "until_close"])
def test_b90_an_enormous_hand_over_is_cut_off(pair: Cluster, framing: str) -> None:
    count = 2048
    steps: Iterable[Step]
    if framing == "length":
        steps = itertools.chain(
            [announced(count * MEBIBYTE)], itertools.repeat(WHITE, count)
        )
    elif framing == "chunked":
        steps = itertools.chain([SSE_HEAD], itertools.repeat(chunk(WHITE), count))
    else:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
        steps = itertools.chain([head], itertools.repeat(WHITE, count))
    before = pair.proxy.resident_bytes()
    pair.p[0].answer(lambda _: steps)
    with pair.connect() as client:
        reader = client.post(COMPLETIONS, BODY)
        leg = pair.p[0].next_request()
        response = reader.finish()
        leg.wait_abandoned()
        assert response.status == 502
        response.error()
    assert pair.d[0].requests == []
    assert pair.proxy.peak_resident_bytes() - before < 128 * MEBIBYTE
    assert pair.post(COMPLETIONS, BODY).status == 200


def test_b90_a_hand_over_within_the_limit_passes(pair: Cluster) -> None:
    def large(request: EngineRequest) -> list[Step]:
        params = hand_over(request) | {"padding": "x" * (8 * MEBIBYTE)}
        return [http_response(200, {"kv_transfer_params": params})]

    pair.p[0].answer(large)
    assert pair.post(COMPLETIONS, BODY).status == 200
    [p], [d] = pair.p[0].requests, pair.d[0].requests
    assert d.members()["kv_transfer_params"] == p.handed_over()


def test_b90_an_enormous_error_is_passed_on_or_502(pair: Cluster) -> None:
    size = 120
    before = pair.proxy.resident_bytes()
    steps = [announced(size * MEBIBYTE, 400), *[WHITE] * size]
    pair.p[0].answer(lambda _: steps)
    response = pair.post(COMPLETIONS, BODY)
    assert response.end is End.COMPLETE
    if response.status == 400:
        assert len(response.body) == size * MEBIBYTE
    else:
        assert response.status == 502
    assert pair.d[0].requests == []
    assert pair.proxy.peak_resident_bytes() - before < 128 * MEBIBYTE


# --- The OpenAI client as judge -------------------------------------------------------


def test_the_openai_client_works_unchanged(quad: Cluster) -> None:
    host, port = quad.proxy.address
    with openai.OpenAI(
        api_key="k", base_url=f"http://{host}:{port}/v1", max_retries=0
    ) as client:
        assert [each.id for each in client.models.list()] == quad.d[0].models
        whole = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
        assert whole.choices[0].message.content == "hello"
        stream = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        deltas = [each.choices[0].delta.content for each in stream]
        assert deltas == ["one", " two", " three"]
        tokens = client.completions.create(model="m", prompt="a", stream=True)
        assert [each.choices[0].text for each in tokens] == deltas


# --- One connection, many requests ----------------------------------------------------


def test_requests_on_one_connection_are_answered_in_order(pair: Cluster) -> None:
    with pair.connect() as client:
        responses: list[Response] = []
        for body in (BODY, STREAM, BODY):
            responses.append(client.post(COMPLETIONS, body).finish())
        responses.append(client.request("GET", "/status").finish())
    assert [each.status for each in responses] == [200, 200, 200, 200]
    assert [each.extra for each in responses] == [b"", b"", b"", b""]


def test_a_slow_client_leaves_no_engine_connection_paused() -> None:
    # Whether it is the last piece of an answer that finds the client's buffers full
    # depends on the kernel, so this takes some answers of different sizes.
    with Cluster(limits={"WRITE_HIGH_WATER": 1}) as cluster:
        for number in range(12):
            size = 5 * MEBIBYTE + number * 77_777
            cluster.d[0].answer(announced(size), b"x" * size)
            with cluster.connect(receive_buffer=1 << 12) as client:
                assert len(client.post(COMPLETIONS, BODY).finish().body) == size
                assert client.post(COMPLETIONS, BODY).finish().status == 200
