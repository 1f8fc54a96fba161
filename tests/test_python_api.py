# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Python API: upstream's names, policies and callables of one's own.

Each test writes the script that a user would write, and runs it as the proxy.
"""

import argparse
import ast
import itertools
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from rig import (
    CHAT,
    COMPLETIONS,
    JSON,
    MODEL,
    ROOT,
    Cluster,
    End,
    Gate,
    ProxyProcess,
    Response,
    ScriptedEngine,
    http_response,
)

import disagg_proxy
from disagg_proxy import (
    Proxy,
    ProxyServer,
    RoundRobinSchedulingPolicy,
    SchedulingPolicy,
)

BODY: JSON = {"prompt": "a", "messages": []}

# What a user's script starts with: upstream's four arguments and nothing else.
PREAMBLE = f"""
import argparse, asyncio, logging, sys
sys.path.insert(0, {str(ROOT)!r})
import disagg_proxy
from disagg_proxy import *

logging.basicConfig(level=logging.INFO)
parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--prefill", nargs="+")
parser.add_argument("--decode", nargs="+")
parser.add_argument("--port", type=int)
args = parser.parse_args()
"""

Write = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Write:
    """Writes a user's script and returns its path."""

    def write(code: str) -> Path:
        path = tmp_path / "my_proxy.py"
        path.write_text(PREAMBLE + textwrap.dedent(code))
        return path

    return write


# --- Names ----------------------------------------------------------------------------


def namespace(**changes: object) -> argparse.Namespace:
    """Upstream's four attributes."""
    args = {"model": MODEL, "prefill": ["h:1"], "decode": ["h:2"], "port": 8000}
    return argparse.Namespace(**(args | changes))


