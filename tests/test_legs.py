# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What each leg carries: bodies as literal tables, headers, hand-overs, pairing.

Bodies are compared member by member as raw bytes, so a number that was parsed and
written again, or a member nobody asked for, fails.
"""

import json
import threading
from collections import Counter
from functools import partial

import pytest
from rig import (
    CHAT,
    COMPLETIONS,
    HANG_GUARD,
    JSON,
    Cluster,
    End,
    EngineRequest,
    Gate,
    RawClient,
    Response,
    ScriptedEngine,
    Step,
    dumps,
    gather,
    hand_over,
    http_response,
    members,
    openai_error,
)

PARAMS = "kv_transfer_params"
# NIXL's six keys, all of them (vLLM 0.33, disagg_proxy_multiturn.py).
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def without_params(leg: EngineRequest) -> dict[str, bytes]:
    """The members of a leg's body but for `kv_transfer_params`."""
    return {name: value for name, value in leg.members().items() if name != PARAMS}


def legs_of(cluster: Cluster) -> tuple[EngineRequest, EngineRequest]:
    """The P and the D request of the one exchange that a test made."""
    assert [len(each.requests) for each in cluster.engines] == [1, 1]
    return cluster.p[0].requests[0], cluster.d[0].requests[0]


# --- Bodies ---------------------------------------------------------------------------

