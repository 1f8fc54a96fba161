# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`--workers`: several processes on one port that look like one.

Which worker has a connection is read from /proc, as /status does not say. A worker's
own view shows in whom it sends requests to and in its /health; where a change is to
come from another worker, the probes of its own are out of the way (`NO_PROBES`).
"""

import contextlib
import functools
import os
import signal
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from moriio_rig import Fleet
from prometheus_client.parser import text_string_to_metric_families
from rig import (
    CHAT,
    COMPLETIONS,
    DONE,
    LAST_CHUNK,
    MODEL,
    SSE_HEAD,
    Cluster,
    End,
    EngineRequest,
    Gate,
    ProxyProcess,
    RawClient,
    ResponseReader,
    ScriptedEngine,
    Step,
    chunk,
    event,
    gather,
    http_response,
    openai_error,
    poll,
    run_to_exit,
)
from sim_process import SimProcess
from test_pairs import arguments
from test_python_api import PREAMBLE
from tls import Tls

ADMIN = {"ADMIN_API_KEY": "secret"}
KEY = {"X-API-Key": "secret"}
BODY = b'{"model":"m","prompt":"hi","max_tokens":4}'
STREAM = BODY[:-1] + b',"stream":true}'
TWO = ["--workers", "2"]
NO_PROBES = {"PROBE_INTERVAL_UP": 1000, "PROBE_INTERVAL_DOWN": 1000}
SPEEDY = {"RESTART_INTERVAL": 0.01}


def worker_pids(proxy: ProxyProcess) -> list[int]:
    """The processes that the proxy's first process has made."""
    listed = Path(f"/proc/{proxy.pid}/task/{proxy.pid}/children").read_text()
    return [int(pid) for pid in listed.split()]


def worker_of(proxy: ProxyProcess, client: RawClient) -> int | None:
    """The process that holds the other end of a connection; None in the kernel."""
    port = f":{client.socket.getsockname()[1]:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    inodes = {f"socket:[{each[9]}]" for each in lines if each[2].endswith(port)}
    for pid in worker_pids(proxy):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/{pid}/fd/{name}") in inodes:
                    return pid
    return None


# The connections of a test.
_clients: list[RawClient] = []


@pytest.fixture(autouse=True)
def _connections_end() -> Iterator[None]:
    yield
    while _clients:
        _clients.pop().close()


def connect(proxy: ProxyProcess) -> tuple[RawClient, int]:
    """A new connection and the worker that has accepted it."""
    client = proxy.connect()
    _clients.append(client)
    client.request("GET", "/health").finish()
    pid = worker_of(proxy, client)
    assert pid is not None
    return client, pid


def one_each(proxy: ProxyProcess, count: int = 2) -> dict[int, RawClient]:
    """A connection to each worker, by its process."""
    clients: dict[int, RawClient] = {}

    def all_there() -> bool:
        client, pid = connect(proxy)
        clients.setdefault(pid, client)
        return len(clients) == count

    poll(all_there, f"{count} workers answer")
    return clients


def wait_health(clients: dict[int, RawClient], status: int) -> None:
    """Returns once every worker's own /health has that status."""

    def same() -> bool:
        answers = [c.request("GET", "/health").finish() for c in clients.values()]
        return {answer.status for answer in answers} == {status}

    poll(same, f"every worker answers /health with {status}")


