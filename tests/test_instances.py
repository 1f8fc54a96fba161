# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Instances: addresses, model checks, joining later, the routes that show and add."""

import socket
from collections.abc import Iterator
from functools import partial

import pytest
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
    dumps,
    gather,
    http_response,
    run_to_exit,
)

BODY: JSON = {"prompt": "a", "messages": []}
# Probes as fast as the tests want instances to come and go.
QUICK = {"TICK": 0.02, "PROBE_INTERVAL_DOWN": 0.05, "PROBE_INTERVAL_UP": 0.05}
ADMIN = {"ADMIN_API_KEY": "secret-admin-key"}
WITH_KEY = {"X-API-Key": "secret-admin-key"}


def arguments(prefill: str, decode: str, *more: str) -> list[str]:
    """A command line with one instance per role."""
    return ["--model", MODEL, "--prefill", prefill, "--decode", decode, *more]


def refused_start(argv: list[str]) -> str:
    """Standard error of a start that fails as it should: in words."""
    status, stderr = run_to_exit(argv)
    assert status not in (0, None)
    assert "Traceback" not in stderr
    return stderr


# --- /status and /health --------------------------------------------------------------


def test_status_shows_upstreams_fields_and_every_instance(quad: Cluster) -> None:
    response = quad.get("/status")
    assert response.header("content-type") == "application/json"
    status = response.json()
    assert list(status)[:4] == [
        *("prefill_node_count", "decode_node_count"),
        *("prefill_nodes", "decode_nodes"),
    ]
    assert status["prefill_node_count"] == status["decode_node_count"] == 2
    assert status["prefill_nodes"] == [each.instance for each in quad.p]
    assert status["decode_nodes"] == [each.instance for each in quad.d]
    shown = [(each["role"], each["instance"]) for each in status["instances"]]
    assert shown == [(each.role, each.instance) for each in quad.engines]
    for each in status["instances"]:
        assert (each["state"], each["reason"], each["in_flight"]) == ("up", None, 0)
        assert each["since"] > 0


def test_b87_models_and_health_answer_like_one_vllm(pair: Cluster) -> None:
    response = pair.get("/v1/models")
    assert response.status == 200
    assert [each["id"] for each in response.json()["data"]] == [MODEL]
    assert pair.get("/health").status == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_b87_health_is_503_while_a_role_has_nobody(role: str) -> None:
    with Cluster(limits=QUICK) as cluster:
        failing = cluster.p[0] if role == "prefill" else cluster.d[0]
        failing.health = 503
        cluster.proxy.wait_state(failing, "down")
        assert cluster.get("/health").status == 503
        failing.health = 200
        cluster.proxy.wait_state(failing, "up")
        assert cluster.get("/health").status == 200


# --- Engines that come later (B50) ----------------------------------------------------


def no_instance(proxy: ProxyProcess) -> Response:
    """The answer to a request while nobody serves a role."""
    response = proxy.request("POST", COMPLETIONS, BODY)
    assert response.status == 503
    assert response.error()["code"] == 503
    retry_after = response.header("retry-after")
    assert retry_after is not None and int(retry_after) >= 1
    return response


def test_b50_engines_may_start_after_the_proxy() -> None:
    prefill = ScriptedEngine("prefill", listening=False)
    decode = ScriptedEngine("decode", listening=False)
    argv = arguments(prefill.instance, decode.instance)
    with prefill, decode, ProxyProcess(argv, limits=QUICK) as proxy:
        assert set(proxy.states().values()) == {"down"}
        assert proxy.request("GET", "/health").status == 503
        no_instance(proxy)
        decode.listen()
        proxy.wait_state(decode, "up")
        assert "prefill" in no_instance(proxy).error()["message"]
        # The other role is untouched.
        assert proxy.request("POST", "/tokenize", BODY).status == 200
        prefill.listen()
        proxy.wait_all_up()
        assert proxy.request("POST", COMPLETIONS, BODY).status == 200