# Path, the client's body, and the body of the P leg but for its kv_transfer_params.
# The body of the D leg is the client's.
LEG_TABLE = {
    "b01_only_max_completion_tokens": (
        CHAT,
        b'{"model":"m","messages":[],"max_completion_tokens":64}',
        b'{"model":"m","messages":[],"max_completion_tokens":1,'
        b'"max_tokens":1,"stream":false}',
    ),
    "b01_both_limits": (
        CHAT,
        b'{"messages":[],"max_completion_tokens":64,"max_tokens":32}',
        b'{"messages":[],"max_completion_tokens":1,"max_tokens":1,"stream":false}',
    ),
    "b01_completion_with_the_chat_limit": (
        COMPLETIONS,
        b'{"prompt":"a","max_completion_tokens":64}',
        b'{"prompt":"a","max_completion_tokens":1,"max_tokens":1,"stream":false}',
    ),
    "b02_min_tokens": (
        COMPLETIONS,
        b'{"prompt":"a","max_tokens":64,"min_tokens":64,"ignore_eos":true}',
        b'{"prompt":"a","max_tokens":1,"ignore_eos":true,"stream":false}',
    ),
    "b02_min_completion_tokens": (
        CHAT,
        b'{"messages":[],"max_completion_tokens":9,"min_completion_tokens":9}',
        b'{"messages":[],"max_completion_tokens":1,"max_tokens":1,"stream":false}',
    ),
    "b03_stream_with_usage": (
        CHAT,
        b'{"messages":[],"stream":true,"stream_options":'
        b'{"include_usage":true,"continuous_usage_stats":true}}',
        b'{"messages":[],"max_tokens":1,"stream":false}',
    ),
    "b03_stream_options_null": (
        CHAT,
        b'{"messages":[],"stream_options":null}',
        b'{"messages":[],"max_tokens":1,"stream":false}',
    ),
    "b14_n_and_best_of_one": (
        COMPLETIONS,
        b'{"prompt":"a","n":1,"best_of":1}',
        b'{"prompt":"a","n":1,"max_tokens":1,"stream":false}',
    ),
    "b28_limit_absent": (
        COMPLETIONS,
        b'{"prompt":"a"}',
        b'{"prompt":"a","max_tokens":1,"stream":false}',
    ),
    "b28_limit_null": (
        COMPLETIONS,
        b'{"prompt":"a","max_tokens":null}',
        b'{"prompt":"a","max_tokens":1,"stream":false}',
    ),
    "b28_limit_one": (
        COMPLETIONS,
        b'{"prompt":"a","max_tokens":1}',
        b'{"prompt":"a","max_tokens":1,"stream":false}',
    ),
    "b28_limit_two": (
        COMPLETIONS,
        b'{"prompt":"a","max_tokens":2}',
        b'{"prompt":"a","max_tokens":1,"stream":false}',
    ),
    "b28_chat_limits_null": (
        CHAT,
        b'{"messages":[],"max_tokens":null,"max_completion_tokens":null}',
        b'{"messages":[],"max_tokens":1,"max_completion_tokens":1,"stream":false}',
    ),
    "what_a_one_token_answer_cannot_have": (
        COMPLETIONS,
        b'{"prompt":"a","logprobs":3,"stop":["\\n"],"stop_token_ids":[2],'
        b'"prompt_logprobs":null}',
        b'{"prompt":"a","max_tokens":1,"stream":false}',
    ),
    "chat_logprobs": (
        CHAT,
        b'{"messages":[],"logprobs":true,"top_logprobs":5}',
        b'{"messages":[],"max_tokens":1,"stream":false}',
    ),
    "b45_echo_alone": (
        COMPLETIONS,
        b'{"prompt":"a","echo":true}',
        b'{"prompt":"a","max_tokens":1,"stream":false}',
    ),
    "b45_logprobs_without_echo": (
        COMPLETIONS,
        b'{"prompt":"a","echo":false,"logprobs":2}',
        b'{"prompt":"a","max_tokens":1,"stream":false}',
    ),
    "b46_one_prompt_in_a_list": (
        COMPLETIONS,
        b'{"prompt":["a"]}',
        b'{"prompt":["a"],"max_tokens":1,"stream":false}',
    ),
    "b46_one_prompt_in_tokens": (
        COMPLETIONS,
        b'{"prompt":[1,2,3]}',
        b'{"prompt":[1,2,3],"max_tokens":1,"stream":false}',
    ),
    "b46_one_prompt_in_tokens_in_a_list": (
        COMPLETIONS,
        b'{"prompt":[ [1, 2] ]}',
        b'{"prompt":[ [1, 2] ],"max_tokens":1,"stream":false}',
    ),
    "b29_a_tool_that_is_not_forced": (
        CHAT,
        b'{"messages":[],"tools":[{"type":"function","function":{"name":"f"}}],'
        b'"tool_choice":"auto"}',
        b'{"messages":[],"tools":[{"type":"function","function":{"name":"f"}}],'
        b'"tool_choice":"auto","max_tokens":1,"stream":false}',
    ),
    "what_shapes_the_prompt_stays": (
        CHAT,
        b'{"messages":[],"response_format":{"type":"json_object"},'
        b'"structured_outputs":{"choice":["a"]},"chat_template":"x",'
        b'"chat_template_kwargs":{"enable_thinking":false},"cache_salt":"s",'
        b'"add_generation_prompt":true,"mm_processor_kwargs":{},"priority":-1,'
        b'"reasoning_effort":"low","truncate_prompt_tokens":4}',
        b'{"messages":[],"response_format":{"type":"json_object"},'
        b'"structured_outputs":{"choice":["a"]},"chat_template":"x",'
        b'"chat_template_kwargs":{"enable_thinking":false},"cache_salt":"s",'
        b'"add_generation_prompt":true,"mm_processor_kwargs":{},"priority":-1,'
        b'"reasoning_effort":"low","truncate_prompt_tokens":4,'
        b'"max_tokens":1,"stream":false}',
    ),
    "b55_values_keep_their_bytes": (
        CHAT,
        b'{"messages":[{"role":"user","content":"\\ud83d caf\\u00e9 \xc3\xa9 \xf0\x9f'
        b'\x98\x80 \\/"}],"seed":9223372036854775807,"temperature":1e-7,"top_p":0.10,'
        b'"logit_bias":{"50256":-100,"1":1E2},"vendor":{"a":{"b":[ 1 ,\t2 ]},"a ":-0},'
        b'"big":123456789012345678901234567890,"exact":0.1000000000000000055511151}',
        b'{"messages":[{"role":"user","content":"\\ud83d caf\\u00e9 \xc3\xa9 \xf0\x9f'
        b'\x98\x80 \\/"}],"seed":9223372036854775807,"temperature":1e-7,"top_p":0.10,'
        b'"logit_bias":{"50256":-100,"1":1E2},"vendor":{"a":{"b":[ 1 ,\t2 ]},"a ":-0},'
        b'"big":123456789012345678901234567890,"exact":0.1000000000000000055511151,'
        b'"max_tokens":1,"stream":false}',
    ),
    "white_space_around_members": (
        COMPLETIONS,
        b' {\r\n\t"prompt" : "a" , "max_tokens"\n:\n7 } \n',
        b'{"prompt":"a","max_tokens":1,"stream":false}',
    ),
}