def wait_ended(pids: Iterable[int]) -> None:
    """Returns once these processes are over, whoever is to take note of it."""

    def runs(pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"

    poll(lambda: not any(runs(pid) for pid in pids), "the processes have ended")


def order(engine: ScriptedEngine, **settings: object) -> dict[str, object]:
    """The body that adds or removes an engine."""
    return {"type": engine.role, "instance": engine.instance, **settings}


def served_by(
    client: RawClient, engines: Sequence[ScriptedEngine], rounds: int
) -> set[int]:
    """Ports of the engines that serve so many requests of a connection."""
    before = [len(each.requests) for each in engines]
    for _ in range(rounds):
        assert client.post(COMPLETIONS, BODY).finish().status == 200
    return {
        engine.port
        for engine, count in zip(engines, before)
        if len(engine.requests) > count
    }


def uses(
    client: RawClient, engines: Sequence[ScriptedEngine], new: ScriptedEngine, yes: bool
) -> bool:
    """Whether, or whether not, a connection's requests go to an engine too."""
    return (new.port in served_by(client, engines, 3)) is yes


@pytest.fixture(scope="module")
def _shared() -> Iterator[Cluster]:
    with Cluster(2, 2, args=TWO, env=ADMIN, limits=NO_PROBES) as cluster:
        yield cluster


@pytest.fixture
def cluster(_shared: Cluster) -> Iterator[Cluster]:
    """2P2D and two workers that do not probe of themselves, shared by the module."""
    yield _shared
    _shared.settle()


# --- One view -------------------------------------------------------------------------


def test_b48_status_is_the_same_whoever_answers() -> None:
    four = ["--workers", "4"]
    with (
        ScriptedEngine("decode") as new,
        Cluster(1, 1, args=four, env=ADMIN, limits=NO_PROBES) as cluster,
    ):
        assert cluster.post("/instances/add", order(new), KEY).status == 200
        cluster.proxy.wait_state(new, "up")
        answers = {cluster.get("/status").body for _ in range(100)}
        assert len(answers) == 1
        assert new.instance.encode() in answers.pop()


def test_b48_an_instance_that_one_worker_adds_and_removes_is_so_for_all(
    cluster: Cluster,
) -> None:
    clients = one_each(cluster.proxy)
    first, *_ = clients.values()
    with ScriptedEngine("decode") as new:
        engines = [*cluster.d, new]
        added = first.post("/instances/add", order(new), KEY).finish()
        assert added.status == 200
        for client in clients.values():
            poll(
                functools.partial(uses, client, engines, new, True),
                "a worker sends requests to the new instance",
            )
        assert cluster.get("/status").json()["decode_nodes"] == [
            each.instance for each in engines
        ]
        assert first.post("/instances/remove", order(new), KEY).finish().status == 200
        for client in clients.values():
            poll(
                functools.partial(uses, client, engines, new, False),
                "a worker sends no request to the removed instance",
            )
    assert len(cluster.get("/status").json()["instances"]) == 4


def test_a_removed_instance_finishes_what_any_worker_has_there(
    cluster: Cluster,
) -> None:
    clients = one_each(cluster.proxy)
    first, second = clients.values()
    gate = Gate()
    for each in cluster.d:
        each.default = [gate, http_response(200, {"by": "it"})]
    reader = second.post(COMPLETIONS, BODY)
    busy = poll(
        lambda: next((each for each in cluster.d if each.requests), None),
        "a decode instance has the request",
    )
    assert first.post("/instances/remove", order(busy), KEY).finish().status == 200
    cluster.proxy.wait_state(busy, "draining")
    counts = {
        e["instance"]: e["in_flight"] for e in cluster.proxy.status()["instances"]
    }
    assert counts[busy.instance] == 1
    gate.release()
    assert reader.finish().json() == {"by": "it"}
    poll(
        lambda: busy.instance not in cluster.proxy.status()["decode_nodes"],
        "it has left",
    )
    assert second.post("/instances/add", order(busy), KEY).finish().status == 200
    cluster.proxy.wait_state(busy, "up")


def test_a_failure_that_one_worker_sees_takes_an_instance_out_for_all(
    cluster: Cluster,
) -> None:
    clients = one_each(cluster.proxy)
    first, second = clients.values()
    for each in cluster.d:
        each.refuse()
    assert first.post(COMPLETIONS, BODY).finish().status == 502
    wait_health(clients, 503)
    assert second.post(COMPLETIONS, BODY).finish().status == 503
    assert set(cluster.proxy.states().values()) == {"up", "down"}
    for each in cluster.d:
        each.listen()
        assert second.post("/instances/add", order(each), KEY).finish().status == 200
    wait_health(clients, 200)


def test_a_new_worker_has_the_view_of_the_others() -> None:
    with (
        ScriptedEngine("decode") as new,
        Cluster(1, 2, args=TWO, env=ADMIN, limits=NO_PROBES | SPEEDY) as cluster,
    ):
        gone, stays = cluster.d
        assert cluster.post("/instances/add", order(new), KEY).status == 200
        assert cluster.post("/instances/remove", order(gone), KEY).status == 200
        nodes = [stays.instance, new.instance]
        poll(lambda: cluster.proxy.status()["decode_nodes"] == nodes, "all know")
        for pid in worker_pids(cluster.proxy):
            successor_of(cluster.proxy, pid)
        clients = one_each(cluster.proxy)
        assert cluster.proxy.status()["decode_nodes"] == nodes
        for client in clients.values():
            used = served_by(client, [gone, stays, new], 4)
            assert used == {stays.port, new.port}


def test_settings_of_an_instance_go_with_it() -> None:
    push = ["--kv-connector", "nixl-push", "--prefill-engine-id", "engine-0"]
    push += ["--prefill-kv-host", "127.0.0.1", *TWO]
    own = {"engine_id": "engine-new", "kv_host": "127.0.0.9"}
    with (
        ScriptedEngine("prefill") as new,
        Cluster(1, 1, args=push, env=ADMIN, limits=NO_PROBES) as cluster,
    ):
        assert cluster.post("/instances/add", order(new, **own), KEY).status == 200
        assert cluster.post("/instances/remove", order(cluster.p[0]), KEY).status == 200
        clients = one_each(cluster.proxy)
        for client in clients.values():
            poll(
                functools.partial(uses, client, [new], new, True),
                "the worker uses the new instance alone",
            )
            assert b'"engine-new"' in cluster.d[0].requests[-1].body


def test_what_one_worker_has_learnt_serves_all() -> None:
    body = {"model": MODEL, "prompt": "hello there", "max_tokens": 5}
    with SimProcess("--connector", "mooncake", prefill=1, decode=1) as sim:
        argv = [*arguments(sim, "mooncake"), *TWO]
        with ProxyProcess(argv, limits=NO_PROBES | SPEEDY) as proxy:
            successor_of(proxy, worker_pids(proxy)[1])
            clients = one_each(proxy)
            for client in clients.values():
                assert client.post(COMPLETIONS, body).finish().status == 200
            assert sim.d[0].stats()["bad_handovers"] == 0


def test_counts_are_those_of_all_workers(cluster: Cluster) -> None:
    clients = one_each(cluster.proxy)
    gate = Gate()
    for each in cluster.d:
        each.default = [SSE_HEAD, gate, chunk(DONE), LAST_CHUNK]
    readers = [client.post(COMPLETIONS, STREAM) for client in clients.values()]
    for reader in readers:
        assert reader.head().status == 200
    for each in cluster.d:
        each.default = [http_response(500, {"error": {"message": "no"}})]
    instances = [
        each for each in cluster.proxy.status()["instances"] if each["role"] == "decode"
    ]
    assert sum(each["in_flight"] for each in instances) == 2
    before = sum(each["failures"].get("5xx", 0) for each in instances)
    gate.release()
    for client, reader in zip(clients.values(), readers):
        reader.finish()
        assert client.post(CHAT, BODY).finish().status == 500
    instances = cluster.proxy.status()["instances"]
    after = sum(each["failures"].get("5xx", 0) for each in instances)
    # Each of the two requests was tried on both instances.
    assert after - before == 4


def figures(client: RawClient) -> dict[tuple[str, ...], float]:
    """What /metrics says of completions, and how many times were taken."""
    text = client.request("GET", "/metrics").finish().body.decode()
    return {
        (each.name, *sorted(each.labels.values())): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if COMPLETIONS in each.labels.values() or each.labels.get("le") == "+Inf"
        # Of the proxy's own answers this is one itself.
        if each.labels.get("mode") != "own"
    }


def test_metrics_are_those_of_all_workers(cluster: Cluster) -> None:
    clients = one_each(cluster.proxy)
    first, second = clients.values()

    before = figures(first)
    for client, number in ((first, 3), (second, 4)):
        for _ in range(number):
            assert client.post(COMPLETIONS, BODY).finish().status == 200
    after = figures(second)
    assert after == figures(first)
    bucket = "pd_proxy_{}_seconds_bucket".format
    assert {
        name: number - before.get(name, 0)
        for name, number in after.items()
        if number != before.get(name, 0)
    } == {
        ("pd_proxy_requests_total", COMPLETIONS, "200", "disaggregated"): 7,
        (bucket("request_duration"), "+Inf", "disaggregated"): 7,
        (bucket("decode_first_byte"), "+Inf", "disaggregated"): 7,
        (bucket("prefill_duration"), "+Inf"): 7,
        (bucket("hand_over_duration"), "+Inf"): 7,
    }


def test_what_was_counted_outlives_its_worker() -> None:
    with Cluster(1, 1, args=TWO, limits=SPEEDY) as cluster:
        for client in one_each(cluster.proxy).values():
            assert client.post(COMPLETIONS, BODY).finish().status == 200
            before = figures(client)
        assert max(before.values()) == 2
        for pid in worker_pids(cluster.proxy):
            successor_of(cluster.proxy, pid)
        client, _ = connect(cluster.proxy)
        assert figures(client) == before
        assert client.post(COMPLETIONS, BODY).finish().status == 200
        assert max(figures(client).values()) == 3


def test_a_worker_that_hangs_is_left_out() -> None:
    with Cluster(1, 1, args=TWO, limits={"ASK_TIMEOUT": 0.1}) as cluster:
        clients = one_each(cluster.proxy)
        (hangs, _), (_, client) = clients.items()
        os.kill(hangs, signal.SIGSTOP)
        try:
            for target in ("/status", "/metrics"):
                answer = client.request("GET", target).finish()
                assert answer.status == 200
                assert cluster.d[0].instance.encode() in answer.body
        finally:
            os.kill(hangs, signal.SIGCONT)


def test_a_worker_that_hangs_for_long_is_replaced() -> None:
    limits = SPEEDY | {"PING_INTERVAL": 0.05}
    with Cluster(1, 1, args=TWO, limits=limits) as cluster:
        clients = one_each(cluster.proxy)
        (hangs, _), (lives, client) = clients.items()
        os.kill(hangs, signal.SIGSTOP)

        def replaced() -> bool:
            pids = worker_pids(cluster.proxy)
            return hangs not in pids and lives in pids and len(pids) == 2

        poll(replaced, "another takes its place")
        assert client.post(COMPLETIONS, BODY).finish().status == 200
        assert lives in one_each(cluster.proxy)
    assert [line for line in cluster.proxy.log if "hangs" in line]


def test_workers_tell_each_other_nothing_per_request() -> None:
    limits = NO_PROBES | {"PING_INTERVAL": 1000.0}
    with Cluster(args=TWO, limits=limits) as cluster:
        clients = one_each(cluster.proxy)
        cluster.get("/status")
        before = cluster.proxy.sleeps()
        for client in clients.values():
            served_by(client, cluster.d, 25)
            assert client.post(COMPLETIONS, STREAM).finish().end is End.COMPLETE
        # All that is told goes through the first process.
        assert cluster.proxy.sleeps() == before
        cluster.get("/status")
        assert cluster.proxy.sleeps() > before


def test_a_response_is_found_through_any_worker(cluster: Cluster) -> None:
    def answer(request: EngineRequest) -> list[Step]:
        if request.line.startswith(b"POST") or request.engine is holder:
            return [http_response(200, {"id": "resp_1", "by": request.engine.port})]
        return [http_response(404, openai_error(404, "no such response"))]

    holder: ScriptedEngine | None = None
    first, second = one_each(cluster.proxy).values()
    for each in cluster.d:
        each.default = answer
    made = first.post("/v1/responses", {"input": "hi"}).finish()
    holder = next(each for each in cluster.d if each.requests)
    for client in (first, second, second):
        found = client.request("GET", "/v1/responses/resp_1").finish()
        assert (found.status, found.body) == (200, made.body)


def test_no_two_workers_make_the_same_request_ids(cluster: Cluster) -> None:
    clients = one_each(cluster.proxy)
    for client in clients.values():
        for _ in range(10):
            assert client.post(COMPLETIONS, BODY).finish().status == 200
    ids = [r.header("x-request-id") for each in cluster.d for r in each.requests]
    assert len(set(ids)) == len(ids) == 20


def test_workers_begin_their_rounds_apart() -> None:
    with Cluster(2, 2, args=TWO) as cluster:
        clients = one_each(cluster.proxy)
        used = [served_by(client, cluster.p, 1) for client in clients.values()]
        assert set.union(*used) == {each.port for each in cluster.p}


# --- MoRIIO ---------------------------------------------------------------------------


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port for what binds twice: others get it only if they ask for it."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def test_b48_engines_that_register_do_so_with_all_workers() -> None:
    with Fleet(mode="READ", argv=TWO, limits=NO_PROBES) as fleet:
        clients = one_each(fleet.proxy)
        wait_served(clients, 200)
        listed = [
            [(each["instance"], each["state"]) for each in status["instances"]]
            for status in (fleet.proxy.status() for _ in range(50))
        ]
        assert listed == [[(each.instance, "up") for each in fleet.engines]] * 50
        fleet.register(fleet.p[0], dp_size=2)
        ranks = set()

        def both_ranks_by_all() -> bool:
            for pid, client in clients.items():
                assert client.post(COMPLETIONS, BODY).finish().status == 200
                leg = fleet.p[0].requests[-1]
                ranks.add((pid, leg.header("x-data-parallel-rank")))
            return {(pid, rank) for pid in clients for rank in "01"} <= ranks

        poll(both_ranks_by_all, "every worker uses both ranks")


def test_engines_that_fall_silent_leave_all_workers() -> None:
    with Fleet(mode="READ", argv=TWO, limits={"PING_EXPIRY": 1.0}) as fleet:
        clients = one_each(fleet.proxy)
        poll(lambda: not fleet.proxy.instances(), "all instances have left")
        wait_served(clients, 503)


def test_the_worker_that_hears_the_engines_is_replaced() -> None:
    with (
        held_port() as port,
        Fleet(
            mode="READ",
            argv=[*TWO, "--service-discovery-port", str(port)],
            limits=NO_PROBES | SPEEDY,
        ) as fleet,
    ):
        hearing = worker_pids(fleet.proxy)[0]
        successor_of(fleet.proxy, hearing)
        clients = one_each(fleet.proxy)
        wait_served(clients, 200)
        with ScriptedEngine("decode") as new:
            fleet.register(new)


def wait_served(clients: dict[int, RawClient], status: int) -> None:
    """Returns once every worker answers a completion with that status."""

    def same() -> bool:
        answers = [c.post(COMPLETIONS, BODY).finish() for c in clients.values()]
        return {answer.status for answer in answers} == {status}

    poll(same, f"every worker answers with {status}")


# --- Workers that die -----------------------------------------------------------------


def successor_of(proxy: ProxyProcess, pid: int) -> None:
    """Kills a worker; returns once another serves in its place."""
    others = set(worker_pids(proxy))
    os.kill(pid, signal.SIGKILL)
    count = len(others)
    poll(
        lambda: len(worker_pids(proxy)) == count and pid not in worker_pids(proxy),
        "the worker has a successor",
    )
    one_each(proxy, count)


def test_a_worker_that_is_killed_takes_its_own_streams_only(cluster: Cluster) -> None:
    clients = one_each(cluster.proxy)
    gate = Gate()
    half, rest = chunk(event("half")), chunk(event("rest"))
    for each in cluster.d:
        each.default = [SSE_HEAD, half, gate, rest, chunk(DONE), LAST_CHUNK]
    streams = {pid: [client] for pid, client in clients.items()}
    while min(len(each) for each in streams.values()) < 3:
        client, pid = connect(cluster.proxy)
        streams[pid].append(client)
    readers = {
        pid: [client.post(COMPLETIONS, STREAM) for client in mine]
        for pid, mine in streams.items()
    }
    for reader in (reader for mine in readers.values() for reader in mine):
        reader.body_until(b"half")
    killed, spared = readers
    os.kill(killed, signal.SIGKILL)
    for reader in readers[killed]:
        assert reader.finish().end is End.INCOMPLETE
    gate.release()
    for reader in readers[spared]:
        response = reader.finish()
        assert response.events() == ["half", "rest", "[DONE]"]
        assert response.end is End.COMPLETE
    successors = one_each(cluster.proxy)
    assert killed not in successors and spared in successors


def test_who_waits_for_a_worker_that_dies_is_served_by_its_successor() -> None:
    with Cluster(1, 1, args=TWO, limits=SPEEDY) as cluster:
        stuck = worker_pids(cluster.proxy)[1]
        os.kill(stuck, signal.SIGSTOP)
        clients = [cluster.connect() for _ in range(20)]
        _clients.extend(clients)
        readers = [client.post(COMPLETIONS, BODY) for client in clients]
        # Those of the other worker are answered; one that is not was not accepted.
        waiting = [each for each in clients if worker_of(cluster.proxy, each) is None]
        assert waiting
        os.kill(stuck, signal.SIGKILL)
        for reader in readers:
            assert reader.finish().status == 200


DIES_AT_START = """
class Doomed(ProxyServer):
    async def prepare(self, service):
        await super().prepare(service)
        if self.worker.index == 1:
            stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            with STARTS.open("a") as starts:
                starts.write(stat[19] + "\\n")
            if len(STARTS.read_text().split()) > 1:
                os._exit(7)

disagg_proxy.RESTART_INTERVAL = 0.2
args.workers = 2
Doomed(args).run_server()
"""


def test_a_worker_that_dies_at_its_start_does_not_spin(tmp_path: Path) -> None:
    starts, script = tmp_path / "starts", tmp_path / "my_proxy.py"
    own = f"import os\nfrom pathlib import Path\nSTARTS = Path({str(starts)!r})\n"
    script.write_text(PREAMBLE + own + DIES_AT_START)
    with Cluster(1, 1, script=script) as cluster:
        os.kill(worker_pids(cluster.proxy)[1], signal.SIGKILL)

        def successors() -> list[int]:
            # When each process was made, in ticks of the kernel's clock.
            return [int(ticks) for ticks in starts.read_text().split()][1:]

        poll(lambda: len(successors()) >= 4, "successors are made again and again")
        made = successors()
        ticks = int(0.2 * os.sysconf("SC_CLK_TCK"))
        assert all(b - a >= ticks - 1 for a, b in zip(made, made[1:]))
        assert "worker 1 has ended with status 7" in str(cluster.proxy.log)
        # The other one goes on, and waits for nobody.
        client, _ = connect(cluster.proxy)
        assert client.post(COMPLETIONS, BODY).finish().status == 200


NO_SECOND_FORK = """
forks = []
fork = os.fork

def fork_but_once():
    forks.append(1)
    if len(forks) == 2:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = fork_but_once
disagg_proxy.RESTART_INTERVAL = 0.01
args.workers = 2
ProxyServer(args).run_server()
"""


def test_a_worker_that_cannot_be_made_is_tried_again(tmp_path: Path) -> None:
    script = tmp_path / "my_proxy.py"
    script.write_text(PREAMBLE + "import os\n" + NO_SECOND_FORK)
    with Cluster(1, 1, script=script) as cluster:
        assert len(one_each(cluster.proxy)) == 2
        cluster.proxy.wait_log("worker 1 cannot be made: [Errno 11]")


# --- Start and end --------------------------------------------------------------------


def test_the_start_is_announced_once_and_takes_no_request_before() -> None:
    with Cluster(1, 1, args=["--workers", "3"]) as cluster:
        one_each(cluster.proxy, 3)
        lines = [line for line in cluster.proxy.log if "listening on" in line]
        assert len(lines) == 1
        assert len([line for line in cluster.proxy.log if "is up" in line]) == 2


def test_workers_speak_tls(tls: Tls) -> None:
    with Cluster(1, 1, args=[*TWO, *tls.args], trust=tls.trust) as cluster:
        for client in one_each(cluster.proxy).values():
            assert client.post(COMPLETIONS, BODY).finish().status == 200
        assert "with TLS" in cluster.proxy.wait_log("listening on")
    argv = ["--model", MODEL, "--prefill", "h:1", "--decode", "h:2", *TWO]
    status, printed = run_to_exit([*argv, "--ssl-certfile", "/nowhere"])
    assert status == 1
    assert printed.count("/nowhere") == 1


def test_zero_is_one_for_each_core() -> None:
    with Cluster(1, 1, args=["--workers", "0"]) as cluster:
        cores = len(os.sched_getaffinity(0))
        assert len(worker_pids(cluster.proxy)) == (cores if cores > 1 else 0)


@pytest.mark.parametrize("number", ["-1", "two", "1.5"])
def test_a_number_of_workers_that_is_none(number: str) -> None:
    argv = ["--model", MODEL, "--prefill", "h:1", "--decode", "h:2"]
    status, printed = run_to_exit([*argv, "--workers", number])
    assert status == 2
    assert "--workers" in printed


def test_a_wrong_model_ends_the_start_of_all() -> None:
    with ScriptedEngine("prefill") as p, ScriptedEngine("decode") as d:
        d.models = ["org/other"]
        argv = ["--model", MODEL, "--prefill", p.instance, "--decode", d.instance]
        status, printed = run_to_exit([*argv, "--port", "0", *TWO])
        assert status == 1
        line = f"{d.instance} serves a different model: org/other != {MODEL}"
        assert printed.count(line) == 1
        assert "Traceback" not in printed


@pytest.mark.parametrize("first", [[], TWO])
@pytest.mark.parametrize("second", [[], TWO])
def test_b48_a_second_copy_is_refused(first: list[str], second: list[str]) -> None:
    with Cluster(1, 1, args=first) as cluster:
        host, port = cluster.proxy.address
        argv = ["--model", MODEL, "--prefill", cluster.p[0].instance]
        argv += ["--decode", cluster.d[0].instance, "--port", str(port), *second]
        status, printed = run_to_exit(argv)
        assert status == 1
        assert f"Cannot listen on {host}:{port}: " in printed
        assert "address already in use" in printed
        assert cluster.post(COMPLETIONS, BODY).status == 200


def test_b48_a_second_copy_is_refused_while_the_first_starts() -> None:
    with (
        held_port() as port,
        ScriptedEngine("prefill") as p,
        ScriptedEngine("decode") as d,
    ):
        d.health = gate = Gate()
        argv = ["--model", MODEL, "--prefill", p.instance, "--decode", d.instance]
        argv += ["--port", str(port), *TWO]

        def start_second() -> tuple[int, str]:
            poll(lambda: d.probes, "the first copy looks at its instances")
            try:
                return run_to_exit(argv)
            finally:
                gate.release()

        proxies: list[ProxyProcess] = []
        refused: list[tuple[int, str]] = []
        gather(
            [
                lambda: proxies.append(ProxyProcess(argv)),
                lambda: refused.append(start_second()),
            ]
        )
        with proxies[0] as proxy:
            [(status, printed)] = refused
            assert (status, proxy.request("GET", "/health").status) == (1, 200)
            assert "address already in use" in printed


def begin_streams(
    cluster: Cluster, gate: Gate
) -> tuple[dict[int, RawClient], list[ResponseReader]]:
    """A stream at each worker that has begun and waits for the gate."""
    clients = one_each(cluster.proxy)
    for each in cluster.d:
        half, rest = chunk(event("half")), chunk(DONE)
        each.default = [SSE_HEAD, half, gate, rest, LAST_CHUNK]
    readers = [client.post(COMPLETIONS, STREAM) for client in clients.values()]
    for reader in readers:
        reader.body_until(b"half")
    return clients, readers


@pytest.mark.parametrize("to_all", [False, True])
def test_sigterm_lets_the_streams_of_all_workers_finish(to_all: bool) -> None:
    gate = Gate()
    with Cluster(1, 1, args=TWO) as cluster:
        clients, readers = begin_streams(cluster, gate)
        # A terminal and systemd send a signal to all processes.
        for pid in [*(worker_pids(cluster.proxy) if to_all else ()), cluster.proxy.pid]:
            os.kill(pid, signal.SIGTERM)
        poll(lambda: refuses(cluster.proxy), "new connections are refused")
        gate.release()
        for reader in readers:
            response = reader.finish()
            assert response.events() == ["half", "[DONE]"]
            assert response.end is End.COMPLETE
        assert cluster.proxy.wait_exit() == 0
        wait_ended(clients)


@pytest.mark.parametrize(
    "numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGKILL,)]
)
def test_what_ends_the_first_process_at_once_ends_all(
    numbers: tuple[signal.Signals, ...],
) -> None:
    gate = Gate()
    cluster = Cluster(1, 1, args=TWO)
    try:
        clients, readers = begin_streams(cluster, gate)
        for number in numbers:
            cluster.proxy.signal(number)
            if number is signal.SIGTERM:
                cluster.proxy.wait_log("stopping")
        for reader in readers:
            assert reader.finish().end is End.INCOMPLETE
        cluster.proxy.wait_exit()
        wait_ended(clients)
    finally:
        # Not in a `with`: that one expects an orderly end.
        cluster.__exit__("killed")


def refuses(proxy: ProxyProcess) -> bool:
    """Whether a new connection is refused."""
    try:
        proxy.connect().close()
    except ConnectionRefusedError:
        return True
    return False


# --- Python API -----------------------------------------------------------------------


MINE = """
class Last(SchedulingPolicy):
    def schedule(self, cycler):
        return cycler.up[-1]

async def who(request):
    return Response(str(os.getpid()).encode(), content_type="text/plain")

args.workers = 2
ProxyServer(args, Last(), create_chat_completion=who).run_server()
print("all is over", file=sys.stderr)
"""


def test_a_policy_and_callables_of_ones_own_run_in_each_worker(tmp_path: Path) -> None:
    script = tmp_path / "my_proxy.py"
    script.write_text(PREAMBLE + "import os\n" + MINE)
    with Cluster(2, 2, script=script) as cluster:
        clients = one_each(cluster.proxy)
        for pid, client in clients.items():
            assert served_by(client, [*cluster.p, *cluster.d], 3) == {
                cluster.p[1].port,
                cluster.d[1].port,
            }
            assert client.post(CHAT, BODY).finish().body == str(pid).encode()
    # What follows `run_server` runs once, in the user's process.
    assert sum("all is over" in line for line in cluster.proxy.log) == 1
