# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The fault matrix: every row of `fault_table.py`, made to happen.

For each cell: what the client gets, byte for byte; what each engine was asked, and
that no hand-over was delivered twice, no id used by two pairs; what /status says; that
no request is in flight and no socket is open afterwards.
"""

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import fault_table as table
import pytest
from fault_table import Cell, Kind, Leave, Outcome, Sees
from moriio_rig import Fleet
from rig import (
    COMPLETIONS,
    JSON,
    LAST_CHUNK,
    SSE_HEAD,
    Close,
    Cluster,
    End,
    EngineRequest,
    Gate,
    RawClient,
    Response,
    ScriptedEngine,
    Step,
    chunk,
    decode_answer,
    http_request,
    http_response,
    openai_error,
    poll,
    prefill_answer,
)
from wire import Pace

# Requests after which a role's rotation has come to each of two instances.
ROTATION = 4
LIMITS = {
    "TICK": 0.005,
    "CONNECT_TIMEOUT": 0.2,
    "ENGINE_IDLE_TIMEOUT": 0.02,
    "PROBE_INTERVAL_DOWN": 0.01,
    # Only requests find out what is wrong, so that each cell finds what it is for.
    "PROBE_INTERVAL_UP": 1000.0,
}


# --- Clusters, shared by the cells ----------------------------------------------------


class Bench:
    """A cluster, and the state in which each cell finds and leaves it."""

    def __init__(self, cluster: Cluster | Fleet) -> None:
        self.cluster = cluster
        self.proxy = cluster.proxy
        for each in cluster.engines:
            each.drop_connections()
        # Of the proxy itself: its listener, and what its loop needs.
        self.sockets = self._resting()
        self._settle()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within, engines fail; afterwards no request, socket or fault is left."""
        try:
            yield
            self.proxy.wait_idle()
        finally:
            # Before sockets are counted: who is down is being connected to.
            self._settle()
        poll(lambda: self.proxy.open_sockets() == self.sockets, "no socket is left")

    def _settle(self) -> None:
        for each in self.cluster.engines:
            if not each.listening:
                # Where connects are swallowed, there is a listener to be replaced.
                each.refuse()
                each.listen()
            each.health = 200
        self.proxy.wait_all_up()
        self.cluster.settle()

    def shown(self, engine: ScriptedEngine) -> JSON:
        """An engine's entry in /status."""
        instances: list[JSON] = self.proxy.status()["instances"]
        key = engine.role, engine.instance
        return next(e for e in instances if (e["role"], e["instance"]) == key)

    def _resting(self) -> int:
        """The number of open sockets, once it does not change any more."""
        seen: list[int] = []

        def same() -> bool:
            seen.append(self.proxy.open_sockets())
            return len(seen) >= 10 and len(set(seen[-10:])) == 1

        poll(same, "the number of open sockets stays the same")
        return seen[-1]

    def post(self, body: JSON) -> Response:
        """One completion on a connection of its own."""
        return self.proxy.request("POST", COMPLETIONS, body)


Benches = Callable[[str, int, str], Bench]
# Arguments and limits of the proxies for cells that need others.
KINDS: dict[str, tuple[list[str], dict[str, float]]] = {
    "usual": ([], {}),
    "hasty": (["--first-byte-timeout", "0.8"], {}),
    "keeping": ([], {"ENGINE_IDLE_TIMEOUT": 4.0}),
}


def cluster_of(connector: str, size: int, kind: str) -> Cluster | Fleet:
    """So many instances per role, and a proxy that knows how KV gets across."""
    args, scaled = KINDS[kind]
    limits = LIMITS | scaled
    name, _, mode = connector.partition(" ")
    if name == "MoRIIO":
        return Fleet(size, size, mode, args, limits | {"PING_EXPIRY": 1000.0})
    return Cluster(size, size, args=args, limits=limits, connector=name)