@pytest.mark.parametrize("name", LEG_TABLE)
def test_bodies_of_both_legs(pair: Cluster, name: str) -> None:
    path, client, prefill = LEG_TABLE[name]
    response = pair.post(path, client)
    assert (response.status, response.end) == (200, End.COMPLETE), response
    p, d = legs_of(pair)
    assert without_params(p) == members(prefill)
    assert p.json()[PARAMS] == PREFILL_PARAMS
    assert without_params(d) == members(client)
    assert d.members()[PARAMS] == p.handed_over()
    assert p.line == d.line == f"POST {path} HTTP/1.1".encode()


@pytest.mark.parametrize(
    ("client", "seen"),
    [
        (b'{"prompt":"a","max_tokens":5,"max_tokens":7}', b"7"),
        (b'{"prompt":"a","max_tokens":5,"max\\u005ftokens":7}', b"7"),
        (b'{"prompt":"a","max\\u005ftokens":5,"max_tokens":7}', b"7"),
    ],
)
def test_the_last_of_duplicate_members_wins(
    pair: Cluster, client: bytes, seen: bytes
) -> None:
    assert pair.post(COMPLETIONS, client).status == 200
    p, d = legs_of(pair)
    # `members` refuses a body that still has a name twice.
    assert p.members()["max_tokens"] == b"1"
    assert d.members()["max_tokens"] == seen