def test_upstreams_attributes_are_there() -> None:
    policy = RoundRobinSchedulingPolicy()

    async def custom(request: object) -> AsyncIterator[bytes]:
        yield b""

    server = ProxyServer(namespace(), policy, create_chat_completion=custom)
    assert server.port == 8000
    assert isinstance(server.proxy_instance, Proxy)
    # Any: what is asked for here is upstream's, whether or not the type has it.
    proxy: Any = server.proxy_instance
    assert [str(each) for each in proxy.prefill_instances] == ["h:1"]
    assert [str(each) for each in proxy.decode_instances] == ["h:2"]
    assert proxy.model == MODEL
    assert proxy.scheduling_policy is policy
    assert proxy.custom_create_completion is None
    assert proxy.custom_create_chat_completion is custom
    assert proxy.prefill_cycler is not proxy.decode_cycler


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": []}, "Please specify at least one prefill node."),
        ({"prefill": None}, "Please specify at least one prefill node."),
        ({"decode": []}, "Please specify at least one decode node."),
        ({"decode": ["host"]}, "host"),
        ({"prefill": ["h:1", "h:70000"]}, "h:70000"),
    ],
)
def test_upstreams_validation(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProxyServer(namespace(**changes))


def test_a_policy_without_schedule_is_none() -> None:
    abstract: Callable[[], object] = SchedulingPolicy
    with pytest.raises(TypeError):
        abstract()


def test_round_robin_takes_upstreams_cycler() -> None:
    cycler: Any = itertools.cycle(["a", "b"])
    policy: Any = RoundRobinSchedulingPolicy()
    assert [policy.schedule(cycler) for _ in range(3)] == ["a", "b", "a"]


# --- Policies -------------------------------------------------------------------------


def test_what_moriio_proxy_takes_is_public() -> None:
    parsed = ast.parse((ROOT / "moriio_proxy.py").read_text())
    taken = {
        alias.name
        for node in parsed.body
        if isinstance(node, ast.ImportFrom) and node.module == "disagg_proxy"
        for alias in node.names
    }
    assert "Proxy" in taken
    assert taken <= set(disagg_proxy.__all__)


def test_upstreams_four_attributes_are_enough(script: Write) -> None:
    path = script("ProxyServer(args).run_server()")
    with Cluster(2, 2, script=path) as cluster:
        assert cluster.proxy.address[0] == "127.0.0.1"
        for target in (COMPLETIONS, CHAT):
            response = cluster.post(target, BODY)
            assert (response.status, response.end) == (200, End.COMPLETE)
        [p] = cluster.p[0].requests
        [d] = cluster.d[0].requests
        assert d.members()["kv_transfer_params"] == p.handed_over()


LEAST_LOADED = """
    class LeastLoaded(SchedulingPolicy):
        def schedule(self, cycler):
            free = [each for each in cycler.instances if each.state == "up"]
            return min(free, key=lambda each: each.in_flight)

    ProxyServer(args, LeastLoaded()).run_server()
"""


def test_a_least_loaded_policy_sees_what_is_in_flight(script: Write) -> None:
    with Cluster(1, 2, script=script(LEAST_LOADED)) as cluster:
        hold = Gate()
        cluster.d[0].answer(hold, http_response(200))
        with cluster.connect() as client:
            held = client.post(COMPLETIONS, BODY)
            cluster.d[0].next_request()
            for _ in range(3):
                assert cluster.post(COMPLETIONS, BODY).status == 200
            assert (len(cluster.d[0].requests), len(cluster.d[1].requests)) == (1, 3)
            hold.release()
            assert held.finish().status == 200
        assert cluster.post(COMPLETIONS, BODY).status == 200
        assert len(cluster.d[0].requests) == 2


@pytest.mark.parametrize("choice", ["next(cycler)", "list(cycler)[0]", "[][0]"])
def test_a_policy_that_finds_nobody(script: Write, choice: str) -> None:
    path = script(f"""
        class Mine(SchedulingPolicy):
            def schedule(self, cycler):
                return {choice}

        ProxyServer(args, Mine()).run_server()
    """)
    absent = ScriptedEngine("prefill", listening=False)
    decode = ScriptedEngine("decode")
    argv = ["--model", MODEL, "--prefill", absent.instance, "--decode", decode.instance]
    with absent, decode, ProxyProcess(argv, path) as proxy:
        proxy.traceback_expected = True
        proxy.wait_state(decode, "up")
        response = proxy.request("POST", COMPLETIONS, BODY)
        # `next` says that nobody is there; what else a policy raises is its fault.
        assert response.status == (503 if choice == "next(cycler)" else 500)
        response.error()
        assert decode.requests == []
        assert proxy.request("GET", "/status").status == 200


@pytest.mark.parametrize(
    "fault",
    [
        "raise ValueError('private detail')",
        "raise TimeoutError('private detail')",
        "return 'private detail'",
        "return 7",
        "1 / 0",
    ],
)
def test_a_faulty_policy_costs_that_request_only(script: Write, fault: str) -> None:
    path = script(f"""
        class Mine(SchedulingPolicy):
            calls = 0

            def schedule(self, cycler):
                self.calls += 1
                if self.calls == 3:
                    {fault}
                return next(cycler)

        ProxyServer(args, Mine()).run_server()
    """)
    with Cluster(script=path) as cluster:
        cluster.proxy.traceback_expected = True
        statuses = []
        with cluster.connect() as client:
            for _ in range(3):
                response = client.post(COMPLETIONS, BODY).finish()
                statuses.append(response.status)
                assert b"private" not in response.body
                assert b"Traceback" not in response.body
        assert statuses == [200, 500, 200]
        assert len(cluster.d[0].requests) == 2
        cluster.proxy.wait_idle()


def test_a_faulty_connector_leaves_an_instance_down_until_it_works(
    script: Write,
) -> None:
    path = script("""
        class Mine(disagg_proxy.AutoConnector):
            calls = 0

            def learn(self, script, instance):
                self.calls += 1
                if self.calls < 3:
                    raise RuntimeError("not yet")
                return None
                yield

        disagg_proxy.CONNECTORS["auto"] = Mine
        disagg_proxy.PROBE_INTERVAL_DOWN = 0.05
        ProxyServer(args).run_server()
    """)
    with Cluster(script=path) as cluster:
        cluster.proxy.traceback_expected = True
        assert cluster.proxy.wait_log("prefill 127.0.0.1").endswith("is up")
        assert cluster.post(COMPLETIONS, BODY).status == 200


# --- Callables ------------------------------------------------------------------------

SERVE = "ProxyServer(args, create_completion=mine).run_server()\n"


def serve(script: Write, code: str) -> Cluster:
    """A cluster whose proxy answers completions with `mine` from `code`."""
    return Cluster(script=script(textwrap.dedent(code) + SERVE))


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_callable_returns_a_response(script: Write, kind: str) -> None:
    code = f"""
{kind} mine(request):
    return disagg_proxy.Response(b'{{"mine":1}}', 201)

"""
    with serve(script, code) as cluster:
        response = cluster.post(COMPLETIONS, BODY)
        assert (response.status, response.body) == (201, b'{"mine":1}')
        assert response.header("content-type") == "application/json"
        assert cluster.p[0].requests == cluster.d[0].requests == []
        # The other route still has two legs.
        assert cluster.post(CHAT, BODY).status == 200
        assert len(cluster.p[0].requests) == len(cluster.d[0].requests) == 1


def test_a_callable_sees_the_request(script: Write) -> None:
    code = """
import json

async def mine(request):
    body = await request.json()
    seen = [body["prompt"], request.headers["x-mine"], len(request.body)]
    return disagg_proxy.Response(json.dumps(seen).encode())

"""
    with serve(script, code) as cluster:
        raw = b'{"prompt" : "\\u00e9"}'
        response = cluster.request("POST", COMPLETIONS, raw, {"X-Mine": "yes"})
        assert response.json() == ["\u00e9", "yes", len(raw)]


def test_a_callable_of_the_chat_route(script: Write) -> None:
    path = script("""
        def mine(request):
            return disagg_proxy.Response(b"chat", content_type="text/plain")

        ProxyServer(args, create_chat_completion=mine).run_server()
    """)
    with Cluster(script=path) as cluster:
        response = cluster.post(CHAT, BODY)
        assert (response.body, response.header("content-type")) == (
            b"chat",
            "text/plain",
        )
        assert cluster.post(COMPLETIONS, BODY).status == 200
        assert len(cluster.d[0].requests) == 1


STREAMS = {
    "generator": """
async def mine(request):
    yield b"data: 1\\n\\n"
    yield b""
    yield b"data: [DONE]\\n\\n"

""",
    "coroutine": """
async def pieces():
    yield b"data: 1\\n\\n"
    yield b"data: [DONE]\\n\\n"

async def mine(request):
    return pieces()

""",
    "class": """
class Pieces:
    left = [b"data: 1\\n\\n", b"data: [DONE]\\n\\n"]

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.left:
            raise StopAsyncIteration
        return self.left.pop(0)

def mine(request):
    return Pieces()

""",
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_callable_streams(script: Write, kind: str) -> None:
    with serve(script, STREAMS[kind]) as cluster, cluster.connect() as client:
        response = client.post(COMPLETIONS, BODY).finish()
        assert (response.status, response.end) == (200, End.COMPLETE)
        content_type = response.header("content-type")
        assert content_type and content_type.startswith("text/event-stream")
        assert response.events() == ["1", "[DONE]"]
        assert client.request("GET", "/status").finish().status == 200


# Yields when the first decode engine answers, so that a test decides when.
ASKING = """
async def mine(request):
    host, _, port = args.decode[0].rpartition(":")
    try:
        for number in range(3):
            yield b"data: %d\\n\\n" % number
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /next HTTP/1.1\\r\\nHost: d\\r\\n\\r\\n")
            await reader.readuntil(b"\\r\\n\\r\\n")
            writer.close()
            await writer.wait_closed()
    finally:
        logging.info("the iterator has ended")

"""


def test_each_piece_of_a_callable_arrives_before_the_next_exists(
    script: Write,
) -> None:
    with serve(script, ASKING) as cluster, cluster.connect() as client:
        gates = [Gate() for _ in range(3)]
        for gate in gates:
            cluster.d[0].answer(gate, http_response(200))
        reader = client.post(COMPLETIONS, BODY)
        for number, gate in enumerate(gates):
            assert reader.body_until(b"%d\n\n" % number).count(b"data") == number + 1
            gate.release()
        assert reader.finish().end is End.COMPLETE
        cluster.proxy.wait_log("the iterator has ended")


def test_a_client_that_leaves_ends_the_callable(script: Write) -> None:
    with serve(script, ASKING) as cluster:
        cluster.d[0].answer(Gate())
        with cluster.connect() as client:
            reader = client.post(COMPLETIONS, BODY)
            reader.body_until(b"0\n\n")
            cluster.d[0].next_request()
        cluster.proxy.wait_log("the iterator has ended")


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError('private detail')",
        "return None",
        "return 7",
        "return {'a': 1}",
        "raise SystemError('private detail')",
        "raise StopIteration('private detail')",
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_faulty_callable_costs_that_request_only(
    script: Write, kind: str, body: str
) -> None:
    code = f"""
calls = []

{kind} mine(request):
    calls.append(request)
    if len(calls) == 2:
        {body}
    return disagg_proxy.Response(b"fine")

"""
    with serve(script, code) as cluster, cluster.connect() as client:
        cluster.proxy.traceback_expected = True
        responses: list[Response] = []
        for _ in range(3):
            responses.append(client.post(COMPLETIONS, BODY).finish())
        assert [each.status for each in responses] == [200, 500, 200]
        assert "private" not in responses[1].error()["message"]
        assert "Traceback" not in responses[1].error()["message"]


@pytest.mark.parametrize("fault", ["raise ValueError('private detail')", "yield 7"])
def test_an_iterator_that_fails_before_its_first_piece(
    script: Write, fault: str
) -> None:
    code = f"""
async def mine(request):
    if True:
        {fault}
    yield b"data: 1\\n\\n"

"""
    with serve(script, code) as cluster:
        cluster.proxy.traceback_expected = True
        response = cluster.post(COMPLETIONS, BODY)
        # Nothing had been sent: a true status is still possible.
        assert response.status == 500
        assert "private" not in response.error()["message"]
        assert cluster.post(CHAT, BODY).status == 200


@pytest.mark.parametrize("fault", ["raise ValueError('private detail')", "yield 7"])
def test_an_iterator_that_fails_later_cuts_the_answer(
    script: Write, fault: str
) -> None:
    code = f"""
async def mine(request):
    yield b"data: 1\\n\\n"
    {fault}
    yield b"data: [DONE]\\n\\n"

"""
    with serve(script, code) as cluster:
        cluster.proxy.traceback_expected = True
        response = cluster.post(COMPLETIONS, BODY)
        assert (response.status, response.end) == (200, End.INCOMPLETE)
        assert response.body == b"data: 1\n\n"
        assert cluster.post(CHAT, BODY).status == 200


def test_the_content_type_is_checked_before_a_callable(script: Write) -> None:
    code = """
def mine(request):
    logging.info("called")
    return disagg_proxy.Response(b"fine")

"""
    with serve(script, code) as cluster:
        headers = {"Content-Type": "text/plain"}
        assert cluster.request("POST", COMPLETIONS, b"{}", headers).status == 415
        assert not [line for line in cluster.proxy.log if "called" in line]