@pytest.fixture(scope="module")
def benches() -> Iterator[Benches]:
    """Makes a bench for a connector, of a size and a kind, once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def make(connector: str, size: int, kind: str) -> Bench:
            cluster = cluster_of(connector, size, kind)
            stack.enter_context(cluster)
            return Bench(cluster)

        yield make


# --- How an engine fails --------------------------------------------------------------

# The head of an answer that is sent in chunks.
JSON_HEAD = SSE_HEAD.replace(b"text/event-stream; charset=utf-8", b"application/json")
# Stands near the start of every whole answer and of the first event of a stream.
EARLY = b'"id"'

# Has an engine fail. It waits at the gate until the client has what there is to have:
# a reset may overtake what was sent before it.
Arm = Callable[[ScriptedEngine, Gate], None]


def healthy(request: EngineRequest) -> bytes:
    """What the engine would have answered."""
    prefill = request.engine.role == "prefill"
    steps = prefill_answer(request) if prefill else decode_answer(request)
    return b"".join(step for step in steps if isinstance(step, bytes))


def down(engine: ScriptedEngine, _: Gate) -> None:
    engine.refuse()


def refuse(engine: ScriptedEngine, _: Gate) -> None:
    engine.refuse()


def swallow(engine: ScriptedEngine, _: Gate) -> None:
    engine.swallow_connects()


def reset_early(engine: ScriptedEngine, _: Gate) -> None:
    for _request in range(ROTATION):
        engine.answer_early(Close.RST)


def reset_late(engine: ScriptedEngine, _: Gate) -> None:
    engine.default = [Close.RST]


def answers(status: int) -> Arm:
    def arm(engine: ScriptedEngine, _: Gate) -> None:
        words = openai_error(status, f"from {engine.instance}")
        engine.default = [http_response(status, words, {"Retry-After": "7"})]

    return arm


def silent(engine: ScriptedEngine, _: Gate) -> None:
    engine.default = [Gate()]


def dies_behind(mark: bytes, more: int = 0) -> Arm:
    """Resets so many bytes behind a mark in its answer."""

    def arm(engine: ScriptedEngine, gate: Gate) -> None:
        def play(request: EngineRequest) -> list[Step]:
            whole = healthy(request)
            return [whole[: whole.index(mark) + len(mark) + more], gate, Close.RST]

        engine.default = play

    return arm


def no_last_chunk(engine: ScriptedEngine, gate: Gate) -> None:
    def play(request: EngineRequest) -> list[Step]:
        whole = healthy(request)
        if not whole.endswith(LAST_CHUNK):
            whole = JSON_HEAD + chunk(whole.partition(b"\r\n\r\n")[2])
        return [whole.removesuffix(LAST_CHUNK), gate, Close.FIN]

    engine.default = play


FAULTS: dict[str, Arm] = {
    table.DOWN: down,
    table.REFUSES: refuse,
    table.SWALLOWS: swallow,
    table.RESET_EARLY: reset_early,
    table.RESET_LATE: reset_late,
    **{f"answers {status}": answers(status) for status in (400, 429, 500, 503)},
    table.SILENT: silent,
    table.DIES_IN_HEAD: dies_behind(b"\r\nContent-"),
    table.DIES_AFTER_HEAD: dies_behind(b"\r\n\r\n"),
    table.DIES_IN_BODY: dies_behind(EARLY, 5),
    table.NO_LAST_CHUNK: no_last_chunk,
}


# --- What a request has come to -------------------------------------------------------


class Legs:
    """The requests that have reached the engines since this was made."""

    def __init__(self, cluster: Cluster | Fleet) -> None:
        self._before = [(each, len(each.requests)) for each in cluster.engines]

    def of(self, role: str) -> list[EngineRequest]:
        """Those to one role."""
        return [
            request
            for engine, count in self._before
            for request in engine.requests[count:]
            if engine.role == role
        ]


OWN_ERRORS = {Sees.BAD_GATEWAY: 502, Sees.UNAVAILABLE: 503, Sees.TIMED_OUT: 504}


def judge_answer(response: Response, sees: Sees, sources: list[EngineRequest]) -> None:
    """Fails unless the client got what it should, byte for byte.

    Args:
        response: what it got.
        sees: what it should get.
        sources: the legs one of which it should have its answer from.

    """
    if sees in OWN_ERRORS:
        status = OWN_ERRORS[sees]
        assert (response.status, response.error()["code"]) == (status, status)
        waits = response.header("retry-after") is not None
        assert waits == (sees is Sees.UNAVAILABLE)
        return
    assert response.raw_body in [body_of(leg) for leg in sources]
    is_error = sees is Sees.VERBATIM
    assert (response.status >= 400) == is_error
    assert response.header("retry-after") == ("7" if is_error else None)
    is_cut = sees is Sees.CUT
    assert response.end is (End.INCOMPLETE if is_cut else End.COMPLETE)
    assert not (is_cut and response.raw_body.endswith(LAST_CHUNK))


def body_of(leg: EngineRequest) -> bytes:
    """The body that an engine has sent so far, framing included."""
    return bytes(leg.answered).partition(b"\r\n\r\n")[2]


def judge_hand_overs(prefill: list[EngineRequest], decode: list[EngineRequest]) -> None:
    """Fails if a hand-over was delivered twice, or the last one made was not.

    A leg whose body the engine did not read is not delivered.
    """
    made = [leg.handed_over() for leg in prefill if has_handed_over(leg)]
    delivered = [leg.members()["kv_transfer_params"] for leg in decode if leg.body]
    assert len(set(delivered)) == len(delivered)
    assert set(delivered) <= set(made)
    assert not delivered or max(made, key=age) in delivered


def judge_pairs(prefill: list[EngineRequest], decode: list[EngineRequest]) -> None:
    """Fails if an id names two legs of a role, or the legs of a pair have no such id.

    Of a pair both legs have arrived, or only that of the role with more of them.
    """
    p, d = ([leg.header("x-request-id") for leg in legs] for legs in (prefill, decode))
    for ids in (p, d):
        assert len(set(ids)) == len(ids)
    assert set(p) <= set(d) or set(d) <= set(p)
    transfers = {
        leg.header("x-request-id"): leg.json()["kv_transfer_params"].get("transfer_id")
        for leg in prefill
        if leg.body
    }
    for leg in decode:
        request_id = leg.header("x-request-id")
        if leg.body and request_id in transfers:
            transfer = leg.json()["kv_transfer_params"].get("transfer_id")
            assert transfer == transfers[request_id]
    named = [transfer for transfer in transfers.values() if transfer]
    assert len(set(named)) == len(named)


def has_handed_over(leg: EngineRequest) -> bool:
    """Whether a prefill engine's answer is a success, and whole."""
    length = b"\r\nContent-Length: %d\r\n" % len(body_of(leg))
    return leg.answered.startswith(b"HTTP/1.1 200 ") and length in leg.answered