def test_b03_the_usage_chunk_arrives(pair: Cluster) -> None:
    body: JSON = {"messages": [], "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    response = pair.post(CHAT, body)
    assert response.header("content-type") == "text/event-stream; charset=utf-8"
    *chunks, last = response.events()
    assert last == "[DONE]"
    assert "usage" in json.loads(chunks[-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_b28_a_null_stream_or_limit_is_no_error(
    pair: Cluster, path: str, stream: bool
) -> None:
    body: JSON = {"max_tokens": None, "stream": stream or None}
    assert pair.post(path, body).status == 200
    p, d = legs_of(pair)
    assert p.members()["stream"] == b"false"
    assert without_params(d) == members(dumps(body))


def test_an_escaped_path_is_the_same_route(pair: Cluster) -> None:
    assert pair.post("/v1/%63ompletions", b'{"prompt":"a"}').status == 200
    p, d = legs_of(pair)
    assert d.members()[PARAMS] == p.handed_over()


def test_a_query_string_reaches_both_legs(pair: Cluster) -> None:
    assert pair.post(f"{COMPLETIONS}?a=%20&b", b'{"prompt":"a"}').status == 200
    for leg in legs_of(pair):
        assert leg.target == f"{COMPLETIONS}?a=%20&b"


# --- Bypass ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize(
    ("path", "extra"),
    [
        pytest.param(COMPLETIONS, b'"n":4', id="b14_n"),
        pytest.param(CHAT, b'"n":4', id="b14_chat_n"),
        pytest.param(COMPLETIONS, b'"n" : 2 ', id="b14_n_in_white_space"),
        # vLLM's validation turns these into the integer 4.
        pytest.param(COMPLETIONS, b'"n":"4"', id="b14_n_as_text"),
        pytest.param(COMPLETIONS, b'"n":4.0', id="b14_n_as_float"),
        pytest.param(COMPLETIONS, b'"n":1,"n":4', id="b14_n_twice"),
        pytest.param(COMPLETIONS, b'"best_of":4', id="b14_best_of"),
        pytest.param(COMPLETIONS, b'"use_beam_search":true', id="beam_search"),
        # vLLM's validation takes these for true.
        pytest.param(COMPLETIONS, b'"use_beam_search":1', id="beam_search_1"),
        pytest.param(COMPLETIONS, b'"use_beam_search":"True"', id="beam_search_text"),
        pytest.param(CHAT, b'"prompt_logprobs":5', id="b45_prompt_logprobs"),
        # 0 asks for the log-probabilities of the prompt's own tokens.
        pytest.param(COMPLETIONS, b'"prompt_logprobs":0', id="b45_prompt_logprobs_0"),
        pytest.param(COMPLETIONS, b'"echo":true,"logprobs":3', id="b45_echo_logprobs"),
        pytest.param(
            COMPLETIONS, b'"echo":true,"logprobs":0', id="b45_echo_logprobs_0"
        ),
        pytest.param(COMPLETIONS, b'"echo":1,"logprobs":3', id="b45_echo_1_logprobs"),
        pytest.param(
            COMPLETIONS, b'"echo":"yes","logprobs":3', id="b45_echo_text_logprobs"
        ),
        pytest.param(
            COMPLETIONS,
            b'"echo":true,"logprobs":3,"max_tokens":1',
            id="b45_echo_logprobs_one_token",
        ),
        pytest.param(
            CHAT,
            b'"echo":true,"logprobs":true,"top_logprobs":2',
            id="b45_chat_echo_logprobs",
        ),
        # vLLM's chat route reads `top_logprobs`, 0 by default, as soon as there is
        # `echo` (ChatCompletionRequest.to_sampling_params).
        pytest.param(CHAT, b'"echo":true', id="b45_chat_echo_alone"),
        pytest.param(COMPLETIONS, b'"prompt":["a","b","c"]', id="b46_texts"),
        pytest.param(COMPLETIONS, b'"prompt":[[1,2],[3]]', id="b46_token_lists"),
        pytest.param(COMPLETIONS, b'"prompt": [ [1] , "b" ]', id="b46_mixed"),
    ],
)
def test_one_hand_over_cannot_serve_it(
    pair: Cluster, path: str, extra: bytes, stream: bytes
) -> None:
    client = b'{"model":"m","kv_transfer_params":{"a":1},"stream":%b,%b}'
    pair.d[0].answer(http_response(200, {"from": "D"}))
    response = pair.post(path, client % (stream, extra))
    assert response.json() == {"from": "D"}
    assert pair.p[0].requests == []
    [d] = pair.d[0].requests
    final = b"{%b}" % extra.rpartition(b'"n":1,')[2]
    expected = b'{"model":"m","stream":%b}' % stream
    assert d.members() == members(expected) | members(final)


def test_b14_all_choices_arrive(pair: Cluster) -> None:
    response = pair.post(CHAT, {"messages": [], "n": 4, "temperature": 1})
    assert [each["index"] for each in response.json()["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "extra",
    [
        b'"use_beam_search":false',
        b'"prompt_logprobs":null',
        b'"echo":true,"logprobs":null',
        b'"n":null,"best_of":null',
    ],
)
def test_what_asks_for_nothing_is_no_bypass(pair: Cluster, extra: bytes) -> None:
    assert pair.post(COMPLETIONS, b'{"prompt":"a",%b}' % extra).status == 200
    p, _ = legs_of(pair)
    assert p.members().get("n", b"1") == b"1"


# --- Parameters that only the proxy may set -------------------------------------------

SMUGGLED = (
    b'{"kv_transfer_params":{"do_remote_prefill":true},"prompt":"a",'
    b'"ec_transfer_params":{"x":1},"\\u006bv_transfer_params":{"y":2},'
    b'"kv\\u005Ftransfer_params":3,"\\u0065c_transfer_params":null,'
    b'"nested":{"kv_transfer_params":{"z":[1]},"ec_transfer_params":1},'
    b'"kv_transfer_params":{"again":1},"KV_TRANSFER_PARAMS":1}'
)
KEPT = (
    b'{"prompt":"a","nested":{"kv_transfer_params":{"z":[1]},"ec_transfer_params":1},'
    b'"KV_TRANSFER_PARAMS":1}'
)


def test_a_clients_transfer_params_never_reach_a_leg(pair: Cluster) -> None:
    assert pair.post(COMPLETIONS, SMUGGLED).status == 200
    p, d = legs_of(pair)
    assert p.json()[PARAMS] == PREFILL_PARAMS
    assert d.members()[PARAMS] == p.handed_over()
    prefill_only = members(b'{"max_tokens":1,"stream":false}')
    assert without_params(p) == members(KEPT) | prefill_only
    assert without_params(d) == members(KEPT)


@pytest.mark.parametrize(
    "path",
    [
        "/tokenize",
        "/invocations",
        "/v1/responses/resp_1/cancel",
        "/v1/messages/count_tokens",
        "/inference/v1/generate",
        "/v1/embeddings?x=1",
        "/v1/completions/",
        "/unheard/of",
    ],
)
def test_a_clients_transfer_params_never_reach_another_route(
    pair: Cluster, path: str
) -> None:
    assert pair.post(path, SMUGGLED).status == 200
    assert pair.p[0].requests == []
    [d] = pair.d[0].requests
    assert d.target == path
    assert d.members() == members(KEPT)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "GET"])
@pytest.mark.parametrize(
    "content_type",
    ["application/json; charset=utf-8", "APPLICATION/JSON", "text/plain", "a/b+json"],
)
def test_stripping_looks_at_the_body_not_at_its_label(
    pair: Cluster, method: str, content_type: str
) -> None:
    pair.request(method, "/invocations", SMUGGLED, {"Content-Type": content_type})
    [d] = pair.d[0].requests
    assert d.members() == members(KEPT)
    assert d.header("content-type") == content_type


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--x\r\nContent-Disposition: form-data\r\n\r\n\x00\xff\r\n--x--\r\n",
        b'[{"kv_transfer_params":1}]',
        b'"text"',
        b'{"a":1e-7 , "b" : 0.10}',
    ],
)
def test_a_body_without_transfer_params_reaches_another_route_as_it_is(
    pair: Cluster, body: bytes
) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert pair.request("POST", "/v1/audio/translations", body, headers).status == 200
    [d] = pair.d[0].requests
    assert d.body == body
    assert d.header("content-type") == headers["Content-Type"]


