# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Too few file descriptors: nobody who is served notices, the rest is told."""

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from moriio_rig import Fleet
from rig import (
    COMPLETIONS,
    DONE,
    JSON,
    LAST_CHUNK,
    MODEL,
    SSE_HEAD,
    Cluster,
    End,
    Gate,
    ProxyProcess,
    RawClient,
    Response,
    chunk,
    event,
    http_response,
    poll,
    prefill_answer,
)
from tls import Tls

BODY: JSON = {"prompt": "a", "messages": []}
STREAM: JSON = BODY | {"stream": True}
# Descriptors of the proxy: half are reserved, a client takes two of the rest. Of those
# that come then, a quarter of the reserve is told.
LIMIT, CLIENTS, REFUSED = 128, 32, 16
SMALL = 64, 16, 8
QUICK = {"TICK": 0.02}
TURNED_AWAY = "clients turned away"
NO_DESCRIPTOR = "connections to engines failed"


def wait_rest(proxy: ProxyProcess) -> None:
    """Returns once the proxy uses no CPU time from one look to the next."""
    used = [-1]

    def rests() -> bool:
        fields = Path(f"/proc/{proxy.pid}/stat").read_text().rpartition(")")[2]
        used.append(sum(map(int, fields.split()[11:13])))
        return used[-1] == used[-2]

    poll(rests, "the proxy uses no CPU time")


def check_503(response: Response, words: str) -> None:
    """Fails unless it is a refusal that says when to come again."""
    assert response.status == response.error()["code"] == 503
    assert words in response.error()["message"]
    assert int(response.header("retry-after") or 0) > 0


# --- More clients than descriptors ----------------------------------------------------


@pytest.mark.parametrize("secured", [False, True])
@pytest.mark.parametrize(
    ("limit", "clients", "refused"), [SMALL, (LIMIT, CLIENTS, REFUSED)]
)
def test_running_streams_go_on_and_more_clients_are_told(
    limit: int, clients: int, refused: int, secured: bool, tls: Tls
) -> None:
    args, trust = (tls.args, tls.trust) if secured else ([], None)
    cluster = Cluster(args=args, trust=trust, limits=QUICK, descriptors=limit, decode=2)
    with cluster, contextlib.ExitStack() as stack:
        gate = Gate()
        for engine in cluster.d:
            first, last = chunk(event("1")), chunk(DONE)
            engine.default = [SSE_HEAD, first, gate, last, LAST_CHUNK]
        readers = []
        for _ in range(clients):
            client = stack.enter_context(cluster.connect())
            readers.append(client.post(COMPLETIONS, STREAM))
            readers[-1].body_until(event("1"))
        for method, body in (("POST", STREAM), ("GET", None), ("POST", STREAM)):
            response = cluster.request(method, COMPLETIONS, body)
            check_503(response, "as many clients as it can")
            assert response.header("connection") == "close"
        # Those that say nothing are as welcome; then they are closed at once.
        silent = [
            stack.enter_context(RawClient(cluster.proxy.address))
            for _ in range(60 if not secured else 0)
        ]
        for client in silent[refused:]:
            assert client.wait_closed() == b""
        wait_rest(cluster.proxy)
        gate.release()
        for reader in readers:
            response = reader.finish()
            assert response.end is End.COMPLETE
            assert response.body == event("1") + DONE
        for client in silent:
            client.close()
    assert len([line for line in cluster.proxy.log if TURNED_AWAY in line]) == 1
    assert not [line for line in cluster.proxy.log if NO_DESCRIPTOR in line]


