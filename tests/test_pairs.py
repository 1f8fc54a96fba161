# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rules of failure that a second try has to keep; connectors that work in pairs."""

import threading
from collections.abc import Iterator

import pytest
from rig import (
    LAST_CHUNK,
    MODEL,
    SSE_HEAD,
    Close,
    Cluster,
    End,
    Gate,
    ProxyProcess,
    Step,
    chunk,
    http_response,
    poll,
    prefill_answer,
)
from sim_process import SimProcess

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
BODY = b'{"model":"m","prompt":"hi","max_tokens":4}'
STREAM = BODY[:-1] + b',"stream":true}'
MEBIBYTE = 1 << 20
PUSH = ["--kv-connector", "nixl-push", "--prefill-engine-id", "engine-0"]
PUSH += ["--prefill-kv-host", "127.0.0.1"]
ADMIN = {"ADMIN_API_KEY": "secret"}


def test_a_sole_d_gets_no_second_hand_over_from_the_same_p() -> None:
    with Cluster(2, 1) as cluster:
        first, second = cluster.p
        second.answer(Close.RST)
        cluster.d[0].answer(http_response(500, {"error": {"message": "no"}}))
        assert cluster.post(COMPLETIONS, BODY).status == 502
        assert [len(each.requests) for each in (first, second)] == [1, 1]
        assert len(cluster.d[0].requests) == 1


@pytest.mark.parametrize("failing", ["p", "d"])
def test_a_pair_is_tried_again_with_what_did_not_fail(failing: str) -> None:
    push = [*PUSH[:3], "engine-0", "engine-1", *PUSH[4:]]
    with Cluster(2, 2, args=push) as cluster:
        engines = cluster.p if failing == "p" else cluster.d
        engines[0].answer(Close.RST)
        assert cluster.post(COMPLETIONS, BODY).status == 200
        assert [len(each.requests) for each in engines] == [1, 1]
        ids = {
            request.header("X-Request-Id")
            for engine in (*cluster.p, *cluster.d)
            for request in engine.requests
        }
        assert len(ids) == 2


def test_a_pair_that_was_silent_is_not_tried_again() -> None:
    push = [*PUSH[:3], "engine-0", "engine-1", *PUSH[4:]]
    args = [*push, "--first-byte-timeout", "0.2"]
    with Cluster(2, 2, args=args, limits={"TICK": 0.02}) as cluster:
        silent = Gate()
        cluster.p[0].answer(silent)
        cluster.d[0].answer(silent)
        assert cluster.post(COMPLETIONS, BODY).status == 504
        assert cluster.p[1].requests == cluster.d[1].requests == []
        silent.release()


def in_flight(proxy: ProxyProcess) -> dict[str, int]:
    """Instances that work on requests, and on how many."""
    listed = proxy.status()["instances"]
    return {i["instance"]: i["in_flight"] for i in listed if i["in_flight"]}


@pytest.mark.parametrize("begun", [[], [SSE_HEAD]], ids=["silent", "head"])
@pytest.mark.parametrize("prefill, status", [(2, 200), (1, 502)])
def test_decode_does_not_wait_for_a_prefill_engine_that_died(
    begun: list[bytes], prefill: int, status: int
) -> None:
    # P has answered, but D has not begun: it has no KV yet, and may wait for minutes.
    push = ["--kv-connector", "nixl-push", "--prefill-kv-host", "127.0.0.1"]
    push += ["--prefill-engine-id", *(f"engine-{i}" for i in range(prefill))]
    limits = {"PROBE_INTERVAL_UP": 0.05, "TICK": 0.02}
    with Cluster(prefill, 1, args=push, limits=limits) as cluster:
        (d,), p, waiting = cluster.d, cluster.p[0], Gate()
        d.answer(*begun, waiting)
        with cluster.connect() as client:
            reader = client.post(COMPLETIONS, STREAM)
            poll(lambda: d.requests and p.requests, "both were asked")
            poll(lambda: in_flight(cluster.proxy) == {d.instance: 1}, "P has answered")
            p.refuse()
            p.drop_connections()
            response = reader.finish()
        assert (response.status, response.end) == (status, End.COMPLETE)
        assert len(d.requests) == prefill
        waiting.release()


def test_an_answer_that_waits_for_prefill_stays_with_the_engine() -> None:
    size, piece = 256, chunk(b"x" * MEBIBYTE)
    begun, gate = threading.Event(), Gate()

    def flood() -> Iterator[Step]:
        yield SSE_HEAD
        for _ in range(size):
            yield piece
            begun.set()
        yield LAST_CHUNK

    with Cluster(1, 1, args=PUSH) as cluster:
        before = cluster.proxy.resident_bytes()
        cluster.p[0].answer(lambda request: [gate, *prefill_answer(request)])
        cluster.d[0].answer(lambda _: flood())
        with cluster.connect() as client:
            reader = client.post(COMPLETIONS, STREAM)
            assert begun.wait(10)
            # Turns of the proxy's loop, in which it would read what it can.
            for _ in range(300):
                assert cluster.get("/status").status == 200
            assert cluster.proxy.peak_resident_bytes() - before < 64 * MEBIBYTE
            gate.release()
            response = reader.finish()
        assert response.end is End.COMPLETE
        assert len(response.body) == size * MEBIBYTE


