# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Responses and messages on two legs, and a chat's tokens handed over.

Facts about the endpoints: vLLM 0.33, `entrypoints/openai/responses` and
`entrypoints/anthropic`. The simulated engine enforces them.
"""

from collections.abc import Iterator

import anthropic
import openai
import pytest
from rig import (
    CHAT,
    COMPLETIONS,
    JSON,
    Cluster,
    EngineRequest,
    Play,
    ProxyProcess,
    Step,
    dumps,
    hand_over,
    http_response,
    members,
    run_to_exit,
)
from sim_process import MODEL, SimEngine, SimProcess

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PARAMS = "kv_transfer_params"
ASK: JSON = {"model": MODEL, "input": "hello there", "max_output_tokens": 6}
SAY: JSON = {
    "model": MODEL,
    "max_tokens": 6,
    "messages": [{"role": "user", "content": "hello there"}],
}
# Seconds between probes, so that who is down is soon known to be.
EAGER = {"PROBE_INTERVAL_UP": 0.05}
PUSH = ["--kv-connector", "nixl-push", "--prefill-engine-id", "engine-0"]
PUSH += ["--prefill-kv-host", "127.0.0.1"]


def arguments(sim: SimProcess) -> list[str]:
    """The proxy's command line for simulated engines."""
    argv = ["--model", MODEL, "--prefill", *(each.instance for each in sim.p)]
    return [*argv, "--decode", *(each.instance for each in sim.d)]


@pytest.fixture(scope="module")
def sim() -> Iterator[SimProcess]:
    with SimProcess(prefill=1, decode=3) as engines:
        yield engines


@pytest.fixture
def proxy(sim: SimProcess) -> Iterator[ProxyProcess]:
    sim.reset()
    with ProxyProcess(arguments(sim)) as process:
        yield process


def url(proxy: ProxyProcess) -> str:
    return f"http://127.0.0.1:{proxy.address[1]}"


# --- Bodies ---------------------------------------------------------------------------

TOOLS = b'"tools":[{"type":"function","name":"f"}],"tool_choice":"auto"'
LEG_TABLE = {
    "responses": (
        RESPONSES,
        b'{"input":"a","max_output_tokens":64,"stream":true,"store":true,%b}' % TOOLS,
        b'{"input":"a","max_output_tokens":1,"stream":false,"store":false,%b}' % TOOLS,
    ),
    "responses_without_a_limit": (
        RESPONSES,
        b'{"input":[{"role":"user","content":"a"}],"instructions":"b",'
        b'"background":false,"previous_response_id":null,"top_logprobs":2}',
        b'{"input":[{"role":"user","content":"a"}],"instructions":"b",'
        b'"background":false,"previous_response_id":null,'
        b'"max_output_tokens":1,"stream":false,"store":false}',
    ),
    "responses_keep_their_own_stream_options": (
        RESPONSES,
        b'{"input":"a","stream_options":{"include_obfuscation":false}}',
        b'{"input":"a","max_output_tokens":1,"stream":false,"store":false}',
    ),
    "messages": (
        MESSAGES,
        b'{"messages":[],"max_tokens":64,"stop_sequences":["x"],"stream":true,'
        b'"system":"s","thinking":{"type":"enabled","budget_tokens":32}}',
        b'{"messages":[],"max_tokens":1,"stream":false,'
        b'"system":"s","thinking":{"type":"enabled","budget_tokens":32}}',
    ),
}


@pytest.mark.parametrize("name", LEG_TABLE)
def test_bodies_of_both_legs(pair: Cluster, name: str) -> None:
    path, client, prefill = LEG_TABLE[name]
    assert pair.post(path, client).status == 200
    [p], [d] = pair.p[0].requests, pair.d[0].requests
    of_prefill, of_decode = p.members(), d.members()
    assert of_decode.pop(PARAMS) == p.handed_over()
    assert p.json()[PARAMS]["do_remote_decode"] is True
    del of_prefill[PARAMS]
    assert (of_prefill, of_decode) == (members(prefill), members(client))
    assert p.header("X-Request-Id") == d.header("X-Request-Id")


@pytest.mark.parametrize(
    "extra",
    [
        b'"background":true',
        b'"previous_response_id":"resp_1"',
        b'"tools":[{"type":"function","name":"f"},{"type":"web_search"}]',
        b'"tools":[{"type":"mcp","server_label":"s"}]',
        b'"tools":[{"name":"without a type"}]',
        b'"tools":7',
    ],
)
def test_a_response_that_one_hand_over_cannot_serve(
    pair: Cluster, extra: bytes
) -> None:
    body = b'{"input":"a",%b}' % extra
    assert pair.post(RESPONSES, body).status == 200
    assert pair.p[0].requests == []
    assert [each.members() for each in pair.d[0].requests] == [members(body)]