def test_b50_an_engine_that_accepts_and_says_nothing_is_down() -> None:
    prefill, decode = ScriptedEngine("prefill"), ScriptedEngine("decode")
    loading = Gate()
    prefill.health = loading
    argv = arguments(prefill.instance, decode.instance)
    limits = QUICK | {"PROBE_TIMEOUT": 0.2}
    with prefill, decode, ProxyProcess(argv, limits=limits) as proxy:
        proxy.wait_state(decode, "up")
        no_instance(proxy)
        prefill.health = 200
        loading.release()
        proxy.wait_all_up()
        assert proxy.request("POST", COMPLETIONS, BODY).status == 200


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b'{"data":[{"id":7}]}',
        b'{"data":[{"id":"\xff"}]}',
        b'{"data":[],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["empty", "list", "number", "not_utf_8", "nested"],
)
def test_b50_an_engine_whose_list_of_models_is_none_is_asked_again(
    answer: bytes,
) -> None:
    prefill, decode = ScriptedEngine("prefill"), ScriptedEngine("decode")
    prefill.models = answer
    argv = arguments(prefill.instance, decode.instance)
    with prefill, decode, ProxyProcess(argv, limits=QUICK) as proxy:
        [shown] = [i for i in proxy.status()["instances"] if i["role"] == "prefill"]
        assert shown["reason"] == "/v1/models: not a list of models"
        prefill.models = [MODEL]
        proxy.wait_all_up()


def test_b50_one_engine_that_is_missing_does_not_hold_up_the_others() -> None:
    missing = ScriptedEngine("decode", listening=False)
    present = ScriptedEngine("decode")
    prefill = ScriptedEngine("prefill")
    argv = [*arguments(prefill.instance, missing.instance), present.instance]
    with missing, present, prefill, ProxyProcess(argv, limits=QUICK) as proxy:
        proxy.wait_state(present, "up")
        proxy.wait_state(prefill, "up")
        for _ in range(4):
            assert proxy.request("POST", COMPLETIONS, BODY).status == 200
        assert len(present.requests) == 4


def test_an_instance_that_stops_leaves_and_returns() -> None:
    with Cluster(decode=2, limits=QUICK) as cluster:
        gone, left = cluster.d
        gone.refuse()
        cluster.proxy.wait_state(gone, "down")
        for _ in range(4):
            assert cluster.post(COMPLETIONS, BODY).status == 200
        assert (len(gone.requests), len(left.requests)) == (0, 4)
        [shown] = [
            each
            for each in cluster.proxy.status()["instances"]
            if each["instance"] == gone.instance
        ]
        assert shown["reason"]
        gone.listen()
        cluster.proxy.wait_state(gone, "up")
        for _ in range(4):
            assert cluster.post(COMPLETIONS, BODY).status == 200
        assert len(gone.requests) == 2


# --- Model check (B39) ----------------------------------------------------------------

ACCEPTED = [
    ["org/tiny"],
    ["tiny"],
    ["adapter", "org/tiny"],
    ["org/tiny", "adapter1", "adapter2"],
    ["/models/org/tiny"],
    ["other/tiny"],
]
REFUSED = [[], ["org/other"], ["tiny/org"], ["org/tiny-2", "adapter"], ["TINY"]]


@pytest.fixture(scope="module")
def _admin_pair() -> Iterator[Cluster]:
    with Cluster(env=ADMIN) as cluster:
        yield cluster


@pytest.fixture
def admin(_admin_pair: Cluster) -> Iterator[Cluster]:
    """1P1D and a proxy with an admin key, shared by the module."""
    yield _admin_pair
    _admin_pair.settle()


def add(cluster: Cluster, role: str, instance: object) -> Response:
    """POST /instances/add with the right key."""
    body: JSON = {"type": role, "instance": instance}
    return cluster.request("POST", "/instances/add", body, WITH_KEY)


