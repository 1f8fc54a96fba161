# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""/metrics: read by Prometheus' own parser, exact after a known set of requests."""

import contextlib
import json
from typing import NamedTuple

import pytest
from moriio_rig import Fleet
from prometheus_client.parser import text_string_to_metric_families
from rig import (
    CHAT,
    COMPLETIONS,
    DONE,
    JSON,
    LAST_CHUNK,
    SSE_HEAD,
    Close,
    Cluster,
    End,
    Gate,
    ProxyProcess,
    Step,
    chunk,
    event,
    http_response,
    openai_error,
    poll,
)

import disagg_proxy

BODY: JSON = {"prompt": "a", "messages": []}
STREAM: JSON = BODY | {"stream": True}
ADMIN = {"ADMIN_API_KEY": "secret"}
WITH_KEY = {"X-API-Key": "secret"}
QUICK = {"TICK": 0.02, "PROBE_INTERVAL_DOWN": 0.03, "PROBE_INTERVAL_UP": 1000.0}

# A sample's name without `pd_proxy_`, then its labels' values in the order of FAMILIES.
Key = tuple[str, ...]
Samples = dict[Key, float]
LABELS = {each.name: each.labels.split() for each in disagg_proxy.FAMILIES}


def read(text: str) -> Samples:
    """All samples of an exposition but those of buckets."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                names = LABELS[family.name.removeprefix("pd_proxy_")]
                assert sorted(sample.labels) == sorted(names)
                values = (sample.labels[name] for name in names)
                key = (sample.name.removeprefix("pd_proxy_"), *values)
                assert key not in samples
                samples[key] = sample.value
    return samples


def scrape(proxy: ProxyProcess) -> Samples:
    """What /metrics says now."""
    response = proxy.request("GET", "/metrics")
    assert response.status == 200
    assert (response.header("Content-Type") or "").startswith("text/plain; version=")
    return read(response.body.decode())


# What a scrape adds to.
OF_SCRAPES = (
    ("requests_total", "/metrics", "own", "200"),
    ("request_duration_seconds_count", "own"),
    ("client_connections_accepted_total",),
)


class Since:
    """What was counted since it was made; its own scrapes are left out."""

    def __init__(self, proxy: ProxyProcess) -> None:
        self.proxy = proxy
        self.before = scrape(proxy)
        self.scrapes = 0

    def counted(self) -> Samples:
        """Counters that have moved, by how much; the sums of histograms left out."""
        self.scrapes += 1
        moved: Samples = {}
        for key, value in scrape(self.proxy).items():
            more = value - self.before.get(key, 0)
            if key in OF_SCRAPES:
                more -= self.scrapes
            if more and key[0].endswith(("_total", "_count")):
                moved[key] = more
        return moved

    def named(self, *names: str) -> Samples:
        """Those of some families."""
        return {k: v for k, v in self.counted().items() if k[0] in names}


REQUESTS = "requests_total"


def served(path: str, mode: str, status: str) -> Key:
    """The key of requests that are over."""
    return REQUESTS, path, mode, status


# --- The exposition -------------------------------------------------------------------


def test_every_family_has_help_type_and_a_name_in_the_usual_style(
    pair: Cluster,
) -> None:
    for body in (BODY, STREAM, BODY | {"n": 2}):
        pair.post(COMPLETIONS, body)
    text = pair.get("/metrics").body.decode()
    families = {each.name: each for each in text_string_to_metric_families(text)}
    declared = {f"pd_proxy_{each.name}": each for each in disagg_proxy.FAMILIES}
    assert set(families) == set(declared)
    for name, family in declared.items():
        assert families[name].type == family.kind
        assert families[name].documentation == family.help
        in_text = f"{name}_total" if family.kind == "counter" else name
        assert text.count(f"# HELP {in_text} ") == 1
        assert text.count(f"# TYPE {in_text} {family.kind}\n") == 1
        assert name.endswith("_seconds") == (family.kind == "histogram")
        assert not name.endswith("_total")


def test_buckets_add_up(pair: Cluster) -> None:
    for _ in range(3):
        pair.post(COMPLETIONS, BODY)
    text = pair.get("/metrics").body.decode()
    histograms = 0
    for family in text_string_to_metric_families(text):
        series: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        counts: dict[tuple[str, ...], float] = {}
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "le"}
            key = tuple(labels.values())
            if sample.name.endswith("_bucket"):
                bucket = (float(sample.labels["le"]), sample.value)
                series.setdefault(key, []).append(bucket)
            elif sample.name.endswith("_count"):
                counts[key] = sample.value
        for key, buckets in series.items():
            histograms += 1
            assert buckets == sorted(buckets)
            assert [value for _, value in buckets] == sorted(v for _, v in buckets)
            assert buckets[-1] == (float("inf"), counts[key])
    assert histograms == 9


def test_a_time_falls_into_its_bucket() -> None:
    times = disagg_proxy.Times()
    bounds = disagg_proxy.BOUNDS
    assert list(bounds) == sorted(bounds)
    for bound in bounds:
        times.new += [bound, bound * 1.0001]
        times.fold()
    times.new.append(-1.0)  # A leg that did not wait for the other has no hand-over.
    *counts, total = times.fold()
    # A bucket's bound is part of it.
    assert counts == [1, *[2] * (len(bounds) - 1), 1]
    assert total == pytest.approx(sum(bounds) * 2.0001)


def test_snapshots_are_json_and_add_up(pair: Cluster) -> None:
    pair.post(COMPLETIONS, BODY)
    one: disagg_proxy.Snapshot = {
        "requests": {"/health own 200": [2], "other own 404": [1]},
        "client_connections": {"": [3]},
        "prefill_duration_seconds": {"": [1.0] * (len(disagg_proxy.BOUNDS) + 2)},
    }
    two: disagg_proxy.Snapshot = {
        "requests": {"/health own 200": [5]},
        "retries": {"decode": [1]},
        "prefill_duration_seconds": {"": [0.5] * (len(disagg_proxy.BOUNDS) + 2)},
    }
    parts = [json.loads(json.dumps(each)) for each in (one, two, {})]
    text, _ = disagg_proxy.render(disagg_proxy.add_up(parts))
    total = read(text.decode())
    assert total == {
        served("/health", "own", "200"): 7,
        served("other", "own", "404"): 1,
        ("client_connections",): 3,
        ("retries_total", "decode"): 1,
        ("prefill_duration_seconds_count",): 1.5 * (len(disagg_proxy.BOUNDS) + 1),
        ("prefill_duration_seconds_sum",): 1.5,
    }
    assert parts == [one, two, {}]


def test_a_client_cannot_make_series(pair: Cluster) -> None:
    known = set(scrape(pair.proxy))
    since = Since(pair.proxy)
    for number in range(20):
        pair.get(f"/path-{number}")
        pair.get(f"/v1/models?query={number}")
        pair.post(f"/v1/responses/{number}/cancel", b"{}")
        with pair.connect() as client:
            client.send(b"METHOD%d /x HTTP/1.1\r\nHost: h\r\n\r\n" % number)
            client.reader().finish()
    counted = since.named(REQUESTS)
    assert sum(counted.values()) == 80
    assert len(counted) == 4
    assert counted[served("/v1/responses/{id}", "single_leg", "200")] == 20
    labels = {each[1] for each in {*known, *counted} if each[0] == REQUESTS}
    assert labels <= {*disagg_proxy.KNOWN_PATHS, "other"}


def test_moriio_has_them_too() -> None:
    with Fleet(mode="READ") as fleet:
        since = Since(fleet.proxy)
        for _ in range(3):
            assert fleet.post(BODY).status == 200
        counted = since.counted()
        assert counted[served(COMPLETIONS, "disaggregated", "200")] == 3
        assert counted["instance_requests_total", "prefill", fleet.p[0].instance] == 3
        assert counted["hand_over_duration_seconds_count",] == 3


# --- Requests -------------------------------------------------------------------------


def test_requests_are_counted_by_endpoint_mode_and_status(pair: Cluster) -> None:
    since = Since(pair.proxy)
    for _ in range(3):
        assert pair.post(COMPLETIONS, BODY).status == 200
    assert pair.post(CHAT, STREAM).status == 200
    assert pair.post(COMPLETIONS + "?a=b", BODY | {"n": 2}).status == 200
    assert pair.post("/v1/%63ompletions", BODY | {"prompt": ["a", "b"]}).status == 200
    assert pair.get("/v1/models").status == 200
    assert pair.get("/no/such/path").status == 200
    assert pair.get("/health").status == 200
    assert pair.get(COMPLETIONS).status == 405
    assert pair.post(COMPLETIONS, b"{").status == 400
    assert pair.post("/sleep", b"{}").status == 403
    with pair.connect() as client:
        client.send(b"GET / HTTP/1.1\r\n\r\n")
        assert client.reader().finish().status == 400
    instances = pair.p[0].instance, pair.d[0].instance
    counted = since.counted()
    assert {k: v for k, v in counted.items() if k[0] not in RELAYED} == {
        served(COMPLETIONS, "disaggregated", "200"): 3,
        served(CHAT, "disaggregated", "200"): 1,
        served(COMPLETIONS, "bypass", "200"): 2,
        served("/v1/models", "single_leg", "200"): 1,
        served("other", "single_leg", "200"): 1,
        served("/health", "own", "200"): 1,
        served(COMPLETIONS, "own", "405"): 1,
        served(COMPLETIONS, "own", "400"): 1,
        served("other", "own", "403"): 1,
        served("other", "own", "400"): 1,
        ("bypassed_requests_total", "n"): 1,
        ("bypassed_requests_total", "prompt_list"): 1,
        ("client_connections_accepted_total",): 13,
        ("request_duration_seconds_count", "own"): 4,
        ("request_duration_seconds_count", "disaggregated"): 4,
        ("request_duration_seconds_count", "bypass"): 2,
        ("request_duration_seconds_count", "single_leg"): 2,
        ("prefill_duration_seconds_count",): 4,
        ("hand_over_duration_seconds_count",): 4,
        ("decode_first_byte_seconds_count", "disaggregated"): 4,
        ("decode_first_byte_seconds_count", "bypass"): 2,
        ("decode_first_byte_seconds_count", "single_leg"): 2,
        ("instance_requests_total", "prefill", instances[0]): 4,
        ("instance_requests_total", "decode", instances[1]): 8,
    }


RELAYED = ("instance_relayed_bytes_total", "instance_relayed_pieces_total")


def test_bytes_and_pieces_are_those_that_clients_got(pair: Cluster) -> None:
    decode = pair.d[0]
    chunks = [chunk(event(f"{n}")) for n in range(5)]
    gates = [Gate() for _ in chunks]
    steps: list[Step] = [SSE_HEAD]
    for gate, each in zip(gates, chunks):
        steps += [gate, each]
    decode.answer(*steps, LAST_CHUNK)
    since = Since(pair.proxy)
    got = b"".join(chunks) + LAST_CHUNK
    with pair.connect() as client:
        reader = client.post(COMPLETIONS, STREAM)
        for number, gate in enumerate(gates):
            gate.release()
            reader.body_until(event(f"{number}"))
            if number == 2:
                # A stream is counted as it goes.
                so_far = since.named("instance_relayed_pieces_total")
                assert so_far == {
                    ("instance_relayed_pieces_total", "decode", decode.instance): 3
                }
        assert reader.finish().raw_body == got
    counted = since.counted()
    assert counted["instance_relayed_bytes_total", "decode", decode.instance] == len(
        got
    )
    # The last chunk may come with the last event, or after it.
    pieces = counted["instance_relayed_pieces_total", "decode", decode.instance]
    assert pieces in (5, 6)
    assert (
        "instance_relayed_bytes_total",
        "prefill",
        pair.p[0].instance,
    ) not in counted


def test_what_runs_and_what_is_connected_shows_as_gauges(pair: Cluster) -> None:
    p, d = pair.p[0].instance, pair.d[0].instance
    in_prefill, in_decode = Gate(), Gate()
    pair.p[0].answer(in_prefill, http_response(200, {"kv_transfer_params": None}))
    pair.d[0].answer(SSE_HEAD, chunk(event("1")), in_decode, LAST_CHUNK)
    with pair.connect() as one, pair.connect() as two:
        first = one.post(COMPLETIONS, STREAM)
        pair.p[0].next_request()
        second = two.post("/v1/models/x", BODY)
        second.body_until(b"1")
        now = scrape(pair.proxy)
        assert now["requests_in_flight",] == 3  # The scrape is one.
        assert now["client_connections",] == 3
        for role, instance in (("prefill", p), ("decode", d)):
            assert now["instance_requests_in_flight", role, instance] == 1
            assert now["instance_connections", role, instance, "busy"] == 1
        in_prefill.release()
        in_decode.release()
        assert first.finish().status == second.finish().status == 200
    pair.proxy.wait_idle()
    now = scrape(pair.proxy)
    assert now["requests_in_flight",] == now["client_connections",] == 1
    for role, instance, idle in (("prefill", p, 1), ("decode", d, 2)):
        assert now["instance_requests_in_flight", role, instance] == 0
        assert now["instance_connections", role, instance, "busy"] == 0
        assert 1 <= now["instance_connections", role, instance, "idle"] <= idle


def test_what_waits_in_the_kernel_shows_as_a_gauge(pair: Cluster) -> None:
    with pair.connect() as client, contextlib.ExitStack() as waiting:
        text = client.request("GET", "/metrics").finish().body.decode()
        assert read(text)["accept_queue_connections",] == 0
        with pair.proxy.stopped():
            # Is read before the others are taken: the kernel tells in its order.
            reader = client.request("GET", "/metrics")
            for _ in range(5):
                waiting.enter_context(pair.connect())
        text = reader.finish().body.decode()
    assert read(text)["accept_queue_connections",] == 5


def test_an_engine_that_both_legs_reach_at_once_has_no_hand_over_time() -> None:
    with Cluster(connector="nixl-push") as cluster:
        since = Since(cluster.proxy)
        for body in (BODY, STREAM):
            assert cluster.post(COMPLETIONS, body).status == 200
        counted = since.counted()
        assert counted[served(COMPLETIONS, "disaggregated", "200")] == 2
        assert counted["prefill_duration_seconds_count",] == 2
        assert ("hand_over_duration_seconds_count",) not in counted


# --- Failures -------------------------------------------------------------------------

FAILURES = ("retries_total", "failovers_total", "instance_failures_total")


class Fault(NamedTuple):
    """What one instance of two does, and what is counted besides its failure."""

    role: str
    steps: list[Step]
    kind: str
    again: str


BUSY: list[Step] = [http_response(503, openai_error(503, "busy"))]
FAULTS = [
    Fault("prefill", [Close.RST], "reset", "retries_total"),
    Fault("prefill", BUSY, "5xx", "retries_total"),
    Fault("decode", [Close.RST], "reset", "retries_total"),
    Fault("decode", BUSY, "5xx", "retries_total"),
    Fault("prefill", [], "refused", "failovers_total"),
    Fault("decode", [], "refused", "failovers_total"),
]


@pytest.mark.parametrize("connector", ["auto", "nixl-push"])
def test_what_is_tried_again_is_counted(connector: str) -> None:
    with Cluster(2, 2, limits=QUICK, connector=connector) as cluster:
        for fault in FAULTS:
            since = Since(cluster.proxy)
            faulty = (cluster.p if fault.role == "prefill" else cluster.d)[0]
            if fault.steps:
                faulty.answer(*fault.steps)
            else:
                faulty.refuse()
            for _ in range(2):
                assert cluster.post(COMPLETIONS, BODY).status == 200
            assert since.named(REQUESTS, *FAILURES) == {
                served(COMPLETIONS, "disaggregated", "200"): 2,
                (fault.again, fault.role): 1,
                ("instance_failures_total", fault.role, faulty.instance, fault.kind): 1,
            }, fault
            if not fault.steps:
                faulty.listen()
                cluster.proxy.wait_state(faulty, "up")


def test_what_cannot_be_tried_again_is_counted() -> None:
    faults: list[tuple[Step, str, str]] = [
        (b"no HTTP at all\r\n\r\n", "malformed", "502"),
        (Gate(), "timeout", "504"),
        (Close.RST, "reset", "502"),
        (BUSY[0], "5xx", "503"),
    ]
    args = ["--first-byte-timeout", "0.3"]
    with Cluster(args=args, limits=QUICK) as cluster:
        for step, kind, status in faults:
            since = Since(cluster.proxy)
            cluster.d[0].answer(step)
            assert cluster.post(COMPLETIONS, BODY).status == int(status)
            assert since.named(REQUESTS, *FAILURES) == {
                served(COMPLETIONS, "disaggregated", status): 1,
                ("instance_failures_total", "decode", cluster.d[0].instance, kind): 1,
            }


def test_a_stream_that_begins_with_an_error_is_counted(pair: Cluster) -> None:
    since = Since(pair.proxy)
    error = chunk(event(openai_error(500, "no memory")))
    pair.d[0].answer(SSE_HEAD, error, chunk(DONE), LAST_CHUNK)
    pair.d[0].answer(SSE_HEAD, chunk(event("x" * 40)), error, chunk(DONE), LAST_CHUNK)
    for _ in range(2):
        assert pair.post(COMPLETIONS, STREAM).status == 200
    assert since.named(*FAILURES) == {
        ("instance_failures_total", "decode", pair.d[0].instance, "stream_error"): 1
    }


LOST = ("aborted_requests_total", "cut_answers_total")


@pytest.mark.parametrize("status", ["none", "200"])
def test_a_client_that_leaves_is_counted(pair: Cluster, status: str) -> None:
    since = Since(pair.proxy)
    begun: list[Step] = [SSE_HEAD, chunk(event("1"))] if status == "200" else []
    pair.d[0].answer(*begun, Gate())
    with pair.connect() as client:
        reader = client.post(COMPLETIONS, STREAM)
        pair.d[0].next_request()
        if begun:
            reader.body_until(b"1")
    pair.d[0].requests[-1].wait_abandoned()
    assert since.named(REQUESTS, *LOST, "request_duration_seconds_count") == {
        served(COMPLETIONS, "disaggregated", status): 1,
        ("aborted_requests_total",): 1,
    }


def test_an_answer_that_is_cut_is_counted(pair: Cluster) -> None:
    since = Since(pair.proxy)
    pair.d[0].answer(SSE_HEAD, chunk(event("1")), Close.RST)
    assert pair.post(COMPLETIONS, STREAM).end is End.INCOMPLETE
    assert since.named(
        REQUESTS, *LOST, *FAILURES, "request_duration_seconds_count"
    ) == {
        served(COMPLETIONS, "disaggregated", "200"): 1,
        ("cut_answers_total",): 1,
        ("instance_failures_total", "decode", pair.d[0].instance, "reset"): 1,
    }


# --- Instances ------------------------------------------------------------------------


def states(samples: Samples, role: str, instance: str) -> list[str]:
    """The states an instance is in: one, unless several processes disagree."""
    keys = (("instance_state", role, instance, each) for each in disagg_proxy.State)
    return [key[3] for key in keys if samples[key]]


def test_states_and_transitions_of_instances() -> None:
    with Cluster(2, 2, limits=QUICK, env=ADMIN) as cluster:
        decode, proxy = cluster.d[0], cluster.proxy
        key = ("instance_transitions_total", "decode", decode.instance)
        assert states(scrape(proxy), "decode", decode.instance) == ["up"]
        since = Since(proxy)
        decode.refuse()
        for _ in cluster.d:
            cluster.post(COMPLETIONS, BODY)
        assert states(scrape(proxy), "decode", decode.instance) == ["down"]
        decode.listen()
        proxy.wait_state(decode, "up")
        moved = since.named("instance_transitions_total")
        assert moved == {(*key, "down"): 1, (*key, "up"): 1}
        gate = Gate()
        decode.default = cluster.d[1].default = [gate, http_response(200, {})]
        with cluster.connect() as one, cluster.connect() as two:
            readers = [each.post(COMPLETIONS, BODY) for each in (one, two)]
            decode.next_request()
            order = {"type": "decode", "instance": decode.instance}
            assert cluster.post("/instances/remove", order, WITH_KEY).status == 200
            assert states(scrape(proxy), "decode", decode.instance) == ["draining"]
            gate.release()
            assert {each.finish().status for each in readers} == {200}
        # An instance that has left takes its series along.
        poll(
            lambda: (*key, "up") not in scrape(proxy),
            "the instance is gone",
        )
        proxy.wait_log(f"decode {decode.instance} has left")