def age(params: bytes) -> int:
    """The place of a hand-over in the order in which they were made."""
    number: int = json.loads(params)["remote_block_ids"][0][0]
    return number


# --- Instances that fail --------------------------------------------------------------

# One request of a trial.
Ask = Callable[[RawClient], Response]


class Trial:
    """A cell on its bench: the engines that fail, and what requests come to."""

    def __init__(self, bench: Bench, cell: Cell) -> None:
        self.bench, self.cluster = bench, bench.cluster
        self.cell, self.row = cell, cell.row
        self.kind = table.CONNECTORS[cell.connector]
        self.body = {"prompt": "a", "max_tokens": 3, "stream": cell.stream}
        self.role = self.cluster.p if cell.row.role == "prefill" else self.cluster.d
        self.failing = self.role[:1] if cell.setting == "one" else self.role
        self.before = self.failures()

    def failures(self) -> Counter[str]:
        """How often all instances have failed, by kind."""
        shown = self.bench.proxy.status()["instances"]
        return sum((Counter(each["failures"]) for each in shown), Counter())

    def is_down(self) -> bool:
        """Whether all that fail are down."""
        return all(self.bench.shown(each)["state"] == "down" for each in self.failing)

    def wait_down(self) -> None:
        """Has requests find out who is down; none of them is judged."""
        while not self.is_down():
            self.bench.post(self.body)
        self.before = self.failures()

    def meet(self, ask: Ask) -> list[EngineRequest]:
        """Asks until an engine that fails was met; returns the legs that failed.

        A request that does not meet it is served as if nothing was wrong.
        """
        for _ in range(ROTATION):
            legs = Legs(self.cluster)
            with self.cluster.connect() as client:
                response = ask(client)
                failed = [e for e in legs.of(self.row.role) if e.engine in self.failing]
                met = bool(failed) or self.is_down()
                self.judge(legs, response, self.cell.outcome if met else table.SERVED)
                judge_connection(client, response)
            if met:
                return failed
        raise AssertionError("no request met the engine that fails")

    def judge(self, legs: Legs, response: Response, outcome: Outcome) -> None:
        """Fails unless a request came to what is expected."""
        prefill, decode = legs.of("prefill"), legs.of("decode")
        assert len(prefill) in outcome.prefills
        assert len(decode) in outcome.decodes
        judge = judge_hand_overs if self.kind is Kind.HAND_OVER else judge_pairs
        judge(prefill, decode)
        role = self.row.role if outcome.sees is Sees.VERBATIM else "decode"
        judge_answer(response, outcome.sees, legs.of(role))

    def judge_status(self, attempts: int) -> None:
        """Fails unless /status says who failed, how often, and what became of it."""
        for each in self.cluster.engines:
            shown = self.bench.shown(each)
            state = self.row.state if each in self.failing else "up"
            assert shown["state"] == state
            assert bool(shown["reason"]) == (state == "down")
        counted = {self.row.counted: attempts} if self.row.counted else {}
        found = self.failures() - self.before
        if self.row.state == "down":
            # A hand-over that nobody takes is offered once more, to be released.
            assert set(found) == set(counted) and found >= Counter(counted)
        else:
            assert found == Counter(counted)


