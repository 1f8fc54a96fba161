# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Back-pressure: slow readers, readers that die, large uploads, many requests."""

import contextlib
import hashlib
import itertools
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from rig import (
    CHAT,
    COMPLETIONS,
    DONE,
    JSON,
    LAST_CHUNK,
    SSE_HEAD,
    Cluster,
    End,
    EngineRequest,
    Gate,
    RawClient,
    ScriptedEngine,
    Step,
    chunk,
    dumps,
    event,
    gather,
    http_request,
    http_response,
    poll,
)
from tls import Tls
from wire import Pace

BODY: JSON = {"prompt": "a", "messages": []}
STREAM: JSON = BODY | {"stream": True}
PUSH = ["--kv-connector", "nixl-push", "--prefill-engine-id", "engine-0"]
PUSH += ["--prefill-kv-host", "127.0.0.1"]
MEBIBYTE = 1 << 20
# Pieces in which the engines of this module send large answers.
PIECE = MEBIBYTE // 4


class Flood:
    """A large answer that shows how far the engine got with it.

    Args:
        size: its bytes, a multiple of `PIECE`.
        coding: "length" or "chunked".

    """

    def __init__(self, size: int, coding: str = "length") -> None:
        self.sent = 0
        self.count = size // PIECE
        # Each piece differs, so that none can be lost, doubled or moved unseen.
        self._piece = os.urandom(PIECE - 4)
        self._frame = chunk if coding == "chunked" else bytes
        fields = "Transfer-Encoding: chunked" if coding == "chunked" else ""
        fields = fields or f"Content-Length: {size}"
        self.head = f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode()
        self.end = LAST_CHUNK if coding == "chunked" else b""

    def play(self, _: EngineRequest) -> Iterator[Step]:
        """What the engine plays; it takes a step when its connection takes more."""
        yield self.head
        for number in range(self.count):
            self.sent += 1
            yield self._frame(number.to_bytes(4) + self._piece)
        yield self.end

    def digest(self) -> str:
        """SHA-256 of the body as it is on the wire."""
        digest = hashlib.sha256()
        for number in range(self.count):
            digest.update(self._frame(number.to_bytes(4) + self._piece))
        digest.update(self.end)
        return digest.hexdigest()

    def wire_size(self) -> int:
        """Bytes of the body on the wire."""
        return self.count * len(self._frame(bytes(PIECE))) + len(self.end)


def received_digest(client: RawClient, size: int) -> str:
    """SHA-256 of `size` bytes behind the next head."""
    head = b""
    while b"\r\n\r\n" not in head:
        received = client.read_some()
        assert received, head
        head += received
    data = head.partition(b"\r\n\r\n")[2]
    digest = hashlib.sha256()
    while True:
        digest.update(data)
        size -= len(data)
        if size <= 0:
            break
        data = client.read_some()
        assert data, f"{size} bytes are missing"
    assert size == 0, "bytes behind the answer"
    return digest.hexdigest()


# Answers on the pace connection in which a blocked engine gets nowhere: each takes
# the proxy one round of its loop, in which it reads every engine that is readable.
ROUNDS = 300


def wait_blocked(cluster: Cluster, floods: list[Flood]) -> None:
    """Returns when no flood gets on, and fails if one got through."""
    with Pace(cluster) as pace:
        before = [-1] * len(floods)
        while (now := [flood.sent for flood in floods]) != before:
            before = now
            for _ in range(ROUNDS):
                pace.wait()
    for flood in floods:
        assert 0 < flood.sent < flood.count, "the proxy took all of it"


# --- Readers that stop and go on (B23) ------------------------------------------------


def let_readers_pause(
    clients: int, size: int, coding: str, allowed: int, tls: Tls | None = None
) -> None:
    """Has clients not read until all is blocked, then read it all."""
    args, trust = (tls.args, tls.trust) if tls else ([], None)
    with Cluster(args=args, trust=trust) as cluster, contextlib.ExitStack() as stack:
        floods = [Flood(size, coding) for _ in range(clients)]
        for flood in floods:
            cluster.d[0].answer(flood.play)
        before = cluster.proxy.resident_bytes()
        readers: list[RawClient] = []
        for _ in floods:
            client = stack.enter_context(cluster.connect(receive_buffer=1 << 16))
            client.post(COMPLETIONS, STREAM)
            # One after the other, so that each client has the flood of its number.
            cluster.d[0].next_request()
            readers.append(client)
        wait_blocked(cluster, floods)
        assert cluster.proxy.resident_bytes() - before < allowed
        # Others are served meanwhile, and the small answer is no flood.
        assert cluster.post(COMPLETIONS, BODY).status == 200
        reading = [
            partial(received_digest, client, flood.wire_size())
            for client, flood in zip(readers, floods)
        ]
        digests = gather(reading, limit=600)
        assert digests == [flood.digest() for flood in floods]
        for client in readers:
            assert client.post(COMPLETIONS, BODY).finish().status == 200
        assert cluster.proxy.peak_resident_bytes() - before < allowed


