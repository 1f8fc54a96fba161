# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keys: who may ask for what, what is never passed on, what a stranger costs."""

import json
from collections.abc import Iterator, Mapping

import openai
import pytest
from moriio_rig import MORIIO_PROXY, Fleet
from rig import (
    CHAT,
    COMPLETIONS,
    JSON,
    MODEL,
    Cluster,
    Gate,
    ProxyProcess,
    Response,
    ScriptedEngine,
    http_request,
    poll,
    prefill_answer,
    run_to_exit,
)

BODY: JSON = {"prompt": "a", "messages": []}
KEYS = ("first-client-key", "second-client-key")
KEY = {"Authorization": f"Bearer {KEYS[0]}"}
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def _guarded() -> Iterator[Cluster]:
    environment = {"VLLM_API_KEY": "not-this-one", "ADMIN_API_KEY": "admin"}
    args = ["--api-key", KEYS[0], "--api-key", KEYS[1]]
    with Cluster(args=args, env=environment) as cluster:
        yield cluster


@pytest.fixture
def guarded(_guarded: Cluster) -> Iterator[Cluster]:
    """1P1D and a proxy that wants one of two keys, shared by the module."""
    yield _guarded
    _guarded.settle()


def refused(response: Response) -> None:
    """Asserts that it is the answer to a request without a key."""
    error = response.error()
    assert (response.status, error["code"]) == (401, 401)
    assert error["type"] == "AuthenticationError"
    assert response.header("www-authenticate") == "Bearer"
    assert not any(key in response.raw.decode() for key in KEYS)


# --- Who needs a key ------------------------------------------------------------------

GUARDED = [
    *(("POST", path) for path in (COMPLETIONS, CHAT, "/tokenize", "/sleep", "/")),
    *(("GET", path) for path in ("/v1/models", "/version", "/%68ealth", "/health/")),
    *(("GET", path) for path in ("//health", "/v1/../health", "/health%00")),
    ("GET", "/nothing"),
    ("OPTIONS", "/v1/models"),
]


@pytest.mark.parametrize(("method", "target"), GUARDED)
def test_whatever_could_reach_an_engine_needs_a_key(
    guarded: Cluster, method: str, target: str
) -> None:
    body = BODY if method == "POST" else None
    refused(guarded.request(method, target, body))
    for engine in guarded.engines:
        assert engine.requests == []
    assert guarded.request(method, target, body, KEY).status != 401


@pytest.mark.parametrize("target", ["/health", "/health?x=1", "/status", "/metrics"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_health_and_status_are_open(
    guarded: Cluster, target: str, headers: Mapping[str, str]
) -> None:
    for method in ("GET", "HEAD"):
        assert guarded.request(method, target, headers=headers).status == 200


def test_the_admin_routes_have_a_key_of_their_own(guarded: Cluster) -> None:
    order = {"type": "decode", "instance": guarded.d[0].instance}
    add = "/instances/add"
    assert guarded.post(add, order, KEY).status == 422
    assert guarded.post(add, order, {"X-API-Key": KEYS[0]}).status == 403
    assert guarded.post(add, order, {"X-API-Key": "admin"}).status == 400
    refused(guarded.post(COMPLETIONS, BODY, {"X-API-Key": "admin"}))


@pytest.mark.parametrize(
    ("given", "admitted"),
    [
        (f"Bearer {KEYS[0]}", True),
        (f"Bearer {KEYS[1]}", True),
        (f"bEARER {KEYS[0]}", True),
        (f"Bearer {KEYS[0][:-1]}", False),
        (f"Bearer {KEYS[0]}x", False),
        (f"Bearer {KEYS[0].upper()}", False),
        (f"Bearer {KEYS[0]}, Bearer {KEYS[1]}", False),
        (f"Basic {KEYS[0]}", False),
        (KEYS[0], False),
        ("Bearer", False),
        ("Bearer ", False),
        ("", False),
        ("Bearer caf\u00e9", False),
        ("Bearer not-this-one", False),
    ],
)
def test_only_one_of_the_keys_will_do(
    guarded: Cluster, given: str, admitted: bool
) -> None:
    head = http_request("GET", "/v1/models", headers={"Authorization": given})
    with guarded.connect() as client:
        client.send(head.decode().encode("latin-1"))
        response = client.reader("GET").finish()
    if admitted:
        assert response.status == 200
    else:
        refused(response)


def test_the_key_may_come_from_the_environment() -> None:
    with Cluster(env={"VLLM_API_KEY": KEYS[0]}) as cluster:
        refused(cluster.post(COMPLETIONS, BODY))
        assert cluster.post(COMPLETIONS, BODY, KEY).status == 200


def test_status_can_be_closed() -> None:
    with Cluster(args=["--api-key", *KEYS]) as cluster:
        assert cluster.get("/status").status == 200
    args = ["--api-key", KEYS[1], KEYS[0], "--protect-status"]
    engine = ScriptedEngine("decode")
    argv = ["--model", MODEL, "--prefill", engine.instance, "--decode", engine.instance]
    with engine, ProxyProcess([*argv, *args]) as proxy:
        for target in ("/status", "/metrics", "/status?x"):
            refused(proxy.request("GET", target))
        status = proxy.request("GET", "/status", headers=KEY)
        assert status.json()["decode_node_count"] == 1
        poll(lambda: proxy.request("GET", "/health").status == 200, "it is well")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key", "a", "--api-key", ""], "--api-key is empty"),
        (["--protect-status"], "--protect-status needs --api-key"),
        (["--api-key"], "--api-key"),
    ],
)
def test_a_start_that_would_leave_it_open_fails(argv: list[str], told: str) -> None:
    instances = ["--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1"]
    status, stderr = run_to_exit(["--model", MODEL, "--port", "0", *instances, *argv])
    assert status not in (0, None)
    assert told in stderr and "Traceback" not in stderr