# --- Headers --------------------------------------------------------------------------

END_TO_END = {
    "Authorization": "Bearer k1",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "a=1,b=2",
    "X-Session-ID": "s",
    "X-Vllm-Priority": "3",
    "User-Agent": "test/1",
    "Accept": "*/*",
    "Cookie": "a=b; c=d",
    "X-Bytes": "caf\u00e9",
}
OWNED = {
    "X-data-parallel-rank": "7",
    "Connection": "keep-alive, X-Hop",
    "X-Hop": "1",
    "Keep-Alive": "timeout=5",
    "TE": "trailers",
    "Proxy-Authorization": "Basic x",
    "Proxy-Connection": "keep-alive",
    "Upgrade": "h2c",
    "X-Request-Id": "mine",
    "Accept-Encoding": "gzip",
}


def test_headers_of_both_legs(pair: Cluster) -> None:
    response = pair.post(COMPLETIONS, b'{"prompt":"a"}', END_TO_END | OWNED)
    assert response.status == 200
    assert response.header("x-request-id") == "mine"
    p, d = legs_of(pair)
    for leg, engine in ((p, pair.p[0]), (d, pair.d[0])):
        for name, value in END_TO_END.items():
            assert leg.header(name) == value.encode().decode("latin-1")
        for name in ("x-data-parallel-rank", "x-hop", "keep-alive", "te", "upgrade"):
            assert leg.header(name) is None, name
        for name in ("proxy-connection", "proxy-authorization", "transfer-encoding"):
            assert leg.header(name) is None, name
        assert leg.header("host") == engine.instance
        assert leg.header("content-type") == "application/json"
        assert leg.header("content-length") == str(len(leg.body))
    assert p.header("accept-encoding") == "identity"
    assert d.header("accept-encoding") == "gzip"


def test_repeated_headers_stay_repeated(pair: Cluster) -> None:
    body = b'{"prompt":"a"}'
    with pair.connect() as client:
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nX-A: 1\r\nx-a: 2\r\n"
            b"Content-Type: application/json\r\nX-A:3\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        assert client.reader().finish().status == 200
    for leg in legs_of(pair):
        values = [value for name, value in leg.headers if name.lower() == b"x-a"]
        assert values == [b"1", b"2", b"3"]


def test_both_legs_have_the_same_fresh_request_id(pair: Cluster) -> None:
    # No client gets to choose the id that an engine keys its blocks by.
    mine = {"X-Request-Id": "00000000000000000000000000000000"}
    for _ in range(3):
        assert pair.post(COMPLETIONS, b'{"prompt":"a"}', mine).status == 200
    ids = [each.header("x-request-id") for each in pair.p[0].requests]
    assert ids == [each.header("x-request-id") for each in pair.d[0].requests]
    assert len(set(ids)) == 3
    for each in ids:
        assert each is not None
        assert len(each) == 32 and set(each) <= set("0123456789abcdef")
        assert each != mine["X-Request-Id"]


# --- Usage (B92) ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_b92_usage_is_what_decode_says(pair: Cluster, stream: bool) -> None:
    def usage(cached: int) -> JSON:
        details = {"cached_tokens": cached}
        return {"prompt_tokens": 64, "prompt_tokens_details": details}

    # Prefill found 16 tokens in its cache; all but one come to decode with the KV.
    pair.p[0].answer(
        lambda leg: [
            http_response(
                200, {"usage": usage(16), "kv_transfer_params": hand_over(leg)}
            )
        ]
    )
    said = dumps({"choices": [], "usage": usage(63)})
    kind = "application/json"
    if stream:
        said, kind = b"data: %s\n\ndata: [DONE]\n\n" % said, "text/event-stream"
    pair.d[0].answer(http_response(200, said, {"Content-Type": kind}))
    response = pair.post(COMPLETIONS, {"prompt": "a", "stream": stream})
    assert (response.header("content-type"), response.body) == (kind, said)
    assert legs_of(pair)[1].members()[PARAMS]