def test_who_leaves_makes_room(tls: Tls) -> None:
    with (
        Cluster(limits=QUICK, descriptors=LIMIT) as cluster,
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(cluster.connect()) for _ in range(CLIENTS)]
        for client in clients:
            assert client.post(COMPLETIONS, BODY).finish().status == 200
        host, port = cluster.proxy.address
        api = openai.OpenAI(
            api_key="k", base_url=f"http://{host}:{port}/v1", max_retries=0
        )
        with api, pytest.raises(openai.InternalServerError, match="as many clients"):
            api.completions.create(model=MODEL, prompt="a")
        clients[0].close()

        def served() -> bool:
            return cluster.post(COMPLETIONS, BODY).status == 200

        poll(served, "the next client is served")


def test_a_burst_that_needs_more_between_its_legs_gets_what_was_kept() -> None:
    # 50 clients, 50 connections to P that could be kept, and 50 to D.
    limits = QUICK | {"RESERVED_DESCRIPTORS": 28, "ENGINE_IDLE_TIMEOUT": 60.0}
    with (
        Cluster(limits=limits, descriptors=LIMIT) as cluster,
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(cluster.connect()) for _ in range(50)]
        gate, served = Gate(), Gate()
        cluster.p[0].default = lambda request: [gate, *prefill_answer(request)]
        cluster.d[0].default = [served, http_response(200, b"{}")]
        readers = [client.post(COMPLETIONS, BODY) for client in clients]
        for _ in readers:
            cluster.p[0].next_request()
        gate.release()
        for _ in readers:
            cluster.d[0].next_request()
        # Who comes now is told so, and not just closed.
        check_503(cluster.request("GET", "/health"), "as many clients as it can")
        served.release()
        assert {reader.finish().status for reader in readers} == {200}
        assert len(cluster.d[0].requests) == 50
        wait_rest(cluster.proxy)
        assert clients[0].post(COMPLETIONS, BODY).finish().status == 200
    assert not [line for line in cluster.proxy.log if NO_DESCRIPTOR in line]


def test_connections_that_are_kept_leave_room_for_those_who_come() -> None:
    limits = QUICK | {"RESERVED_DESCRIPTORS": 28, "ENGINE_IDLE_TIMEOUT": 60.0}
    with Cluster(limits=limits, descriptors=LIMIT) as cluster:
        gate, served = Gate(), Gate()
        cluster.p[0].default = lambda request: [gate, *prefill_answer(request)]
        cluster.d[0].default = [served, http_response(200, b"{}")]
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(cluster.connect()) for _ in range(33)]
            readers = [client.post(COMPLETIONS, BODY) for client in clients]
            for _ in readers:
                cluster.p[0].next_request()
            gate.release()
            for _ in readers:
                cluster.d[0].next_request()
            served.release()
            assert {reader.finish().status for reader in readers} == {200}
        # 66 connections to engines are kept, and nobody is there.
        with contextlib.ExitStack() as stack:
            for _ in range(50):
                client = stack.enter_context(cluster.connect())
                assert client.request("GET", "/health").finish().status == 200


# --- No descriptor at all -------------------------------------------------------------


def tighten(proxy: ProxyProcess) -> None:
    """Lowers the limit so far that the proxy can open nothing more."""
    pid = proxy.pid
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    # Descriptors below the lowest free number stay open.
    free = next(number for number in range(len(taken) + 1) if number not in taken)
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))


@contextlib.contextmanager
def exhausted(proxy: ProxyProcess) -> Iterator[None]:
    """The proxy can open nothing more within."""
    pid = proxy.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    tighten(proxy)
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


# No probes, which come and go; connections to engines are kept.
QUIET = QUICK | {"PROBE_INTERVAL_UP": 60.0, "ENGINE_IDLE_TIMEOUT": 60.0}