# --- The connection, and the client library -------------------------------------------


def test_a_refusal_leaves_the_connection_in_step(guarded: Cluster) -> None:
    with guarded.connect() as client:
        for _ in range(2):
            refused(client.post(COMPLETIONS, BODY).finish())
            assert client.post(COMPLETIONS, BODY, KEY).finish().status == 200
        client.send(
            http_request("POST", COMPLETIONS, BODY),
            http_request("POST", COMPLETIONS, BODY, KEY),
        )
        refused(client.reader().finish())
        assert client.reader().finish().status == 200


def test_the_openai_client_presents_its_key(guarded: Cluster) -> None:
    host, port = guarded.proxy.address
    url = f"http://{host}:{port}/v1"
    with openai.OpenAI(api_key=KEYS[0], base_url=url, max_retries=0) as client:
        stream = client.completions.create(model=MODEL, prompt="a", stream=True)
        assert [each.choices[0].text for each in stream] == ["one", " two", " three"]
    with (
        openai.OpenAI(api_key="wrong", base_url=url, max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="API key"),
    ):
        client.completions.create(model=MODEL, prompt="a")


# --- What an engine gets --------------------------------------------------------------


def test_a_clients_key_for_the_proxy_reaches_no_engine(guarded: Cluster) -> None:
    for headers in (KEY, {"Authorization": f"bearer {KEYS[1]}"}):
        assert guarded.post(COMPLETIONS, BODY, headers).status == 200
        assert guarded.request("GET", "/v1/models", headers=headers).status == 200
        assert guarded.post("/tokenize", {"prompt": "a"}, headers).status == 200
    for engine in guarded.engines:
        for request in engine.requests + engine.probes:
            assert request.header("authorization") is None
            assert not any(b"client-key" in value for _, value in request.headers)


def test_the_engines_get_their_own_key_instead() -> None:
    with Cluster(args=["--api-key", KEYS[0]], env={"OPENAI_API_KEY": "e"}) as cluster:
        assert cluster.post(COMPLETIONS, BODY, KEY).status == 200
        refused(cluster.post(COMPLETIONS, BODY, {"Authorization": "Bearer e"}))
        for engine in cluster.engines:
            [request] = engine.requests
            assert request.header("authorization") == "Bearer e"