def judge_connection(client: RawClient, response: Response) -> None:
    """Fails unless the connection is in step, or closed where an answer was cut."""
    if response.end is End.COMPLETE:
        assert client.request("GET", "/status").finish().status == 200
    else:
        assert client.wait_closed() == b""


CELLS = list(table.cells())
KEPT = (table.CLOSED_BEFORE, table.CLOSED_UNDER)


@pytest.mark.parametrize("cell", [c for c in CELLS if c.row.fault in FAULTS], ids=str)
def test_an_instance_that_fails(benches: Benches, cell: Cell) -> None:
    row = cell.row
    kind = "hasty" if row.fault == table.SILENT else "usual"
    bench = benches(cell.connector, cell.size, kind)
    with bench.restored():
        trial, gate = Trial(bench, cell), Gate()
        for each in trial.failing:
            FAULTS[row.fault](each, gate)
        if row.fault == table.DOWN:
            trial.wait_down()

        def ask(client: RawClient) -> Response:
            reader = client.post(COMPLETIONS, trial.body)
            if cell.outcome.sees is Sees.CUT:
                reader.head()
                if row.fault != table.DIES_AFTER_HEAD:
                    reader.body_until(EARLY)
            gate.release()
            return reader.finish()

        failed = trial.meet(ask)
        if row.fault == table.SILENT:
            for leg in failed:
                leg.wait_abandoned()
        trial.judge_status(len(trial.failing) if row.state == "down" else len(failed))


@pytest.mark.parametrize("cell", [c for c in CELLS if c.row.fault in KEPT], ids=str)
def test_a_kept_connection_that_ends(benches: Benches, cell: Cell) -> None:
    bench = benches(cell.connector, cell.size, "keeping")
    with bench.restored():
        trial = Trial(bench, cell)
        for _ in range(ROTATION):
            assert bench.post(trial.body).status == 200
        legs = Legs(bench.cluster)
        ask = closed_before if cell.row.fault == table.CLOSED_BEFORE else closed_under
        with bench.cluster.connect() as client:
            response = ask(trial, client)
            trial.judge(legs, response, cell.outcome)
            judge_connection(client, response)
        trial.judge_status(1)
        for each in bench.cluster.engines:
            each.drop_connections()


def closed_before(trial: Trial, client: RawClient) -> Response:
    """One request after the engines of a role have closed what was kept."""
    with Pace(trial.bench.proxy) as pace:
        for each in trial.role:
            each.drop_connections()
        pace.wait()
    return client.post(COMPLETIONS, trial.body).finish()