@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_b23_a_slow_readers_answer_stays_with_the_engine(coding: str) -> None:
    let_readers_pause(4, 48 * MEBIBYTE, coding, 16 * MEBIBYTE)


@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_b23_a_slow_readers_answer_stays_with_the_engine_over_tls(
    coding: str, tls: Tls
) -> None:
    let_readers_pause(4, 48 * MEBIBYTE, coding, 16 * MEBIBYTE, tls)


@pytest.mark.soak
def test_b23_soak_twenty_readers_of_a_gibibyte() -> None:
    let_readers_pause(20, 1024 * MEBIBYTE, "chunked", 64 * MEBIBYTE)


def test_b23_an_error_of_prefill_is_read_no_faster_than_the_client() -> None:
    with Cluster() as cluster, cluster.connect(receive_buffer=1 << 16) as client:
        flood = Flood(48 * MEBIBYTE)
        flood.head = flood.head.replace(b"200 OK", b"400 X")
        cluster.p[0].answer(flood.play)
        before = cluster.proxy.resident_bytes()
        client.post(COMPLETIONS, BODY)
        wait_blocked(cluster, [flood])
        assert cluster.proxy.resident_bytes() - before < 16 * MEBIBYTE
        assert received_digest(client, flood.wire_size()) == flood.digest()


def test_b23_an_answer_that_waits_for_its_reader_is_not_idle() -> None:
    # All of it is with the proxy, and the engine is through.
    size = 16 * MEBIBYTE
    limits = {"WRITE_HIGH_WATER": 2 * size, "KEEP_ALIVE_TIMEOUT": 0.2, "TICK": 0.02}
    with Cluster(limits=limits) as cluster:
        cluster.d[0].answer(http_response(200, b"x" * size))
        with cluster.connect(receive_buffer=1 << 16) as client:
            reader = client.post(COMPLETIONS, BODY)
            cluster.d[0].next_request()
            cluster.proxy.wait_idle()
            for _ in range(3):
                with cluster.connect() as idle:
                    idle.request("GET", "/status").finish()
                    assert idle.wait_closed() == b""
            response = reader.finish()
            assert (len(response.body), response.end) == (size, End.COMPLETE)
            assert client.wait_closed() == b""


# --- Readers that die (B24, B72) ------------------------------------------------------


def let_readers_die(clients: int) -> None:
    """Resets clients once their engine is blocked; nothing of them may stay."""
    limits = {"ENGINE_IDLE_TIMEOUT": 0.1, "TICK": 0.02, "PROBE_INTERVAL_UP": 1000.0}
    with Cluster(limits=limits) as cluster:
        for engine in cluster.engines:
            engine.wait_connections(0)
        before = cluster.proxy.open_descriptors()
        floods = [Flood(1024 * MEBIBYTE, "chunked") for _ in range(clients)]
        for flood in floods:
            cluster.d[0].answer(flood.play)
        readers = [cluster.connect(receive_buffer=1 << 12) for _ in floods]
        for client in readers:
            client.post(COMPLETIONS, STREAM)
        legs = [cluster.d[0].next_request() for _ in floods]
        wait_blocked(cluster, floods)
        for number, client in enumerate(readers):
            (RawClient.reset, RawClient.close)[number % 2](client)
        for leg in legs:
            leg.wait_abandoned()
        cluster.proxy.wait_idle()
        for engine in cluster.engines:
            engine.wait_connections(0)
        poll(
            lambda: cluster.proxy.open_descriptors() <= before,
            f"no more than {before} descriptors",
        )
        assert cluster.post(COMPLETIONS, STREAM).events()[-1] == "[DONE]"