@pytest.mark.parametrize("models", ACCEPTED)
@pytest.mark.parametrize("model", ["org/tiny", "tiny"])
def test_b39_any_entry_with_the_same_last_part_is_accepted(
    model: str, models: list[str]
) -> None:
    engines = [ScriptedEngine(role) for role in ("prefill", "decode", "decode")]
    for engine in engines:
        engine.models = models
    prefill, decode, later = engines
    with later, Cluster([prefill], [decode], model=model, env=ADMIN) as cluster:
        body = BODY | {"model": "adapter1"}
        assert cluster.post(CHAT, body).status == 200
        for leg in (*prefill.requests, *decode.requests):
            assert leg.members()["model"] == b'"adapter1"'
        # The same verdict at the start and in the admin route.
        assert add(cluster, "decode", later.instance).status == 200


@pytest.mark.parametrize("models", REFUSED)
def test_b39_a_wrong_model_ends_the_start(models: list[str]) -> None:
    with ScriptedEngine("prefill") as prefill, ScriptedEngine("decode") as decode:
        decode.models = models
        stderr = refused_start(
            [*arguments(prefill.instance, decode.instance), "--port", "0"]
        )
        assert decode.instance in stderr
        assert MODEL in stderr
        assert all(each in stderr for each in models)


@pytest.mark.parametrize("models", REFUSED)
def test_b39_a_wrong_model_is_not_added(admin: Cluster, models: list[str]) -> None:
    with ScriptedEngine("decode") as other:
        other.models = models
        response = add(admin, "decode", other.instance)
    assert response.status == 400
    assert response.json() == {"detail": "Instance validation failed."}
    assert admin.proxy.status()["decode_node_count"] == 1


@pytest.mark.parametrize("key", [None, "k2"])
def test_an_engine_that_wants_its_clients_key_is_taken_unverified(
    key: str | None,
) -> None:
    prefill, decode = ScriptedEngine("prefill"), ScriptedEngine("decode")
    for engine in (prefill, decode):
        engine.api_key = "k1"
    env = {"OPENAI_API_KEY": key} if key else {}
    with Cluster([prefill], [decode], env=env) as cluster:
        cluster.proxy.wait_log("unverified")
        response = cluster.request("POST", CHAT, BODY, {"Authorization": "Bearer k1"})
        # The environment's key wins over the client's, right or wrong.
        assert response.status == (401 if key else 200)


# --- Addresses (B51, B52) -------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "written"),
    [
        ("::1", "[::1]:{}"),
        ("127.0.0.1", "localhost:{}"),
        ("::1", "localhost:{}"),
        ("127.0.0.1", "127.0.0.1:{}"),
        ("127.0.0.1", "http://127.0.0.1:{}"),
        ("::1", "http://[::1]:{}"),
    ],
)
def test_b51_addresses_on_the_command_line_and_by_api(host: str, written: str) -> None:
    if host == "::1" and written.startswith("localhost"):
        names = {each[4][0] for each in socket.getaddrinfo("localhost", None)}
        if host not in names:
            pytest.skip("localhost has no IPv6 address on this machine")
    prefill, decode, later = (
        ScriptedEngine(role, host) for role in ("prefill", "decode", "decode")
    )
    argv = arguments(written.format(prefill.port), written.format(decode.port))
    with prefill, decode, later, ProxyProcess(argv, env=ADMIN) as proxy:
        proxy.wait_all_up()
        assert proxy.request("POST", COMPLETIONS, BODY).status == 200
        for engine in (prefill, decode):
            [leg] = engine.requests
            authority = written.format(engine.port).removeprefix("http://")
            assert leg.header("host") == authority
        body: JSON = {"type": "decode", "instance": written.format(later.port)}
        added = proxy.request("POST", "/instances/add", body, WITH_KEY)
        assert added.status == 200, added
        for _ in range(2):
            assert proxy.request("POST", COMPLETIONS, BODY).status == 200
        assert later.requests


MALFORMED = [
    *("host", "host:", "host:0", "host:65536", "host:70000", ":80", "::1:80", ""),
    *("[::1]", "[::1", "[::g]:80", "::1]:80", "a:b:80", "host:80x", "host:-1"),
    *("https://x:1", "x:1/path", "user@x:1", "x y:1", "host:\u0661", "host: 80"),
    *("[::1%a b]:80", "[::1%\u00e9]:80"),
]
SPLITTING = "[::1%a\r\nX: y]:80"