def test_the_release_of_a_hand_over_has_no_key_of_a_client() -> None:
    limits = {"TICK": 0.02, "PROBE_INTERVAL_UP": 0.03}
    with Cluster(args=["--api-key", KEYS[0]], limits=limits) as cluster:
        gate = Gate()
        cluster.p[0].answer(lambda request: [gate, *prefill_answer(request)])
        with cluster.connect() as client:
            reader = client.post(COMPLETIONS, BODY, KEY)
            leg = cluster.p[0].next_request()
            cluster.d[0].health = 503
            cluster.proxy.wait_state(cluster.d[0], "down")
            gate.release()
            assert reader.finish().status == 503
        release = cluster.d[0].next_request()
        assert release.json()["kv_transfer_params"] == json.loads(leg.handed_over())
        assert release.header("authorization") is None


# --- What a stranger costs ------------------------------------------------------------


@pytest.mark.parametrize("coding", ["length", "chunked"])
@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        *(("POST", target, 401) for target in (COMPLETIONS, "/tokenize")),
        *(("POST", target, 403) for target in ("/instances/add", "/instances/remove")),
        *(("GET", target, 401) for target in ("/health", "/status", "/metrics")),
    ],
)
def test_a_strangers_body_is_not_kept(
    guarded: Cluster, method: str, target: str, status: int, coding: str
) -> None:
    length = {"Content-Length": str(200 * MEBIBYTE)}
    framing = length if coding == "length" else {"Transfer-Encoding": "chunked"}
    headers = {"Content-Type": "application/json", "X-API-Key": "wrong"} | framing
    piece = b" " * MEBIBYTE
    if coding == "chunked":
        piece = b"%x\r\n%b\r\n" % (len(piece), piece)
    with guarded.connect() as client:
        client.send(http_request(method, target, headers=headers))
        before = guarded.proxy.peak_resident_bytes()
        for _ in range(64):
            client.send(piece)
        response = client.reader().finish()
    assert response.status == status
    assert response.header("connection") == "close"
    assert guarded.proxy.peak_resident_bytes() - before < 16 * MEBIBYTE


def test_a_stranger_is_not_asked_for_a_body(guarded: Cluster) -> None:
    headers = {"Expect": "100-continue", "Content-Length": "14"}
    headers["Content-Type"] = "application/json"
    with guarded.connect() as client:
        response = client.request("POST", COMPLETIONS, None, headers).finish()
        refused(response)
        assert response.interim == []


# --- The warning ----------------------------------------------------------------------

WARNING = "anybody who reaches this port uses OPENAI_API_KEY"


@pytest.mark.parametrize(
    ("moriio", "host", "environment", "warned"),
    [
        (False, "0.0.0.0", {"OPENAI_API_KEY": "e"}, True),
        (True, "0.0.0.0", {"OPENAI_API_KEY": "e"}, True),
        (False, "::", {"OPENAI_API_KEY": "e"}, True),
        (False, "127.0.0.1", {"OPENAI_API_KEY": "e"}, False),
        (False, "0.0.0.0", {}, False),
        (False, "0.0.0.0", {"OPENAI_API_KEY": "e", "VLLM_API_KEY": "c"}, False),
    ],
)
def test_an_open_port_in_front_of_an_engine_key_is_warned_of(
    moriio: bool, host: str, environment: Mapping[str, str], warned: bool
) -> None:
    with ScriptedEngine("decode") as engine:
        if moriio:
            argv = ["--host", host, "--service-discovery-port", "0"]
            proxy = ProxyProcess(argv, MORIIO_PROXY, environment)
        else:
            instances = ["--prefill", engine.instance, "--decode", engine.instance]
            argv = ["--model", MODEL, "--host", host, *instances]
            proxy = ProxyProcess(argv, env=environment)
        with proxy:
            pass
        assert any(WARNING in line for line in proxy.log) is warned


# --- MoRIIO ---------------------------------------------------------------------------


def test_moriio_guards_its_routes_too() -> None:
    with Fleet(argv=["--api-key", KEYS[0]]) as fleet:
        for target in (COMPLETIONS, "/start_profile", "/instances/add", "/tokenize"):
            refused(fleet.post(BODY, target))
        for engine in fleet.engines:
            assert engine.requests == []
        assert fleet.post(BODY, headers=KEY).status == 200
        for engine in fleet.engines:
            [request] = engine.requests
            assert request.header("authorization") is None
        assert fleet.proxy.request("GET", "/health").status == 200