def test_a_connect_that_fails_is_no_fault_of_the_engine() -> None:
    with (
        Cluster(prefill=2, decode=2, limits=QUIET) as cluster,
        cluster.connect() as client,
    ):
        assert client.request("GET", "/health").finish().status == 200
        with exhausted(cluster.proxy):
            for _ in range(6):
                response = client.post(COMPLETIONS, BODY).finish()
                check_503(response, "no file descriptor left")
                assert "prefill instance" in response.error()["message"]
            status = client.request("GET", "/status").finish().json()
            assert {each["state"] for each in status["instances"]} == {"up"}
            wait_rest(cluster.proxy)
        assert not any(engine.requests for engine in cluster.engines)
        for _ in range(4):
            assert client.post(COMPLETIONS, BODY).finish().status == 200
    lines = [line for line in cluster.proxy.log if NO_DESCRIPTOR in line]
    assert len(lines) == 1 and "WARNING" in lines[0]
    assert not [line for line in cluster.proxy.log if "is down" in line]


@pytest.mark.parametrize("connector", ["nixl-push", "mooncake"])
def test_a_pair_that_cannot_be_reached_is_not_tried_again(connector: str) -> None:
    with (
        Cluster(2, 2, limits=QUIET, connector=connector) as cluster,
        cluster.connect() as client,
    ):
        # The connection is accepted.
        assert client.request("GET", "/health").finish().status == 200
        with exhausted(cluster.proxy):
            response = client.post(COMPLETIONS, BODY).finish()
            check_503(response, "no file descriptor left")
            status = client.request("GET", "/status").finish().json()
            assert {each["state"] for each in status["instances"]} == {"up"}
        assert not any(engine.requests for engine in cluster.engines)
        assert client.post(COMPLETIONS, BODY).finish().status == 200


def test_a_probe_that_cannot_be_made_changes_nothing() -> None:
    # Each that fails is logged.
    limits = {"TICK": 0.02, "PROBE_INTERVAL_UP": 0.03, "WARNING_INTERVAL": 0.0}
    with Cluster(limits=limits) as cluster, cluster.connect() as client:
        assert client.request("GET", "/health").finish().status == 200
        with exhausted(cluster.proxy):

            def failed() -> bool:
                tighten(cluster.proxy)
                return sum(NO_DESCRIPTOR in line for line in cluster.proxy.log) > 9

            poll(failed, "probes fail")
            assert client.request("GET", "/health").finish().status == 200
        assert cluster.post(COMPLETIONS, BODY).status == 200
    assert not [line for line in cluster.proxy.log if "is down" in line]


@pytest.mark.parametrize("secured", [False, True])
def test_a_client_without_a_descriptor_is_closed_at_once(
    secured: bool, tls: Tls
) -> None:
    args, trust = (tls.args, tls.trust) if secured else ([], None)
    with (
        Cluster(args=args, trust=trust, limits=QUIET) as cluster,
        cluster.connect() as client,
    ):
        assert client.post(COMPLETIONS, BODY).finish().status == 200
        with exhausted(cluster.proxy):
            for _ in range(3):
                crowd = [RawClient(cluster.proxy.address) for _ in range(50)]
                for each in crowd:
                    assert each.wait_closed() == b""
                    each.close()
                assert client.post(COMPLETIONS, BODY).finish().status == 200
            wait_rest(cluster.proxy)
        assert cluster.post(COMPLETIONS, BODY).status == 200
    assert "Traceback" not in "".join(cluster.proxy.log)


def test_engines_that_register_in_vain_use_no_cpu_time() -> None:
    limits = QUIET | {"ACCEPT_PAUSE": 0.05}
    with Fleet(limits=limits) as fleet, fleet.proxy.connect() as client:

        def connected() -> socket.socket | None:
            # After one in vain the port is closed for a while.
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", fleet.proxy.discovery))
            return None

        assert client.post(COMPLETIONS, BODY).finish().status == 200
        with exhausted(fleet.proxy), contextlib.ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(poll(connected, "the port is open"))
            fleet.proxy.wait_log("no file descriptor was left for an engine")
            wait_rest(fleet.proxy)
            assert client.post(COMPLETIONS, BODY).finish().status == 200
        for engine in fleet.engines:
            fleet.register(engine)
        assert fleet.post(BODY).status == 200