@pytest.mark.parametrize("written", MALFORMED)
def test_b51_a_malformed_address_ends_the_start(written: str) -> None:
    stderr = refused_start(arguments(written, "127.0.0.1:9", "--port", "0"))
    assert written in stderr


@pytest.mark.parametrize(
    "written", [*MALFORMED, SPLITTING, None, 7, ["x:1"], {"a": 1}, True]
)
def test_b51_a_malformed_address_is_not_added(admin: Cluster, written: object) -> None:
    response = add(admin, "decode", written)
    assert response.status == 400
    assert isinstance(response.json()["detail"], str)
    assert admin.proxy.status()["decode_node_count"] == 1


@pytest.mark.parametrize("missing", ["--prefill", "--decode", "--model"])
def test_a_start_without_a_role_or_model_is_refused(missing: str) -> None:
    argv = arguments("127.0.0.1:8", "127.0.0.1:9", "--port", "0")
    at = argv.index(missing)
    del argv[at : at + 2]
    assert missing.strip("-") in refused_start(argv)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        (None, "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("::1", "::1"),
        ("localhost", None),
    ],
)
def test_b52_the_proxy_listens_where_it_is_told(
    host: str | None, address: str | None
) -> None:
    with Cluster(args=["--host", host] if host else []) as cluster:
        if address:
            assert cluster.proxy.address[0] == address
        assert cluster.get("/health").status == 200


def test_b52_a_port_in_use_ends_the_start(pair: Cluster) -> None:
    # Also the answer to a second copy: SO_REUSEPORT would let it take half of the
    # connections.
    port = str(pair.proxy.address[1])
    argv = arguments(pair.p[0].instance, pair.d[0].instance, "--port", port)
    assert port in refused_start(argv)
    assert pair.post(COMPLETIONS, BODY).status == 200


# --- Adding instances -----------------------------------------------------------------


def test_an_added_instance_serves(admin: Cluster) -> None:
    with Cluster(env=ADMIN) as cluster, ScriptedEngine("decode") as later:
        response = add(cluster, "decode", later.instance)
        assert response.status == 200
        added = {"message": f"Added {later.instance} to decode_instances."}
        assert response.json() == added
        assert cluster.proxy.status()["decode_nodes"] == [
            cluster.d[0].instance,
            later.instance,
        ]
        for _ in range(4):
            assert cluster.post(COMPLETIONS, BODY).status == 200
        assert len(later.requests) == 2
        again = add(cluster, "decode", later.instance)
        assert again.status == 400
        assert again.json() == {"detail": "Instance already exists."}


@pytest.mark.parametrize("connector", ["auto", "mooncake"])
def test_b49_proxy_variables_are_not_for_engines(connector: str) -> None:
    names = [f"{scheme}_proxy" for scheme in ("http", "https", "all")]
    with ScriptedEngine("prefill") as web, ScriptedEngine("prefill") as later:
        address = f"http://{web.instance}"
        env = {each: address for name in names for each in (name, name.upper())}
        with Cluster(env=ADMIN | env, connector=connector) as cluster:
            order: JSON = {"type": "prefill", "instance": later.instance}
            if connector == "mooncake":
                order["bootstrap_port"] = later.port
            added = cluster.post("/instances/add", order, WITH_KEY)
            assert added.status == 200
            for _ in range(2):
                assert cluster.post(COMPLETIONS, BODY).status == 200
            assert cluster.get("/v1/models").status == 200
            assert [len(each.requests) for each in cluster.engines] == [1, 2]
            assert len(later.requests) == 1
        assert web.accepted == 0


def test_adding_checks_the_key_before_anything_else(admin: Cluster) -> None:
    post = partial(admin.request, "POST", "/instances/add")
    missing = post(b"nonsense")
    assert missing.status == 422
    assert missing.json() == {
        "detail": [
            {
                "type": "missing",
                "loc": ["header", "x-api-key"],
                "msg": "Field required",
                "input": None,
            }
        ]
    }
    for wrong in ("wrong", "", "secret-admin-kez", "secret-admin-key2", "caf\u00e9"):
        response = post(b"nonsense", {"X-API-Key": wrong})
        assert response.status == 403
        assert response.json() == {"detail": "Forbidden: Invalid API Key."}
    log = "".join(admin.proxy.log)
    assert "secret-admin" not in log and "wrong" not in log