def test_settings_of_a_p_that_comes_back_replace_the_old_ones() -> None:
    order = {"type": "prefill", "engine_id": "new", "kv_host": "127.0.0.2"}
    limits = {"PROBE_INTERVAL_UP": 0.05}
    with Cluster(1, 1, args=PUSH, env=ADMIN, limits=limits) as cluster:
        instance, key = cluster.p[0].instance, {"X-API-Key": "secret"}
        order["instance"] = instance
        again = cluster.post("/instances/add", order, key)
        assert (again.status, again.json()["detail"]) == (
            400,
            "Instance already exists.",
        )
        assert cluster.post(COMPLETIONS, BODY).status == 200
        assert b"engine-0" in cluster.d[0].requests[-1].body
        cluster.p[0].refuse()
        cluster.p[0].drop_connections()
        cluster.proxy.wait_state(cluster.p[0], "down")
        cluster.p[0].listen()
        back = cluster.post("/instances/add", order, key)
        if back.status == 200:  # Unless its own probe was faster.
            assert cluster.post(COMPLETIONS, BODY).status == 200
            assert b'"new"' in cluster.d[0].requests[-1].body


def arguments(sim: SimProcess, connector: str) -> list[str]:
    """The proxy's command line for simulated engines."""
    argv = ["--model", MODEL, "--kv-connector", connector]
    for each in sim.p:
        argv += ["--prefill", each.instance]
        if connector == "mooncake":
            argv.append(str(each.line["bootstrap_port"]))
    argv += ["--decode", *(each.instance for each in sim.d)]
    if connector == "nixl-push":
        ids = [str(each.stats()["engine_id"]) for each in sim.p]
        ports = [each.instance.rpartition(":")[2] for each in sim.p]
        argv += ["--prefill-engine-id", *ids, "--prefill-kv-host", "127.0.0.1"]
        argv += ["--prefill-side-channel-port", *ports]
    return argv


@pytest.mark.parametrize("connector", ["nixl-push", "mooncake"])
def test_engines_that_enforce_the_contract_are_content(connector: str) -> None:
    body = {"model": MODEL, "prompt": "hello there", "max_tokens": 5}
    with (
        SimProcess("--connector", connector, prefill=2, decode=2) as sim,
        ProxyProcess(arguments(sim, connector)) as proxy,
    ):
        direct = sim.d[0].post(body, COMPLETIONS)
        wanted = direct.json()["choices"]
        for _ in range(8):
            got = proxy.request("POST", COMPLETIONS, body)
            assert (got.status, got.json()["choices"]) == (200, wanted)
        stats = [each.stats() for each in (*sim.p, *sim.d)]
        assert [each["bad_handovers"] for each in stats] == [0, 0, 0, 0]
        assert [each["handovers"]["used"] for each in stats[:2]] == [4, 4]


@pytest.mark.parametrize("connector", ["nixl-push", "mooncake"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", MESSAGES])
def test_an_answer_that_ends_with_its_first_token_is_given(
    connector: str, path: str
) -> None:
    # Under Mooncake, P then hands nothing over and D waits for minutes, so that P is
    # told to go on; what cannot be told so (messages) is D's alone.
    said = [{"role": "user", "content": "ends <eos@0>"}]
    body = {"model": MODEL, "max_tokens": 5, "prompt": "ends <eos@0>"}
    body = body if path == COMPLETIONS else {**body, "messages": said}
    with (
        SimProcess("--connector", connector) as sim,
        ProxyProcess(arguments(sim, connector)) as proxy,
    ):
        got = proxy.request("POST", path, body)
        assert got.status == 200
        alone = connector == "mooncake" and path == MESSAGES
        assert sim.p[0].stats()["handovers"]["used"] == (0 if alone else 1)
        assert sim.d[0].stats()["bad_handovers"] == 0


def test_a_mooncake_p_that_was_restarted_is_asked_for_its_new_engine_id() -> None:
    body = {"model": MODEL, "prompt": "hello there", "max_tokens": 5}
    with (
        SimProcess("--connector", "mooncake", prefill=1, decode=1) as sim,
        ProxyProcess(
            arguments(sim, "mooncake"), limits={"PROBE_INTERVAL_UP": 0.05, "TICK": 0.02}
        ) as proxy,
    ):
        assert proxy.request("POST", COMPLETIONS, body).status == 200
        sim.p[0].kill()
        sim.p[0].restart()
        poll(
            lambda: proxy.request("POST", COMPLETIONS, body).status == 200,
            "the restarted engine serves",
        )
        assert sim.d[0].stats()["bad_handovers"] == 0


def test_a_bootstrap_server_is_left_without_idle_connections() -> None:
    limits = {"PROBE_INTERVAL_UP": 0.01, "ENGINE_IDLE_TIMEOUT": 0.05, "TICK": 0.01}
    with Cluster(connector="mooncake", limits=limits) as cluster:
        p = cluster.p[0]

        def queries() -> int:
            return sum(each.target == "/query" for each in p.probes)

        poll(lambda: queries() > 20, "the ranks were asked for many times")
        assert p.open_connections() < 10