def test_engines_that_match_request_ids_get_responses_on_one_leg() -> None:
    with Cluster(1, 1, args=PUSH) as cluster:
        assert cluster.post(RESPONSES, b'{"input":"a"}').status == 200
        assert cluster.p[0].requests == []
        assert cluster.post(MESSAGES, b'{"messages":[]}').status == 200
        assert len(cluster.p[0].requests) == 1
        assert len(cluster.d[0].requests) == 2


# --- The clients as judges ------------------------------------------------------------


def test_the_openai_client_gets_the_same_responses(
    proxy: ProxyProcess, sim: SimProcess
) -> None:
    texts = []
    for base in (url(proxy), f"http://{sim.d[0].instance}"):
        with openai.OpenAI(api_key="k", base_url=f"{base}/v1") as client:
            whole = client.responses.create(**ASK)
            events = list(client.responses.create(**ASK, stream=True))
            assert events[-1].type == "response.completed"
            texts += [whole.output_text, events[-1].response.output_text]
    assert len(set(texts)) == 1
    assert texts[0]
    assert sim.p[0].stats()["handovers"]["used"] == 2


def test_the_anthropic_client_gets_the_same_messages(
    proxy: ProxyProcess, sim: SimProcess
) -> None:
    texts = []
    for base in (url(proxy), f"http://{sim.d[0].instance}"):
        with anthropic.Anthropic(api_key="k", base_url=base) as client:
            whole = client.messages.create(**SAY).content[0]
            assert whole.type == "text"
            with client.messages.stream(**SAY) as stream:
                texts += [whole.text, "".join(stream.text_stream)]
    assert len(set(texts)) == 1
    assert texts[0]
    assert sim.p[0].stats()["handovers"]["used"] == 2


def test_errors_reach_the_anthropic_client_as_its_exceptions(
    proxy: ProxyProcess,
) -> None:
    with anthropic.Anthropic(api_key="k", base_url=url(proxy)) as client:
        with pytest.raises(anthropic.NotFoundError, match="nobody"):
            client.messages.create(**SAY | {"model": "nobody"})
        assert client.messages.create(**SAY).stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "hello", "max_tokens": "many"}),
        (COMPLETIONS, {"prompt": "hello", "max_tokens": 4, "min_tokens": 9}),
        (CHAT, {"messages": SAY["messages"], "top_logprobs": 2}),
        (MESSAGES, SAY | {"max_tokens": "many"}),
        (RESPONSES, ASK | {"max_output_tokens": "many"}),
    ],
)
def test_what_decode_refuses_leaves_nothing_on_prefill(
    sim: SimProcess, proxy: ProxyProcess, path: str, body: JSON
) -> None:
    # Prefill takes it: its leg has none of these values.
    assert proxy.request("POST", path, body).status == 400
    handovers = sim.p[0].wait({"handovers.pinned": 0})["handovers"]
    assert (handovers["made"], handovers["released"]) == (1, 1)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        (MESSAGES, {"type", "error"}),
        (f"{MESSAGES}/count_tokens", {"type", "error"}),
        (RESPONSES, {"error"}),
    ],
)
def test_an_error_of_the_proxy_has_the_shape_of_its_endpoint(
    path: str, shape: set[str]
) -> None:
    with Cluster(limits=EAGER) as pair:
        for body in (b"{", b'{"a":1,}'):
            refused = pair.post(path, body)
            assert (refused.status, set(refused.json())) == (400, shape)
            assert {"type", "message"} <= set(refused.json()["error"])
        for each in pair.engines:
            each.refuse()
            each.drop_connections()
            pair.proxy.wait_state(each, "down")
        nobody = pair.post(path, b'{"model":"m"}')
        assert (nobody.status, set(nobody.json())) == (503, shape)
        assert len(pair.d[0].requests) == 0


# --- Responses stay with the engine that made them ------------------------------------


def holder(sim: SimProcess, id: str) -> SimEngine:
    """The engine that holds a response, by its own word."""
    [found] = [d for d in sim.d if d.request("GET", f"/v1/responses/{id}").status < 300]
    return found


def hits(sim: SimProcess) -> list[int]:
    """How many requests for responses each D had."""
    counts = [each.stats()["requests"].items() for each in sim.d]
    return [sum(n for name, n in each if RESPONSES in name) for each in counts]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_had_from_the_engine_that_made_it(
    proxy: ProxyProcess, sim: SimProcess, stream: bool
) -> None:
    with openai.OpenAI(api_key="k", base_url=f"{url(proxy)}/v1") as client:
        for _ in range(4):
            if stream:
                *_, last = client.responses.create(**ASK, stream=True)
                assert last.type == "response.completed"
                first = last.response
            else:
                first = client.responses.create(**ASK)
            at = sim.d.index(holder(sim, first.id))
            before = hits(sim)
            assert client.responses.retrieve(first.id).output_text == first.output_text
            assert client.responses.cancel(first.id).id == first.id
            more = ASK | {"previous_response_id": first.id}
            second = client.responses.create(**more)
            more["previous_response_id"] = second.id
            client.responses.create(**more)
            asked = [after - old for old, after in zip(before, hits(sim))]
            assert asked == [4 if index == at else 0 for index in range(3)]