# --- Engine credentials (B26) ---------------------------------------------------------


def test_b26_the_clients_key_reaches_both_legs(pair: Cluster) -> None:
    for engine in pair.engines:
        engine.api_key = "k1"
    response = pair.post(CHAT, {"messages": []}, {"Authorization": "Bearer k1"})
    assert response.status == 200


def test_b26_without_a_key_the_engine_decides(pair: Cluster) -> None:
    for engine in pair.engines:
        engine.api_key = "k1"
    response = pair.post(CHAT, {"messages": []})
    assert (response.status, response.json()) == (401, {"error": "Unauthorized"})
    [p] = pair.p[0].requests
    assert p.header("authorization") is None
    for each in (*p.headers, *(h for probe in pair.d[0].probes for h in probe.headers)):
        assert b"None" not in each[1]
    assert pair.d[0].requests == []


def test_b26_the_environments_key_serves_every_engine_request() -> None:
    def guarded(role: str) -> ScriptedEngine:
        engine = ScriptedEngine(role)
        engine.api_key = "k1"
        return engine

    third = guarded("decode")
    with (
        third,
        Cluster(
            [guarded("prefill")],
            [guarded("decode")],
            env={"OPENAI_API_KEY": "k1", "ADMIN_API_KEY": "admin"},
        ) as cluster,
    ):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert cluster.post(CHAT, {"messages": []}, headers).status == 200
        assert cluster.request("POST", "/tokenize", {"prompt": "a"}).status == 200
        added = cluster.request(
            "POST",
            "/instances/add",
            {"type": "decode", "instance": third.instance},
            {"X-API-Key": "admin"},
        )
        assert added.status == 200, added
        seen = [
            request
            for engine in (*cluster.engines, third)
            for request in (*engine.probes, *engine.requests)
            if request.target.startswith("/v1/")
        ]
        assert {each.header("authorization") for each in seen} == {"Bearer k1"}
        assert "k1" not in "".join(cluster.proxy.log)


# --- Hand-overs -----------------------------------------------------------------------

USABLE: JSON = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2], [], [3]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.9",
    "remote_port": 5600,
}


def answer_with(params: bytes) -> Step:
    """A P answer whose hand-over is the given JSON text."""
    return http_response(200, b'{"id":"x","kv_transfer_params":%b,"z":1}' % params)


def post_through(cluster: Cluster, *steps: Step) -> Response:
    """One completion for which P plays `steps`."""
    cluster.p[0].answer(*steps)
    return cluster.post(COMPLETIONS, b'{"prompt":"a","max_tokens":4}')


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(dumps(USABLE), id="nested_and_empty_blocks"),
        pytest.param(dumps(USABLE | {"remote_block_ids": [1, 2]}), id="flat_blocks"),
        pytest.param(
            dumps(USABLE)[:-1]
            + b',"tp_size":2,"new":{"deep":[{"x":9007199254740993}]}}',
            id="unknown_and_big",
        ),
        pytest.param(
            b" " + dumps(USABLE)[:-1] + b' , "f" : 1e-7,"s":"\\u00e9 \\/", "n":null}',
            id="bytes_kept",
        ),
        pytest.param(dumps(USABLE)[:-1] + b',"s":"\\ud83d"}', id="lone_surrogate"),
        pytest.param(
            b'{"do_remote_prefill" : true ,' + dumps(USABLE)[1:].split(b",", 1)[1],
            id="white_space",
        ),
    ],
)
def test_b20_the_hand_over_reaches_d_as_it_is(pair: Cluster, params: bytes) -> None:
    assert post_through(pair, answer_with(params)).status == 200
    _, d = legs_of(pair)
    assert d.members()[PARAMS] == params.strip()
    assert without_params(d) == members(b'{"prompt":"a","max_tokens":4}')