def closed_under(trial: Trial, client: RawClient) -> Response:
    """One request whose leg is sent before the proxy can know what the kernel knows.

    The kernel reports what has happened in its order: first what has the leg sent,
    then the end of the connection.
    """
    assert client.request("GET", "/health").finish().status == 200
    if trial.row.role == "prefill" or trial.kind is Kind.SIDE_BY_SIDE:
        with trial.bench.proxy.stopped():
            reader = client.post(COMPLETIONS, trial.body)
            for each in trial.role:
                each.drop_connections()
        return reader.finish()
    gate = Gate()
    for each in trial.cluster.p:
        each.default = lambda request: [gate, *prefill_answer(request)]
    legs = Legs(trial.cluster)
    reader = client.post(COMPLETIONS, trial.body)
    [leg] = poll(lambda: legs.of("prefill"), "prefill works")
    with trial.bench.proxy.stopped():
        gate.release()
        poll(lambda: leg.answered, "prefill has answered")
        for each in trial.role:
            each.drop_connections()
    return reader.finish()


# --- Clients that leave ---------------------------------------------------------------

LEAVE = {"FIN": RawClient.close, "RST": RawClient.reset}


LEAVES = [
    pytest.param(connector, leave, stream, id=f"{connector}, {leave.phase}, {name}")
    for connector, kind in table.CONNECTORS.items()
    for leave in table.leaves(kind)
    for stream, name in table.STREAMS[kind].items()
]


@pytest.mark.parametrize("size", [1, 2], ids=["alone", "two"])
@pytest.mark.parametrize("how", LEAVE)
@pytest.mark.parametrize("connector, leave, stream", LEAVES)
def test_a_client_that_leaves(
    benches: Benches, connector: str, leave: Leave, stream: bool, how: str, size: int
) -> None:
    bench = benches(connector, size, "usual")
    with bench.restored():
        legs = Legs(bench.cluster)
        with bench.cluster.connect() as client:
            PHASES[leave.phase](bench, client, {"prompt": "a", "stream": stream})
            LEAVE[how](client)
        for role in leave.closed:
            for leg in legs.of(role):
                leg.wait_abandoned()
        bench.proxy.wait_idle()
        prefill, decode = legs.of("prefill"), legs.of("decode")
        assert (len(prefill), len(decode)) == (leave.prefills, leave.decodes)
        assert {bench.shown(e)["state"] for e in bench.cluster.p} == {"up"}


def uploading(bench: Bench, client: RawClient, body: JSON) -> None:
    with Pace(bench.proxy) as pace:
        pace.send(client, [http_request("POST", COMPLETIONS, body)[:-1]])


def prefilling(bench: Bench, client: RawClient, body: JSON) -> None:
    for each in bench.cluster.d:
        each.default = [Gate()]
    post_until(bench, client, body, bench.cluster.p)
    poll(lambda: settled_in(bench), "whoever is asked beside P has the request")


def settled_in(bench: Bench) -> bool:
    """Whether every leg that is in flight has reached its engine."""
    return all(
        bench.shown(each)["in_flight"] == len(each.requests)
        for each in bench.cluster.engines
    )


def post_until(
    bench: Bench,
    client: RawClient,
    body: JSON,
    engines: Sequence[ScriptedEngine],
) -> None:
    """Asks; returns when one of the engines, which give no answer, has the request."""
    for each in engines:
        each.default = [Gate()]
    client.post(COMPLETIONS, body)
    poll(lambda: any(each.requests for each in engines), "an engine has the request")


def connecting(bench: Bench, client: RawClient, body: JSON) -> None:
    for each in bench.cluster.d:
        each.swallow_connects()
    client.post(COMPLETIONS, body)
    poll(
        lambda: any(bench.shown(each)["in_flight"] for each in bench.cluster.d),
        "a decode instance is being connected to",
    )
    poll(lambda: any(each.requests for each in bench.cluster.p), "P has the request")


def before_head(bench: Bench, client: RawClient, body: JSON) -> None:
    post_until(bench, client, body, bench.cluster.d)


def in_answer(bench: Bench, client: RawClient, body: JSON) -> None:
    def play(request: EngineRequest) -> list[Step]:
        whole = healthy(request)
        return [whole[: whole.index(EARLY) + 9], Gate()]

    for each in bench.cluster.d:
        each.default = play
    client.post(COMPLETIONS, body).body_until(EARLY)


PHASES: dict[str, Callable[[Bench, RawClient, JSON], None]] = {
    table.UPLOADING: uploading,
    table.PREFILLING: prefilling,
    table.CONNECTING: connecting,
    table.BEFORE_HEAD: before_head,
    table.IN_ANSWER: in_answer,
}