def test_a_proxy_that_was_not_there_finds_the_engine(
    proxy: ProxyProcess, sim: SimProcess
) -> None:
    for _ in range(3):
        made = proxy.request("POST", RESPONSES, ASK).json()
        with ProxyProcess(arguments(sim)) as other:
            found = other.request("GET", f"{RESPONSES}/{made['id']}")
            assert (found.status, found.json()["id"]) == (200, made["id"])
            more = ASK | {"previous_response_id": made["id"]}
            assert other.request("POST", RESPONSES, more).status == 200


def test_a_response_that_nobody_holds_is_the_engines_404(
    proxy: ProxyProcess, sim: SimProcess
) -> None:
    answer = proxy.request("GET", f"{RESPONSES}/resp_unknown")
    wanted = sim.d[0].request("GET", f"{RESPONSES}/resp_unknown")
    assert (answer.status, answer.body) == (404, wanted.body)
    assert hits(sim) == [2, 1, 1]


def test_a_response_whose_engine_is_down_is_503() -> None:
    with Cluster(1, 2, limits=EAGER) as cluster:
        cluster.d[0].answer(http_response(200, {"id": "resp_1"}))
        assert cluster.post(RESPONSES, b'{"input":"a"}').status == 200
        cluster.d[0].refuse()
        cluster.d[0].drop_connections()
        cluster.proxy.wait_state(cluster.d[0], "down")
        assert cluster.get(f"{RESPONSES}/resp_1").status == 503
        assert cluster.d[1].requests == []


def test_the_oldest_of_many_responses_are_looked_for() -> None:
    with Cluster(1, 2, limits={"MAX_HOLDERS": 1}) as cluster:
        d0, d1 = cluster.d
        for name, engine in (("resp_1", d0), ("resp_2", d1)):
            engine.answer(http_response(200, {"id": name}))
            assert cluster.post(RESPONSES, b'{"input":"a"}').status == 200
        d0.answer(http_response(404, {}))
        d1.answer(http_response(404, {}))
        assert cluster.get(f"{RESPONSES}/resp_1").status == 404
        assert [len(each.requests) for each in cluster.d] == [2, 2]
        assert cluster.get(f"{RESPONSES}/resp_2").status == 200
        assert [len(each.requests) for each in cluster.d] == [2, 3]


# --- Token hand-over ------------------------------------------------------------------

TOKENS = ["--token-handover"]
TALK = b'{"messages":[{"role":"user","content":"hi"}]}'


def with_tokens(tokens: object) -> Play:
    """A P's answer that has these `prompt_token_ids`."""

    def play(request: EngineRequest) -> list[Step]:
        params = hand_over(request)
        return [http_response(200, {PARAMS: params, "prompt_token_ids": tokens})]

    return play


def test_decode_gets_the_tokens_that_prefill_made() -> None:
    with Cluster(1, 1, args=TOKENS) as cluster:
        cluster.p[0].answer(with_tokens([1, 22, 333]))
        assert cluster.post(CHAT, TALK).status == 200
        [p], [d] = cluster.p[0].requests, cluster.d[0].requests
        assert p.json()["return_token_ids"] is True
        params = d.json()[PARAMS]
        assert params.pop("prompt_token_ids") == [1, 22, 333]
        assert dumps(params) == p.handed_over()
        assert d.members().keys() == members(TALK).keys() | {PARAMS}


@pytest.mark.parametrize("tokens", [None, [], "abc", {"a": 1}, 7])
def test_without_usable_tokens_the_hand_over_stays_as_it_is(tokens: object) -> None:
    with Cluster(1, 1, args=TOKENS) as cluster:
        cluster.p[0].answer(with_tokens(tokens))
        assert cluster.post(CHAT, TALK).status == 200
        assert cluster.d[0].requests[0].members()[PARAMS] == (
            cluster.p[0].requests[0].handed_over()
        )


def test_only_chats_are_handed_over_in_tokens() -> None:
    with Cluster(1, 1, args=TOKENS) as cluster:
        for path in (COMPLETIONS, RESPONSES, MESSAGES):
            assert cluster.post(path, b'{"prompt":"a"}').status == 200
        for p in cluster.p[0].requests:
            assert "return_token_ids" not in p.json()


def test_tokens_are_not_for_connectors_that_work_in_pairs() -> None:
    argv = ["--model", "m", "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2"]
    status, message = run_to_exit([*argv, *PUSH, *TOKENS])
    assert status == 1
    assert "--token-handover wants --kv-connector auto" in message