def test_b20_nothing_connects_to_what_a_hand_over_names(pair: Cluster) -> None:
    with ScriptedEngine("prefill", "127.0.0.3") as named:
        params = USABLE | {"remote_host": named.host, "remote_port": named.port}
        assert post_through(pair, answer_with(dumps(params))).status == 200
        _, d = legs_of(pair)
        assert d.json()[PARAMS] == params
        assert named.accepted == 0


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answer_with(b"null"), id="null"),
        pytest.param(answer_with(b"{}"), id="empty"),
        pytest.param(answer_with(b'{"do_remote_prefill":false}'), id="false"),
        pytest.param(
            answer_with(dumps(USABLE | {"do_remote_prefill": 1})), id="not_true"
        ),
        pytest.param(answer_with(b'{"remote_block_ids":[[1]]}'), id="no_claim"),
        pytest.param(http_response(200, b'{"id":"x"}'), id="absent"),
        pytest.param(http_response(200, b" {} "), id="empty_answer"),
    ],
)
def test_b19_no_hand_over_is_a_normal_outcome(pair: Cluster, answer: Step) -> None:
    assert post_through(pair, answer).status == 200
    _, d = legs_of(pair)
    assert d.members() == members(b'{"prompt":"a","max_tokens":4}')


def changed(**changes: object) -> Step:
    """A P answer with a hand-over that lacks (`...`) or changes some members."""
    params = {k: v for k, v in (USABLE | changes).items() if v is not ...}
    return answer_with(dumps(params))


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answer_with(b"[]"), id="list"),
        pytest.param(answer_with(b'"x"'), id="text"),
        pytest.param(answer_with(b"7"), id="number"),
        pytest.param(answer_with(b"true"), id="true"),
        pytest.param(answer_with(b'{"do_remote_prefill":true}'), id="only_the_claim"),
        pytest.param(changed(remote_block_ids=...), id="blocks_missing"),
        pytest.param(changed(remote_block_ids=None), id="blocks_null"),
        pytest.param(changed(remote_block_ids=[]), id="blocks_empty"),
        pytest.param(changed(remote_block_ids=[[None]]), id="blocks_of_null"),
        pytest.param(changed(remote_host="\ud83d"), id="host_with_half_an_emoji"),
        pytest.param(changed(remote_engine_id=False), id="engine_no_text"),
        pytest.param(changed(remote_port={}), id="port_no_number"),
        pytest.param(answer_with(dumps(USABLE)[:-1] + b',"x":"\xff"}'), id="not_utf_8"),
        pytest.param(changed(remote_engine_id=...), id="engine_missing"),
        pytest.param(changed(remote_engine_id=None), id="engine_null"),
        pytest.param(changed(remote_request_id=...), id="request_missing"),
        pytest.param(changed(remote_request_id=None), id="request_null"),
        pytest.param(changed(remote_port=...), id="port_missing"),
        pytest.param(changed(remote_port=None), id="port_null"),
        pytest.param(http_response(200, b"[]"), id="answer_is_a_list"),
        pytest.param(http_response(200, b"null"), id="answer_is_null"),
        pytest.param(http_response(200, b"busy"), id="answer_is_text"),
        pytest.param(http_response(200, b'{"kv_transfer_params":'), id="truncated"),
        pytest.param(http_response(200, b"{}{}"), id="two_objects"),
        pytest.param(http_response(200, b""), id="empty_body"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", id="204"),
        pytest.param(http_response(201, b"{}"), id="201"),
        pytest.param(http_response(206, b"{}"), id="206"),
        pytest.param(
            http_response(302, b"{}", {"Location": "/v1/completions"}), id="302"
        ),
        pytest.param(http_response(304), id="304"),
    ],
)
def test_b19_an_odd_prefill_answer_is_502(pair: Cluster, answer: Step) -> None:
    response = post_through(pair, answer)
    assert response.status == 502
    assert "Traceback" not in response.error()["message"]
    assert len(pair.p[0].requests) == 1
    assert pair.d[0].requests == []
    # Nobody was evicted for it.
    assert pair.post(COMPLETIONS, b'{"prompt":"a"}').status == 200


# --- The host that D fetches from (B21) -----------------------------------------------


def test_b21_a_real_host_is_kept(pair: Cluster) -> None:
    assert post_through(pair, answer_with(dumps(USABLE))).status == 200
    _, d = legs_of(pair)
    assert d.json()[PARAMS] == USABLE


@pytest.mark.parametrize("host", [..., None, ""])
@pytest.mark.parametrize("own", ["127.0.0.2", "::1"])
def test_b21_a_missing_host_is_filled_in(own: str, host: object) -> None:
    with Cluster([ScriptedEngine("prefill", own)]) as cluster:
        assert post_through(cluster, changed(remote_host=host)).status == 200
        _, d = legs_of(cluster)
        # Without brackets: those belong to URLs.
        assert d.json()[PARAMS] == USABLE | {"remote_host": own}