@pytest.mark.parametrize("env", [{}, {"ADMIN_API_KEY": ""}])
def test_adding_without_a_configured_key(env: dict[str, str]) -> None:
    with Cluster(env=env) as cluster:
        post = partial(cluster.request, "POST", "/instances/add", b"{}")
        assert post().status == 422
        for offered in ("", "x"):
            response = post({"X-API-Key": offered})
            assert response.status == 500
            assert response.json() == {"detail": "Server configuration error."}


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"nonsense", None),
        (b"", None),
        (b"[]", None),
        (b"{}", "Invalid instance type."),
        (b'{"type":"both","instance":"x:1"}', "Invalid instance type."),
        (b'{"type":7,"instance":"x:1"}', "Invalid instance type."),
        (b'{"type":"decode"}', "Invalid instance format."),
        (b'{"type":"decode","instance":""}', "Invalid instance format."),
        (b'{"type":"decode","instance":"host"}', "Invalid instance format."),
        (b'{"type":"decode","instance":"host:0"}', "Invalid instance address."),
        (b'{"type":"decode","instance":"host:70000"}', "Invalid instance address."),
        (b'{"type":"decode","instance":":80"}', "Invalid instance address."),
    ],
)
def test_adding_what_is_malformed(
    admin: Cluster, body: bytes, detail: str | None
) -> None:
    response = admin.request("POST", "/instances/add", body, WITH_KEY)
    assert response.status == 400
    answer = response.json()
    assert list(answer) == ["detail"]
    assert answer["detail"] == detail or (detail is None and answer["detail"])


def test_adding_asks_for_no_content_type(admin: Cluster) -> None:
    body = dumps({"type": "decode", "instance": admin.d[0].instance})
    headers = WITH_KEY | {"Content-Type": "text/plain"}
    response = admin.request("POST", "/instances/add", body, headers)
    assert response.json() == {"detail": "Instance already exists."}


def test_adding_what_does_not_answer(admin: Cluster) -> None:
    with ScriptedEngine("decode", listening=False) as absent:
        response = add(admin, "decode", absent.instance)
    assert response.status == 400
    assert response.json() == {"detail": "Instance validation failed."}


def test_adding_what_says_nothing_has_a_limit() -> None:
    limits = {"PROBE_TIMEOUT": 0.2, "CONNECT_TIMEOUT": 0.2, "TICK": 0.02}
    with (
        Cluster(env=ADMIN, limits=limits) as cluster,
        ScriptedEngine("decode") as swallowing,
    ):
        swallowing.swallow_connects()
        assert add(cluster, "decode", swallowing.instance).status in (400, 502, 504)
        assert cluster.proxy.status()["decode_node_count"] == 1


def test_adding_the_same_twenty_times_at_once_adds_it_once(admin: Cluster) -> None:
    with Cluster(env=ADMIN) as cluster, ScriptedEngine("prefill") as later:
        calls = [partial(add, cluster, "prefill", later.instance)] * 20
        responses = gather(calls)
        assert sorted(each.status for each in responses) == [200] + [400] * 19
        status = cluster.proxy.status()
        assert status["prefill_nodes"].count(later.instance) == 1
        assert len(status["instances"]) == 3


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_adding_takes_only_post(admin: Cluster, method: str) -> None:
    response = admin.request(method, "/instances/add", headers=WITH_KEY)
    assert response.status == 405
    assert response.header("allow") == "POST"
    assert admin.d[0].requests == []


def test_the_same_address_may_serve_both_roles() -> None:
    both = ScriptedEngine("decode")
    both.default = [http_response(200, b'{"kv_transfer_params":null}')]
    argv = arguments(both.instance, both.instance)
    with both, ProxyProcess(argv) as proxy:
        proxy.wait_all_up()
        assert proxy.request("POST", COMPLETIONS, BODY).status == 200
        assert len(both.requests) == 2
