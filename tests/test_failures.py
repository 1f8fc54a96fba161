# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Failures over many requests: health, membership, release, shutdown.

What one failing request comes to stands in `fault_table.py`.
"""

import contextlib
import signal
import socket
from functools import partial

import pytest
from rig import (
    COMPLETIONS,
    DONE,
    JSON,
    LAST_CHUNK,
    MODEL,
    SSE_HEAD,
    Close,
    Cluster,
    End,
    EngineRequest,
    Gate,
    ProxyProcess,
    RawClient,
    Response,
    ScriptedEngine,
    Step,
    chunk,
    event,
    gather,
    http_request,
    http_response,
    openai_error,
    poll,
    prefill_answer,
)

BODY: JSON = {"prompt": "a"}
STREAM: JSON = BODY | {"stream": True}
PARAMS = "kv_transfer_params"
QUICK = {"TICK": 0.02, "PROBE_INTERVAL_DOWN": 0.03, "PROBE_INTERVAL_UP": 1000.0}
ADMIN = {"ADMIN_API_KEY": "secret-admin-key"}
WITH_KEY = {"X-API-Key": "secret-admin-key"}


def order(cluster: Cluster, action: str, role: str, instance: str) -> Response:
    """POST /instances/add or /instances/remove."""
    body: JSON = {"type": role, "instance": instance}
    return cluster.request("POST", f"/instances/{action}", body, WITH_KEY)


def all_requests(engines: "list[ScriptedEngine]") -> list[EngineRequest]:
    """The requests of several engines."""
    return [request for engine in engines for request in engine.requests]


def hand_overs(engines: "list[ScriptedEngine]") -> list[bytes]:
    """The hand-overs that decode engines were given."""
    return [each.members()[PARAMS] for each in all_requests(engines)]


# --- Answers that are cut (B09) -------------------------------------------------------

EVENTS = [chunk(event(f"number {number}")) for number in range(3)]
PART = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
)


@pytest.mark.parametrize(
    ("sent", "end"),
    [
        pytest.param([SSE_HEAD, *EVENTS], Close.RST, id="reset"),
        pytest.param([SSE_HEAD, *EVENTS], Close.FIN, id="no_last_chunk"),
        pytest.param([PART + b"number 2" + b"x" * 392], Close.FIN, id="too_short"),
    ],
)
def test_b09_an_answer_cut_short_is_never_ended(
    pair: Cluster, sent: list[bytes], end: Close
) -> None:
    gate = Gate()
    pair.d[0].answer(*sent, gate, end)
    with pair.connect() as client:
        reader = client.post(COMPLETIONS, STREAM)
        reader.body_until(b"number 2")
        gate.release()
        response = reader.finish()
    assert response.end is End.INCOMPLETE
    assert response.raw_body == b"".join(sent).partition(b"\r\n\r\n")[2]
    assert LAST_CHUNK not in response.raw_body and DONE not in response.body


# --- One hand-over, one POST (B15, B40) -----------------------------------------------

LATE = [[Close.RST], [http_response(503, openai_error(503, "busy"))]]


@pytest.mark.parametrize("steps", LATE, ids=["reset", "503"])
def test_b15_no_hand_over_is_delivered_twice(quad: Cluster, steps: list[Step]) -> None:
    quad.d[0].default = steps
    for _ in range(12):
        assert quad.post(COMPLETIONS, BODY).status == 200
    delivered = hand_overs(list(quad.d))
    assert len(quad.d[0].requests) >= 3
    assert len(set(delivered)) == len(delivered)
    made = [each.handed_over() for each in all_requests(list(quad.p))]
    assert sorted(made) == sorted(delivered)


def test_b15_what_was_not_delivered_moves_on_as_it_is() -> None:
    with Cluster(decode=2, limits=QUICK) as cluster:
        cluster.d[0].refuse()
        for _ in range(4):
            assert cluster.post(COMPLETIONS, BODY).status == 200
        made = [each.handed_over() for each in cluster.p[0].requests]
        assert len(made) == 4
        assert hand_overs([cluster.d[1]]) == made


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "reused"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_b40_a_lost_answer_is_one_post_on_any_connection(role: str, warm: bool) -> None:
    with Cluster(limits=QUICK) as cluster:
        failing = cluster.p[0] if role == "prefill" else cluster.d[0]
        if warm:
            assert cluster.post(COMPLETIONS, BODY).status == 200
        else:
            failing.drop_connections()
        before = len(failing.requests)
        failing.answer(Close.RST)
        assert cluster.post(COMPLETIONS, BODY).status == 502
        assert len(failing.requests) == before + 1


def test_b40_a_sole_decode_is_asked_again_only_with_another_prefill() -> None:
    with Cluster(prefill=2, limits=QUICK) as cluster:
        cluster.d[0].answer(http_response(500, openai_error(500, "no KV")))
        assert cluster.post(COMPLETIONS, BODY).status == 200
        assert [len(each.requests) for each in cluster.p] == [1, 1]
        assert len(set(hand_overs([cluster.d[0]]))) == 2
        cluster.d[0].answer(Close.RST)
        assert cluster.post(COMPLETIONS, BODY).status == 502
        assert len(cluster.d[0].requests) == 3


def test_no_retries_means_one_post_per_leg() -> None:
    with Cluster(2, 2, args=["--retries", "0"], limits=QUICK) as cluster:
        for role in (cluster.p, cluster.d):
            for each in role:
                each.answer(http_response(500, openai_error(500, "no")))
            before = len(all_requests(list(role)))
            assert cluster.post(COMPLETIONS, BODY).status == 500
            assert len(all_requests(list(role))) == before + 1
            for each in role:
                each.forget()


# --- Load and rotation (B16, B85) -----------------------------------------------------


def abort(cluster: Cluster, number: int) -> None:
    """A client that leaves while it uploads, in prefill, before or in the answer."""
    phase = number % 4
    with cluster.connect() as client:
        if phase == 0:
            client.send(http_request("POST", COMPLETIONS, BODY)[:-1])
            client.reset()
            return
        role = list(cluster.p if phase == 1 else cluster.d)
        steps: list[Step] = [SSE_HEAD, chunk(event("1"))] if phase == 3 else []
        for engine in role:
            engine.default = [*steps, Gate()]
        before = len(all_requests(role))
        reader = client.post(COMPLETIONS, STREAM)
        poll(lambda: len(all_requests(role)) > before, "the leg")
        if phase == 3:
            reader.body_until(event("1"))
        client.reset()
    cluster.proxy.wait_idle()
    for engine in cluster.engines:
        engine.forget()


def test_b16_clients_that_left_weigh_on_nobody(quad: Cluster) -> None:
    for number in range(300):
        abort(quad, number)
    quad.settle()
    for _ in range(200):
        assert quad.post(COMPLETIONS, BODY).status == 200
    assert [len(each.requests) for each in quad.engines] == [100] * 4


def test_b85_every_instance_gets_its_share_whatever_fails() -> None:
    with Cluster(3, 2, limits=QUICK) as cluster:
        for number in range(60):
            if number % 10 == 0:
                cluster.p[0].answer(http_response(400, openai_error(400, "no")))
            assert cluster.post(COMPLETIONS, BODY).status in (200, 400)
        assert [len(each.requests) for each in cluster.p] == [20] * 3
        counts = [len(each.requests) for each in cluster.d]
        refused = 60 - sum(counts)
        assert abs(counts[0] - counts[1]) <= 2 + refused


# --- Instances that die and return (B36, B47) -----------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_b36_b47_an_instance_that_dies_costs_nobody_and_returns(role: str) -> None:
    with Cluster(2, 2, limits=QUICK) as cluster:
        engines = cluster.p if role == "prefill" else cluster.d
        gone, left = engines
        gone.refuse()
        for _ in range(6):
            assert cluster.post(COMPLETIONS, BODY).status == 200
        assert (len(gone.requests), len(left.requests)) == (0, 6)
        gone.listen()
        cluster.proxy.wait_state(gone, "up")
        for _ in range(6):
            assert cluster.post(COMPLETIONS, BODY).status == 200
        assert len(gone.requests) == 3


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_b47_an_empty_role_is_503_and_the_other_untouched(role: str) -> None:
    with Cluster(2, 2, limits=QUICK) as cluster:
        gone, other = cluster.p, cluster.d
        if role == "decode":
            gone, other = other, gone
        for each in gone:
            each.refuse()
        poll(
            lambda: (
                cluster.post(COMPLETIONS, BODY).status == 503
                and all(
                    cluster.proxy.states()[role, e.instance] == "down" for e in gone
                )
            ),
            "the role is empty",
        )
        before = len(all_requests(list(other)))
        response = cluster.post(COMPLETIONS, BODY)
        assert response.status == 503 and response.header("retry-after")
        assert len(all_requests(list(other))) == before
        for each in gone:
            each.listen()
        cluster.proxy.wait_all_up()
        assert cluster.post(COMPLETIONS, BODY).status == 200


# --- Hand-overs that nobody uses ------------------------------------------------------


def in_flight(cluster: Cluster, engine: ScriptedEngine) -> int:
    """The requests that an instance works on, as /status shows it."""
    for each in cluster.proxy.status()["instances"]:
        if (each["role"], each["instance"]) == (engine.role, engine.instance):
            count: int = each["in_flight"]
            return count
    raise AssertionError(f"{engine} is not in /status")


def leave_while_connecting(cluster: Cluster, stuck: ScriptedEngine) -> bool:
    """One client that leaves; returns whether its D was being connected to."""
    before = len(all_requests(list(cluster.d)))
    with cluster.connect() as client:
        client.post(COMPLETIONS, BODY)
        poll(
            lambda: (
                in_flight(cluster, stuck) or len(all_requests(list(cluster.d))) > before
            ),
            "a decode leg",
        )
        return len(all_requests(list(cluster.d))) == before


def test_b05_a_hand_over_is_released_when_its_client_leaves() -> None:
    with Cluster(decode=2, limits=QUICK | {"CONNECT_TIMEOUT": 1.0}) as cluster:
        stuck, well = cluster.d
        stuck.swallow_connects()
        assert any(leave_while_connecting(cluster, stuck) for _ in range(4))
        handed = cluster.p[0].requests[-1].handed_over()
        # Earlier requests may have been served here.
        while (release := well.next_request()).members()[PARAMS] != handed:
            pass
        assert release.json()["model"] != MODEL


def test_a_hand_over_is_released_when_no_decode_is_up_any_more() -> None:
    with Cluster(limits=QUICK | {"PROBE_INTERVAL_UP": 0.03}) as cluster:
        gate = Gate()
        cluster.p[0].answer(lambda request: [gate, *prefill_answer(request)])
        with cluster.connect() as client:
            reader = client.post(COMPLETIONS, BODY)
            leg = cluster.p[0].next_request()
            cluster.d[0].health = 503
            cluster.proxy.wait_state(cluster.d[0], "down")
            gate.release()
            assert reader.finish().status == 503
        release = cluster.d[0].next_request()
        assert release.members()[PARAMS] == leg.handed_over()
        assert release.json()["model"] != MODEL


@pytest.mark.parametrize(
    ("kind", "released"), [("Bad Request", True), ("BadRequestError", False)]
)
def test_a_hand_over_that_decode_has_refused_unread_is_released(
    kind: str, released: bool
) -> None:
    # Of what comes after its parser D tells P by itself, and P may not be told twice.
    error = {"message": "no", "type": kind, "param": None, "code": 400}
    with Cluster(limits=QUICK) as cluster:
        cluster.d[0].answer(http_response(400, {"error": error}))
        assert cluster.post(COMPLETIONS, BODY).json() == {"error": error}
        cluster.proxy.wait_idle()
        refused, *release = cluster.d[0].requests
        assert len(release) == released
        for each in release:
            assert each.json()["model"] != MODEL
            assert each.members()[PARAMS] == refused.members()[PARAMS]


def test_a_prefill_that_failed_is_let_go_when_another_has_served() -> None:
    with Cluster(prefill=2, limits=QUICK) as cluster:
        failing, gate = cluster.p[0], Gate()
        part = b"HTTP/1.1 500 No\r\nContent-Length: 100\r\n\r\n"
        failing.default = [part, Gate()]
        cluster.d[0].default = [gate, http_response(200, b"{}")]
        for _ in range(2):
            with cluster.connect() as client:
                client.post(COMPLETIONS, BODY)
                cluster.d[0].next_request()
                for leg in failing.requests:
                    leg.wait_abandoned()


# --- Pairs (B18) ----------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_b18_the_other_leg_of_a_pushed_pair_is_closed(role: str) -> None:
    args = ["--kv-connector", "nixl-push", "--prefill-engine-id", "e"]
    args += ["--prefill-kv-host", "10.0.0.9"]
    with Cluster(args=args, limits=QUICK) as cluster:
        bad, good = cluster.p[0], cluster.d[0]
        if role == "decode":
            bad, good = good, bad
        gate = Gate()
        bad.answer(gate, http_response(500, openai_error(500, "no")))
        good.answer(Gate())
        with cluster.connect() as client:
            reader = client.post(COMPLETIONS, BODY)
            waiting = good.next_request()
            bad.next_request()
            gate.release()
            waiting.wait_abandoned()
            assert reader.finish().status == 500
        cluster.proxy.wait_idle()


# --- Membership (B84) -----------------------------------------------------------------


def test_removing_waits_for_what_runs_and_then_forgets() -> None:
    with Cluster(decode=2, env=ADMIN, limits=QUICK) as cluster:
        leaving, staying = cluster.d
        gate = Gate()
        for each in cluster.d:
            each.default = [gate, http_response(200, b"{}")]
        clients = [cluster.connect() for _ in range(2)]
        readers = [client.post(COMPLETIONS, BODY) for client in clients]
        leaving.next_request()
        staying.next_request()
        assert order(cluster, "remove", "decode", leaving.instance).status == 200
        assert cluster.proxy.states()["decode", leaving.instance] == "draining"
        third = cluster.connect()
        readers.append(third.post(COMPLETIONS, BODY))
        staying.next_request()
        gate.release()
        assert {each.finish().status for each in readers} == {200}
        key = "decode", leaving.instance
        poll(lambda: key not in cluster.proxy.states(), "it is forgotten")
        assert len(leaving.requests) == 1
        for client in (*clients, third):
            client.close()
        again = order(cluster, "remove", "decode", leaving.instance)
        assert again.status == 400


def test_adding_what_drains_or_is_down_brings_it_back() -> None:
    with Cluster(
        decode=2, env=ADMIN, limits=QUICK | {"PROBE_INTERVAL_DOWN": 1000.0}
    ) as c:
        each, gate = c.d[0], Gate()
        each.default = c.d[1].default = [gate, http_response(200, b"{}")]
        with c.connect() as one, c.connect() as two:
            readers = [one.post(COMPLETIONS, BODY), two.post(COMPLETIONS, BODY)]
            each.next_request()
            assert order(c, "remove", "decode", each.instance).status == 200
            assert order(c, "add", "decode", each.instance).status == 200
            assert c.proxy.states()["decode", each.instance] == "up"
            gate.release()
            assert {reader.finish().status for reader in readers} == {200}
        assert c.proxy.states()["decode", each.instance] == "up"


def test_b84_adding_disturbs_no_stream_and_is_done_once() -> None:
    with Cluster(env=ADMIN) as cluster, ScriptedEngine("decode") as later:
        gate = Gate()
        cluster.d[0].default = [SSE_HEAD, chunk(event("1")), gate, LAST_CHUNK]
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(cluster.connect()) for _ in range(100)]
            readers = [client.post(COMPLETIONS, STREAM) for client in clients]
            for reader in readers:
                reader.body_until(event("1"))
            add = partial(order, cluster, "add", "decode", later.instance)
            statuses = sorted(each.status for each in gather([add] * 20))
            assert statuses == [200] + [400] * 19
            gate.release()
            assert {reader.finish().end for reader in readers} == {End.COMPLETE}
        for _ in range(2):
            assert cluster.post(COMPLETIONS, BODY).status == 200
        assert later.requests


def test_b84_adding_what_accepts_and_says_nothing_has_a_limit() -> None:
    with (
        Cluster(env=ADMIN, limits=QUICK | {"PROBE_TIMEOUT": 0.2}) as cluster,
        ScriptedEngine("decode") as mute,
    ):
        mute.health = Gate()
        assert order(cluster, "add", "decode", mute.instance).status == 400


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".invalid"])
def test_b84_a_name_that_cannot_be_looked_up_is_an_answer(host: str) -> None:
    with Cluster(env=ADMIN, limits=QUICK | {"PROBE_TIMEOUT": 1.0}) as cluster:
        assert order(cluster, "add", "decode", f"{host}:80").status == 400


# --- Shutdown (B74) -------------------------------------------------------------------


def stream(client: RawClient, version: str = "1.1") -> None:
    """Asks for a stream in a version of HTTP."""
    asked = http_request("POST", COMPLETIONS, STREAM)
    client.send(asked.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1))


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_b74_running_answers_end_or_are_cut(version: str) -> None:
    short, endless = Gate(), Gate()
    with (
        Cluster(args=["--drain-timeout", "2"], limits=QUICK) as cluster,
        contextlib.ExitStack() as stack,
    ):
        steps: list[Step] = [SSE_HEAD, chunk(event("1"))]
        cluster.d[0].answer(*steps, short, chunk(DONE), LAST_CHUNK)
        cluster.d[0].answer(*steps, endless, chunk(DONE), LAST_CHUNK)
        clients = [stack.enter_context(cluster.connect()) for _ in range(52)]
        readers = []
        for client in clients[:2]:
            stream(client, version)
            readers.append(client.reader())
            readers[-1].body_until(event("1"))
        cluster.proxy.signal(signal.SIGTERM)
        assert clients[2].wait_closed() == b""
        short.release()
        assert readers[0].finish().end is End.COMPLETE
        for client in clients[3:]:
            assert client.wait_closed() == b""
        with pytest.raises(ConnectionRefusedError):
            cluster.connect()
        cut = readers[1].finish()
        # In HTTP/1.0 the end of the connection would be the end of the answer.
        assert cut.reset if version == "1.0" else cut.end is End.INCOMPLETE
        assert cut.body == event("1")
        cluster.d[0].requests[-1].wait_abandoned()
        assert cluster.proxy.wait_exit() == 0
        with socket.create_server(cluster.proxy.address):
            pass


def test_b74_a_second_signal_ends_at_once() -> None:
    prefill, decode = ScriptedEngine("prefill"), ScriptedEngine("decode")
    argv = ["--model", MODEL, "--prefill", prefill.instance]
    argv += ["--decode", decode.instance]
    with prefill, decode:
        # Not in a `with`: that one expects an orderly end.
        proxy = ProxyProcess(argv)
        try:
            proxy.wait_all_up()
            decode.answer(SSE_HEAD, chunk(event("1")), Gate())
            with proxy.connect() as client:
                reader = client.post(COMPLETIONS, STREAM)
                reader.body_until(event("1"))
                proxy.signal(signal.SIGTERM)
                proxy.wait_log("stopping")
                proxy.signal(signal.SIGTERM)
                assert reader.finish().end is End.INCOMPLETE
            proxy.wait_exit()
        finally:
            proxy.kill()