@pytest.mark.parametrize("host", [7, [1], {"a": 1}, True])
def test_b21_a_host_that_is_no_text_is_502(pair: Cluster, host: object) -> None:
    assert post_through(pair, changed(remote_host=host)).status == 502
    assert pair.d[0].requests == []


# --- Forced tool calls (B29) ----------------------------------------------------------

TOOLS = b'[{"type":"function","function":{"name":"f","parameters":{"a": 1e0}}}]'
CHOICES = [b'"required"', b'{"type":"function","function":{"name":"f"}}']


@pytest.mark.parametrize("choice", CHOICES)
def test_b29_a_forced_tool_is_a_normal_request(pair: Cluster, choice: bytes) -> None:
    body = b'{"messages":[],"tools":%b,"tool_choice":%b}' % (TOOLS, choice)
    assert pair.post(CHAT, body).status == 200
    p, d = legs_of(pair)
    for leg in (p, d):
        assert leg.members()["tools"] == TOOLS
        assert leg.members()["tool_choice"] == choice
    assert d.members()[PARAMS] == p.handed_over()


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("status", [500, 503])
def test_b29_an_old_engine_that_fails_on_it_is_left_out(
    quad: Cluster, choice: bytes, status: int
) -> None:
    refusal = http_response(status, openai_error(status, "cannot parse"))
    for engine in quad.p:
        engine.answer(refusal)
    body = b'{"messages":[],"tools":%b,"tool_choice":%b}' % (TOOLS, choice)
    response = quad.post(CHAT, body)
    assert response.status == 200
    [d] = [request for engine in quad.d for request in engine.requests]
    assert d.members() == members(body)


@pytest.mark.parametrize("choice", [b'"auto"', b'"none"', b"null"])
def test_b29_other_choices_excuse_no_error(pair: Cluster, choice: bytes) -> None:
    pair.p[0].answer(http_response(500, openai_error(500, "broken")))
    body = b'{"messages":[],"tools":%b,"tool_choice":%b}' % (TOOLS, choice)
    assert pair.post(CHAT, body).status == 500
    assert pair.d[0].requests == []


# --- Pairing --------------------------------------------------------------------------


def pairs(cluster: Cluster) -> Counter[tuple[int, int]]:
    """How often each P met each D, by index."""
    served = {
        request.header("x-request-id"): index
        for index, engine in enumerate(cluster.p)
        for request in engine.requests
    }
    return Counter(
        (served[request.header("x-request-id")], index)
        for index, engine in enumerate(cluster.d)
        for request in engine.requests
    )


def test_every_p_meets_every_d_in_2p2d(quad: Cluster) -> None:
    for _ in range(4):
        assert quad.post(COMPLETIONS, b'{"prompt":"a"}').status == 200
    assert pairs(quad) == {(0, 0): 1, (0, 1): 1, (1, 0): 1, (1, 1): 1}


@pytest.mark.parametrize(("prefill", "decode"), [(3, 2), (2, 3), (1, 3), (4, 2)])
def test_sequential_requests_spread_evenly(prefill: int, decode: int) -> None:
    every = prefill * decode
    with Cluster(prefill, decode) as cluster:
        for _ in range(5 * every):
            assert cluster.post(COMPLETIONS, b'{"prompt":"a"}').status == 200
        met = pairs(cluster)
    assert len(met) == every
    assert set(met.values()) == {5}


def test_concurrent_requests_spread_evenly() -> None:
    with Cluster(3, 2) as cluster:
        clients = [cluster.connect() for _ in range(60)]
        together = threading.Barrier(len(clients))

        def one(client: RawClient) -> Response:
            together.wait(HANG_GUARD)
            return client.post(COMPLETIONS, b'{"prompt":"a"}').finish()

        responses = gather(partial(one, client) for client in clients)
        for client in clients:
            client.close()
        assert {each.status for each in responses} == {200}
        assert [len(each.requests) for each in cluster.p] == [20, 20, 20]
        assert [len(each.requests) for each in cluster.d] == [30, 30]


def test_requests_in_flight_are_shown_per_instance(pair: Cluster) -> None:
    gate = Gate()
    pair.d[0].answer(gate, http_response(200, b"{}"))
    with pair.connect() as client:
        reader = client.post(COMPLETIONS, b'{"prompt":"a"}')
        pair.d[0].next_request()
        in_flight = {
            each["role"]: each["in_flight"] for each in pair.proxy.status()["instances"]
        }
        assert in_flight == {"prefill": 0, "decode": 1}
        gate.release()
        assert reader.finish().status == 200