def test_b24_a_reader_that_dies_frees_everything() -> None:
    let_readers_die(6)


@pytest.mark.parametrize("secured", [False, True])
def test_b24_b65_a_client_that_ends_its_side_and_does_not_read_is_gone(
    secured: bool, tls: Tls
) -> None:
    args, trust = (tls.args, tls.trust) if secured else ([], None)
    limits = {"TICK": 0.02, "ENGINE_IDLE_TIMEOUT": 0.1}
    with (
        Cluster(args=args, trust=trust, limits=limits) as cluster,
        cluster.connect(receive_buffer=1 << 16) as client,
    ):
        flood = Flood(48 * MEBIBYTE)
        cluster.d[0].answer(flood.play)
        before = cluster.proxy.open_sockets()
        client.post(COMPLETIONS, STREAM)
        wait_blocked(cluster, [flood])
        # A FIN, and no end of TLS before it.
        client.socket.shutdown(socket.SHUT_WR)
        cluster.d[0].next_request().wait_abandoned()
        # Nothing waits for the client to read after all.
        poll(lambda: cluster.proxy.open_sockets() < before, "its socket is closed")


@pytest.mark.soak
def test_b24_soak_200_readers_die() -> None:
    let_readers_die(200)


def cpu_ticks(pid: int) -> int:
    """CPU time a process has used, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def leave_streams(clients: int, chunks: int) -> None:
    """Resets clients while their engine goes on to send small chunks."""
    with Cluster() as cluster:
        small = chunk(event("x"))
        gates = [Gate() for _ in range(clients)]
        for gate in gates:
            start: list[Step] = [SSE_HEAD, small, gate]
            steps = [*start, *itertools.repeat(small, chunks), chunk(DONE), LAST_CHUNK]
            cluster.d[0].answer(*steps)
        readers = [cluster.connect() for _ in range(clients)]
        for client in readers:
            client.post(COMPLETIONS, STREAM).body_until(event("x"))
        legs = [cluster.d[0].next_request() for _ in range(clients)]
        # The chunks are in the proxy's socket before it can see that nobody reads.
        with cluster.proxy.stopped():
            for client, gate in zip(readers, gates):
                gate.release()
                client.reset()
            poll(
                lambda: all(len(leg.answered) > 1000 for leg in legs),
                "the engine has sent more",
            )
        cluster.proxy.wait_idle()
        assert cluster.post(COMPLETIONS, BODY).status == 200
        used = [-1]

        def rests() -> bool:
            used.append(cpu_ticks(cluster.proxy.pid))
            return used[-1] == used[-2]

        poll(rests, "the proxy uses no CPU time")
        assert len(cluster.proxy.log) <= 3 * clients, cluster.proxy.log[:50]
        assert not [line for line in cluster.proxy.log if "Traceback" in line]
        assert not [line for line in cluster.proxy.log if "send()" in line]


def test_b72_nothing_is_written_to_clients_that_have_left() -> None:
    leave_streams(20, 1000)


@pytest.mark.soak
def test_b72_soak_100_clients_leave() -> None:
    leave_streams(100, 10_000)


# --- Large uploads (B33) --------------------------------------------------------------


def prompts(size: int) -> dict[str, JSON]:
    """Bodies of about `size` bytes."""
    image = {"type": "image_url", "image_url": {"url": "data:," + "A" * size}}
    return {
        "text": {"prompt": "x" * size},
        "tokens": {"prompt": [128_000 + n % 1000 for n in range(size // 8)]},
        "image": {"messages": [{"role": "user", "content": [image]}]},
    }


def upload(cluster: Cluster, kind: str, size: int) -> None:
    body = prompts(size)[kind]
    path = CHAT if kind == "image" else COMPLETIONS
    member = "messages" if kind == "image" else "prompt"
    with cluster.connect() as client:
        assert client.post(path, dumps(body)).finish().status == 200
    for engine in cluster.engines:
        assert engine.next_request().members()[member] == dumps(body[member])


@pytest.mark.parametrize("kind", prompts(0))
def test_b33_a_large_body_reaches_both_legs(pair: Cluster, kind: str) -> None:
    upload(pair, kind, 20 * MEBIBYTE)


@pytest.mark.soak
@pytest.mark.parametrize("kind", prompts(0))
def test_b33_soak_sixty_megabytes(pair: Cluster, kind: str) -> None:
    upload(pair, kind, 60 * MEBIBYTE)


@pytest.mark.parametrize("args", [[], PUSH])
def test_b33_a_prompt_is_forgotten_once_its_answer_has_begun(args: list[str]) -> None:
    gate = Gate()
    body = prompts(MEBIBYTE)["text"] | {"stream": True}
    with Cluster(args=args) as cluster, contextlib.ExitStack() as stack:
        before = cluster.proxy.resident_bytes()
        readers = []
        for _ in range(40):
            cluster.d[0].answer(SSE_HEAD, chunk(event("a")), gate, chunk(DONE))
            reader = stack.enter_context(cluster.connect()).post(COMPLETIONS, body)
            reader.body_until(event("a"))
            readers.append(reader)
        assert cluster.proxy.resident_bytes() - before < 24 * MEBIBYTE
        gate.release()
        for reader in readers:
            reader.body_until(DONE)


def test_b33_an_upload_that_pauses_delays_nobody(pair: Cluster) -> None:
    request = http_request("POST", COMPLETIONS, prompts(20 * MEBIBYTE)["text"])
    middle = len(request) // 2
    with pair.connect() as client, Pace(pair) as pace:
        pace.send(client, [request[:middle]])
        for _ in range(5):
            assert pair.post(COMPLETIONS, STREAM).status == 200
        client.send(request[middle:])
        assert client.reader().finish().status == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_b33_an_engine_that_does_not_read_delays_nobody(role: str) -> None:
    with Cluster(prefill=1, decode=1) as cluster:
        engine = (cluster.p if role == "prefill" else cluster.d)[0]
        gate = Gate()
        engine.answer_early(gate, http_response(400, b'{"error":{}}'))
        with cluster.connect() as client:
            # More than the kernel holds for the engine that does not read.
            reader = client.post(COMPLETIONS, prompts(60 * MEBIBYTE)["text"])
            assert engine.next_request().line.startswith(b"POST")
            for _ in range(5):
                assert cluster.post(COMPLETIONS, STREAM).status == 200
            gate.release()
            # An answer before the end of the request counts, RFC 9112 section 9.5.
            assert reader.finish().status == 400
        # What is left of the request must not run into the next one.
        for _ in range(3):
            assert cluster.post(COMPLETIONS, BODY).status == 200


def test_b33_a_client_that_leaves_a_blocked_upload_frees_it() -> None:
    with Cluster() as cluster:
        gate = Gate()
        cluster.p[0].answer_early(gate)
        with cluster.connect() as client:
            client.post(COMPLETIONS, prompts(60 * MEBIBYTE)["text"])
            leg = cluster.p[0].next_request()
            client.reset()
        cluster.proxy.wait_idle()
        gate.release()
        assert cluster.d[0].requests == []
        assert leg.line.startswith(b"POST")
        assert cluster.post(COMPLETIONS, BODY).status == 200


# --- Many requests (B75) --------------------------------------------------------------


def run_requests(clients: int, each: int, allowed: int) -> None:
    """Sends short requests on kept connections, side by side."""
    with Cluster() as cluster:
        before = [
            (engine.accepted, waiting_in_the_kernel(engine))
            for engine in cluster.engines
        ]

        def run() -> None:
            with cluster.connect() as client:
                for _ in range(each):
                    assert client.post(COMPLETIONS, BODY).finish().status == 200

        gather([run] * clients, limit=600)
        for engine, (accepted, waiting) in zip(cluster.engines, before):
            assert len(engine.requests) == clients * each
            assert engine.accepted - accepted < allowed, "connections are not kept"
            assert len(waiting_in_the_kernel(engine) - waiting) < allowed


def waiting_in_the_kernel(engine: ScriptedEngine) -> set[str]:
    """Where connections to an engine, or to one before on its port, TIME_WAIT."""
    remote, time_wait = f":{engine.port:04X}", "06"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    entries = [line.split() for line in lines]
    return {e[1] for e in entries if e[2].endswith(remote) and e[3] == time_wait}


def test_b75_connections_to_engines_are_kept() -> None:
    # As many as there are clients, and some for probes.
    run_requests(clients=8, each=40, allowed=16)


@pytest.mark.soak
def test_b75_soak_forty_thousand_requests() -> None:
    run_requests(clients=64, each=625, allowed=1000)
