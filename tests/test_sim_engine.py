# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The simulated engine against the contracts it stands for, judged by h11."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
import sim_moriio
import zmq
from rig import (
    CHAT,
    COMPLETIONS,
    HANG_GUARD,
    JSON,
    End,
    RawClient,
    Response,
    chunk,
    dumps,
    http_request,
)
from sim_process import MODEL, SIM_ENGINE, SimEngine, SimProcess

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GARBAGE = "KVGARBAGE"
# The P leg's params as proxies send them.
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.fixture(scope="module")
def shared_sim() -> Iterator[SimProcess]:
    with SimProcess("--record", "10", decode=2) as sim:
        yield sim


@pytest.fixture
def sim(shared_sim: SimProcess) -> Iterator[SimProcess]:
    """1P2D without delays, shared by the module, with fresh figures."""
    shared_sim.reset()
    yield shared_sim


def text_of(response: Response, index: int = 0) -> str:
    assert response.status == 200, response
    assert response.end is End.COMPLETE, response
    text: str = response.json()["choices"][index]["text"]
    return text


def deltas(response: Response) -> list[JSON]:
    """The JSON events of a complete stream."""
    assert response.end is End.COMPLETE, response
    assert response.header("content-type") == "text/event-stream; charset=utf-8"
    *events, done = response.events()
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def streamed_text(response: Response, index: int = 0) -> str:
    choices = [choice for event in deltas(response) for choice in event["choices"]]
    return "".join(each["text"] for each in choices if each["index"] == index)


def hand_over(engine: SimEngine, prompt: str, **members: Any) -> JSON:
    """Prefills a prompt and returns what P hands over."""
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": ASK}
    response = engine.post(body | members)
    assert response.status == 200, response
    params: JSON = response.json()["kv_transfer_params"]
    return params


def decode(engine: SimEngine, prompt: str, params: Any, **members: Any) -> Response:
    body = {"prompt": prompt, "max_tokens": 2, "kv_transfer_params": params}
    return engine.post(body | members)


# --- Routes ---------------------------------------------------------------------------


def test_engine_describes_itself(sim: SimProcess) -> None:
    engine = sim.d[0]
    assert engine.request("GET", "/health").body == b""
    assert engine.request("GET", "/version").json() == {"version": "0.33.0"}
    assert engine.request("GET", "/load").json() == {"server_load": 0}
    models = engine.request("GET", "/v1/models").json()
    assert [each["id"] for each in models["data"]] == [MODEL]
    metrics = engine.request("GET", "/metrics").body.decode()
    line = f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0\n'
    assert line in metrics


@pytest.mark.parametrize(
    ("method", "target", "status", "body", "allow"),
    [
        ("GET", "/nothing", 404, b'{"detail":"Not Found"}', None),
        ("POST", "/health", 405, b'{"detail":"Method Not Allowed"}', "GET"),
        ("HEAD", "/health", 405, b"", "GET"),
        ("GET", COMPLETIONS, 405, b'{"detail":"Method Not Allowed"}', "POST"),
    ],
)
def test_router_refuses_as_fastapi_does(
    sim: SimProcess,
    method: str,
    target: str,
    status: int,
    body: bytes,
    allow: str | None,
) -> None:
    response = sim.d[0].request(method, target)
    assert (response.status, response.body) == (status, body)
    assert response.header("allow") == allow


def test_api_key_guards_the_model_routes_only() -> None:
    with SimProcess("--api-key", "k1", prefill=0) as sim:
        engine = sim.d[0]
        assert engine.request("GET", "/health").status == 200
        for headers in ({}, {"Authorization": "Bearer k2"}):
            refused = engine.request("GET", "/v1/models", headers=headers)
            assert refused.status == 401
            assert refused.body == b'{"error":"Unauthorized"}'
        accepted = engine.request(
            "GET", "/v1/models", headers={"Authorization": "Bearer k1"}
        )
        assert accepted.status == 200


# --- Answers --------------------------------------------------------------------------


def test_text_depends_on_the_prompt_and_nothing_else(sim: SimProcess) -> None:
    body: JSON = {"prompt": "hello", "max_tokens": 4}
    text = text_of(sim.p[0].post(body))
    assert text_of(sim.d[1].post(body | {"temperature": 0, "seed": 3})) == text
    assert text_of(sim.d[0].post(body | {"max_tokens": 8})).startswith(text)
    assert streamed_text(sim.d[0].post(body | {"stream": True})) == text
    assert text_of(sim.d[0].post(body | {"prompt": "hullo"})) != text
    assert text_of(sim.d[0].post(body | {"cache_salt": "s"})) != text


def test_text_does_not_depend_on_the_spelling_of_the_json(sim: SimProcess) -> None:
    spaced = json.dumps({"messages": HELLO, "max_tokens": 4}, indent=2).encode()
    compact = dumps({"max_tokens": 4, "messages": [dict(reversed(HELLO[0].items()))]})
    first, second = (sim.d[0].post(body, CHAT).json() for body in (spaced, compact))
    assert first["choices"] == second["choices"]


def test_token_ids_stand_for_their_text(sim: SimProcess) -> None:
    ids = sim.d[0].post({"prompt": "hello"}, "/tokenize").json()["tokens"]
    assert len(ids) == 2
    assert text_of(sim.d[0].post({"prompt": ids})) == text_of(
        sim.d[0].post({"prompt": "hello"})
    )
    text = sim.d[0].post(dumps({"tokens": ids}), "/detokenize").json()
    assert text == {"prompt": "hello"}


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_lists_and_n_give_indexed_choices(sim: SimProcess, stream: bool) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stream": stream}
    response = sim.d[0].post(body)
    read = streamed_text if stream else text_of
    texts = [read(response, index) for index in range(4)]
    assert len(set(texts)) == 4
    assert texts[0] == text_of(sim.d[0].post({"prompt": "a", "max_tokens": 3}))
    assert texts[2] == text_of(sim.d[0].post({"prompt": "b", "max_tokens": 3}))


def test_completion_carries_what_was_asked_for(sim: SimProcess) -> None:
    body = {"prompt": "hello", "max_tokens": 2, "echo": True, "logprobs": 1}
    choice = sim.d[0].post(body).json()["choices"][0]
    assert choice["text"].startswith("hello ")
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"][len("hello") :]
    assert choice["finish_reason"] == "length"
    body = {"prompt": "hello", "max_tokens": 0, "echo": True}
    assert text_of(sim.d[0].post(body)) == "hello"


def test_usage_comes_as_the_last_chunk(sim: SimProcess) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hello", "max_tokens": 3, "stream": True}
    events = deltas(sim.d[0].post(body | {"stream_options": options}))
    totals = [event["usage"]["completion_tokens"] for event in events]
    assert totals == [1, 2, 3, 3]
    assert events[-1]["choices"] == []


@pytest.mark.parametrize(
    ("members", "tokens", "reason", "stop_reason"),
    [
        ({}, 3, "stop", None),
        ({"ignore_eos": True}, 8, "length", None),
        ({"min_tokens": 5}, 5, "stop", None),
        ({"max_tokens": 2}, 2, "length", None),
        ({"stop": [".1"]}, 2, "stop", ".1"),
        ({"stop_token_ids": [101]}, 2, "stop", 101),
    ],
)
def test_answer_ends_at_what_comes_first(
    sim: SimProcess, members: JSON, tokens: int, reason: str, stop_reason: Any
) -> None:
    body = {"prompt": "x <eos@2>", "max_tokens": 8} | members
    answer = sim.d[0].post(body).json()
    assert answer["usage"]["completion_tokens"] == tokens
    assert answer["choices"][0]["finish_reason"] == reason
    assert answer["choices"][0]["stop_reason"] == stop_reason
    streamed = sim.d[0].post(body | {"stream": True})
    assert streamed_text(streamed) == answer["choices"][0]["text"]


def test_openai_client_is_served(sim: SimProcess) -> None:
    url = f"http://{sim.d[0].instance}/v1"
    with openai.OpenAI(api_key="x", base_url=url) as client:
        assert client.models.list().data[0].id == MODEL
        asked: Any = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 3}
        whole = client.chat.completions.create(**asked)
        parts = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert whole.choices[0].message.content == text
        forced = asked | {"tools": [TOOL], "tool_choice": "required"}
        calls = client.chat.completions.create(**forced).choices[0].message.tool_calls
        assert calls and calls[0].function.name == "look"
        response = client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
        assert response.output_text
        assert client.responses.retrieve(response.id).output_text
        with client.responses.stream(model=MODEL, input="hi") as stream:
            assert stream.get_final_response().output_text
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_unknown")


def test_messages_has_its_own_shapes(sim: SimProcess) -> None:
    body: JSON = {"messages": HELLO, "max_tokens": 2}
    answer = sim.d[0].post(body, MESSAGES).json()
    assert answer["stop_reason"] == "max_tokens"
    events = sim.d[0].post(body | {"stream": True}, MESSAGES).body.decode()
    names = [line[7:] for line in events.splitlines() if line.startswith("event: ")]
    assert names == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    refused = sim.d[0].post(body | {"model": "nope"}, MESSAGES).json()
    assert refused["type"] == "error"
    assert set(refused["error"]) == {"type", "message"}


# --- Refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        (b"{", 400, "Bad Request", "1 validation error:"),
        (b"[]", 400, "Bad Request", "1 validation error:"),
        (b'{"prompt": 3}', 400, "Bad Request", "1 validation error:"),
        ({}, 400, "Bad Request", "1 validation error:"),
        ({"model": "nope"}, 404, "NotFoundError", "The model `nope` does not exist."),
        (
            {"min_tokens": 2, "max_tokens": 1},
            400,
            "BadRequestError",
            "min_tokens must be less than or equal to max_tokens=1, got 2.",
        ),
        (
            {"stream_options": {"include_usage": True}},
            400,
            "Bad Request",
            "Stream options can only be defined when `stream=True`.",
        ),
        (
            {"n": 2, "temperature": 0},
            400,
            "BadRequestError",
            "n must be 1 when using greedy sampling, got 2.",
        ),
        ({"n": 0}, 400, "BadRequestError", "n must be at least 1, got 0."),
        (
            {"max_tokens": 0},
            400,
            "BadRequestError",
            "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
        ),
        (
            {"logprobs": 30},
            400,
            "BadRequestError",
            "Requested sample logprobs of 30, which is greater than max allowed: 20",
        ),
        (
            {"use_beam_search": True, "stream": True},
            400,
            "BadRequestError",
            "Streaming is not currently supported with beam search",
        ),
        (
            {"prompt_logprobs": 1, "stream": True},
            400,
            "Bad Request",
            "1 validation error:",
        ),
        ({"tools": []}, 400, "Bad Request", "1 validation error:"),
        ({"cache_salt": "a/b"}, 400, "Bad Request", "1 validation error:"),
        ({"kv_transfer_params": "x"}, 400, "Bad Request", "1 validation error:"),
    ],
)
def test_refusal_is_vllms(
    sim: SimProcess, body: bytes | JSON, status: int, kind: str, message: str
) -> None:
    if body and isinstance(body, dict):
        body = {"prompt": "hello"} | body
    refused = sim.p[0].post(body)
    assert refused.status == status
    error = refused.error()
    assert (error["type"], error["code"]) == (kind, status)
    assert error["message"].startswith(message)


def test_content_type_must_be_json(sim: SimProcess) -> None:
    body = dumps({"prompt": "hello"})
    refused = sim.d[0].post(body, Content_Type="text/plain")
    assert refused.status == 400
    assert refused.error()["message"] == (
        "1 validation error:\n  "
        "Unsupported Media Type: Only 'application/json' is allowed"
    )
    parameter = "application/json; charset=utf-8"
    assert sim.d[0].post(body, Content_Type=parameter).status == 200


def test_chat_limit_is_max_completion_tokens(sim: SimProcess) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 3}
    usage = sim.d[0].post(body, CHAT).json()["usage"]
    assert usage["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("tokens", "status", "message"),
    [
        (7, 200, ""),
        (8, 400, "max_tokens must be at least 1, got 0. (parameter=max_tokens"),
        (9, 400, "This model's maximum context length is 8 tokens. However, your"),
    ],
)
def test_context_length_is_a_limit(tokens: int, status: int, message: str) -> None:
    with SimProcess("--max-model-len", "8", prefill=0) as sim:
        response = sim.d[0].post({"prompt": [1] * tokens, "max_tokens": 50})
        assert response.status == status
        if message:
            assert response.error()["message"].startswith(message)
        else:
            assert response.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("members", "headers", "message"),
    [
        ({"logprobs": 30}, {}, "Requested sample logprobs of 30"),
        (
            {},
            {"X_data_parallel_rank": "5"},
            "data_parallel_rank 5 is out of range [0, 1).",
        ),
    ],
)
def test_some_refusals_reach_a_stream_as_an_event(
    sim: SimProcess, members: JSON, headers: dict[str, str], message: str
) -> None:
    body = {"prompt": "hello", "stream": True} | members
    (event,) = deltas(sim.d[0].post(body, **headers))
    assert event["error"]["message"].startswith(message)
    assert sim.d[0].post(body | {"stream": False}, **headers).status == 400


@pytest.mark.parametrize(
    ("parser", "choice", "tokens", "status"),
    [
        ("lenient", "required", 1, 200),
        ("strict", "required", 1, 500),
        ("strict", {"type": "function", "function": {"name": "look"}}, 1, 500),
        ("strict", "required", 2, 200),
        ("strict", "auto", 1, 200),
        ("none", "auto", 1, 400),
        ("none", "required", 1, 400),
        ("none", "none", 1, 200),
    ],
)
def test_tool_choice_meets_the_parser(
    parser: str, choice: Any, tokens: int, status: int
) -> None:
    with SimProcess("--tool-call-parser", parser, decode=0) as sim:
        body = {"messages": HELLO, "tools": [TOOL], "tool_choice": choice}
        response = sim.p[0].post(body | {"max_tokens": tokens}, CHAT)
        assert response.status == status


# --- NIXL pull ------------------------------------------------------------------------


def test_hand_over_has_nixls_keys(sim: SimProcess) -> None:
    answer = sim.p[0].post(
        {"prompt": "a" * 100, "max_tokens": 1, "kv_transfer_params": ASK},
        X_Request_Id="r1",
    )
    assert answer.json()["id"] == "cmpl-r1"
    params = answer.json()["kv_transfer_params"]
    engine_id = sim.p[0].stats()["engine_id"]
    assert params.pop("remote_request_id").startswith("cmpl-r1-0-")
    (blocks,) = params.pop("remote_block_ids")
    assert len(blocks) == 2
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_host": "localhost",
        "remote_port": sim.p[0].port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 25,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": 1,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


def test_hand_over_serves_once(sim: SimProcess) -> None:
    params = hand_over(sim.p[0], "hello")
    assert sim.p[0].stats()["handovers"]["pinned"] == 1
    direct = text_of(sim.d[1].post({"prompt": "hello", "max_tokens": 2}))
    assert text_of(decode(sim.d[0], "hello", params)) == direct
    handovers = sim.p[0].stats()["handovers"]
    assert (handovers["pinned"], handovers["used"]) == (0, 1)
    assert sim.d[0].stats()["external_tokens"] == 2
    assert GARBAGE in text_of(decode(sim.d[1], "hello", params))
    stats = sim.d[1].stats()
    assert (stats["bad_handovers"], stats["bad_reasons"]) == (1, {"used": 1})


@pytest.mark.parametrize(
    ("prompt", "change", "reason"),
    [
        ("hullo", {}, "wrong_prompt"),
        ("hello", {"remote_block_ids": [[99999]]}, "altered"),
        ("hello", {"remote_request_id": "cmpl-other-0-00000000"}, "unknown"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_kv_is_garbage_with_status_200(
    sim: SimProcess, prompt: str, change: JSON, reason: str, stream: bool
) -> None:
    params = hand_over(sim.p[0], "hello") | change
    response = decode(sim.d[0], prompt, params, stream=stream)
    assert GARBAGE in (streamed_text if stream else text_of)(response)
    assert sim.d[0].stats()["bad_reasons"] == {reason: 1}


def test_lease_ends_and_the_late_reader_gets_garbage() -> None:
    with SimProcess("--lease", "0.01") as sim:
        params = hand_over(sim.p[0], "hello")
        sim.p[0].wait({"handovers.expired": 1, "handovers.pinned": 0})
        assert GARBAGE in text_of(decode(sim.d[0], "hello", params))
        assert sim.d[0].stats()["bad_reasons"] == {"expired": 1}


def test_first_token_that_ends_the_answer_still_hands_over(sim: SimProcess) -> None:
    params = hand_over(sim.p[0], "<eos@0>")
    assert text_of(decode(sim.d[0], "<eos@0>", params)) == ""
    assert sim.d[0].stats()["bad_handovers"] == 0


@pytest.mark.parametrize(("prompt", "n"), [("a", 2), (["a", "b"], 1)])
def test_several_sequences_pin_several_and_name_one(
    sim: SimProcess, prompt: Any, n: int
) -> None:
    params = hand_over(sim.p[0], prompt, n=n)
    assert sim.p[0].stats()["handovers"]["pinned"] == 2
    assert params["remote_request_id"].startswith("1_") == (n == 2)
    answer = decode(sim.d[0], prompt, params, n=n)
    assert [GARBAGE in text_of(answer, index) for index in (0, 1)] == [False, True]


def test_beam_search_knows_no_hand_over(sim: SimProcess) -> None:
    assert hand_over(sim.p[0], "hello", use_beam_search=True) is None


@pytest.mark.parametrize(
    ("change", "released"),
    [
        ({"model": "nope"}, 1),
        ({"min_tokens": 9}, 1),
        ({"stream_options": {"include_usage": True}}, 0),
        ({"max_tokens": "many"}, 0),
    ],
)
def test_refusal_frees_the_hand_over_only_after_parsing(
    sim: SimProcess, change: JSON, released: int
) -> None:
    params = hand_over(sim.p[0], "hello")
    assert decode(sim.d[0], "hello", params, **change).status in (400, 404)
    handovers = sim.p[0].stats()["handovers"]
    assert handovers["released"] == released
    assert handovers["pinned"] == 1 - released


@pytest.mark.parametrize("stream", [False, True])
def test_hand_over_of_a_dead_engine_is_an_error(stream: bool) -> None:
    with SimProcess() as sim:
        params = hand_over(sim.p[0], "hello")
        sim.p[0].kill()
        response = decode(sim.d[0], "hello", params, stream=stream)
        error = {
            "message": "Internal server error",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
        if stream:
            assert deltas(response) == [{"error": error}]
        else:
            assert (response.status, response.error()) == (500, error)


def test_hand_over_crosses_processes(sim: SimProcess) -> None:
    with SimProcess(prefill=0) as other:
        direct = text_of(sim.d[0].post({"prompt": "hello", "max_tokens": 2}))
        params = hand_over(sim.p[0], "hello")
        assert text_of(decode(other.d[0], "hello", params)) == direct
        assert GARBAGE in text_of(decode(other.d[0], "hello", params))
        dropped = hand_over(sim.p[0], "hello")
        assert decode(other.d[0], "hello", dropped, model="nope").status == 404
        sim.p[0].wait({"handovers.released": 1})


@pytest.mark.parametrize("blocks", [{}, {"remote_block_ids": None}])
def test_params_without_blocks_kill_the_engine(blocks: JSON) -> None:
    with SimProcess() as sim, sim.d[0].connect() as bystander:
        bystander.request("GET", "/health").finish()
        params = {"do_remote_prefill": True} | blocks
        response = decode(sim.d[0], "hello", params)
        assert (response.end, response.reset) == (End.INCOMPLETE, True)
        bystander.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            sim.d[0].connect()
        assert sim.p[0].request("GET", "/health").status == 200
        sim.d[0].restart()
        assert sim.d[0].request("GET", "/health").status == 200


@pytest.mark.parametrize(
    "missing",
    ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"],
)
def test_params_without_address_wait_and_kill_the_engine_that_is_left(
    missing: str,
) -> None:
    with SimProcess() as sim:
        params = hand_over(sim.p[0], "hello")
        del params[missing]
        with sim.d[0].connect() as client:
            client.post(COMPLETIONS, {"prompt": "hello", "kv_transfer_params": params})
            sim.d[0].wait({"running": 1})
        assert sim.d[0].wait({"alive": 0})["died"].startswith("KeyError")


def test_prompt_logprobs_of_a_loaded_prompt_kill_the_engine() -> None:
    with SimProcess() as sim:
        params = hand_over(sim.p[0], "hello")
        decode(sim.d[0], "hello", params, echo=True, logprobs=1)
        sim.d[0].wait({"alive": 0})


def test_process_ends_with_its_last_engine() -> None:
    command = [sys.executable, str(SIM_ENGINE), "--model", "m", "--decode", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        line = json.loads(process.stdout.readline())
        with RawClient(("127.0.0.1", line["port"])) as client:
            params = {"do_remote_prefill": True}
            body = {"prompt": "hello", "kv_transfer_params": params}
            client.post(COMPLETIONS, body).finish()
        assert process.wait(HANG_GUARD) == 1
        assert b"num_external_tokens" in process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_process(number: signal.Signals) -> None:
    with SimProcess() as sim:
        sim.process.send_signal(number)
        assert sim.process.wait(HANG_GUARD) == 0


def test_token_ids_of_a_chat_can_be_handed_over(sim: SimProcess) -> None:
    body: JSON = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}
    prefilled = sim.p[0].post(body | {"kv_transfer_params": ASK}, CHAT).json()
    params = prefilled["kv_transfer_params"]
    params["prompt_token_ids"] = prefilled["prompt_token_ids"]
    other = [{"role": "user", "content": "ignored"}]
    body = {"messages": other, "max_tokens": 2, "kv_transfer_params": params}
    answer = sim.d[0].post(body, CHAT).json()["choices"][0]["message"]["content"]
    direct = sim.d[0].post({"messages": HELLO, "max_tokens": 2}, CHAT).json()
    assert answer == direct["choices"][0]["message"]["content"]
    assert sim.d[0].stats()["bad_handovers"] == 0


# --- NIXL push, Mooncake --------------------------------------------------------------


def concurrently(
    d: SimEngine, d_body: JSON, p: SimEngine, p_body: JSON, p_rank: int = 0
) -> Response:
    """Sends D's leg, P's once D waits, and returns D's answer."""
    with d.connect() as client:
        reader = client.post(COMPLETIONS, d_body, {"X-Request-Id": "r1"})
        d.wait({"running": 1})
        rank = {"X_data_parallel_rank": str(p_rank)}
        assert p.post(p_body, X_Request_Id="r1", **rank).status == 200
        return reader.finish()


def push_params(p: SimEngine) -> JSON:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": p.stats()["engine_id"],
        "remote_host": "127.0.0.1",
        "remote_port": p.port,
        "remote_request_id": "r1",
        "tp_size": 1,
    }


@pytest.fixture(scope="module")
def shared_push() -> Iterator[SimProcess]:
    with SimProcess("--connector", "nixl-push") as sim:
        yield sim


@pytest.fixture
def push(shared_push: SimProcess) -> Iterator[SimProcess]:
    """1P1D that push, shared by the module, with fresh figures."""
    shared_push.reset()
    yield shared_push


def p_leg(prompt: str, **params: Any) -> JSON:
    return {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": ASK | params}


def d_leg(prompt: str, params: JSON) -> JSON:
    return {"prompt": prompt, "max_tokens": 2, "kv_transfer_params": params}


@pytest.mark.parametrize("early", ["p", "d"])
def test_push_meets_by_request_id(push: SimProcess, early: str) -> None:
    (p,), (d,) = push.p, push.d
    direct = text_of(d.post({"prompt": "hello", "max_tokens": 2}))
    body = d_leg("hello", push_params(p))
    if early == "d":
        answer = concurrently(d, body, p, p_leg("hello"))
    else:
        params = p.post(p_leg("hello"), X_Request_Id="r1").json()["kv_transfer_params"]
        assert params["transfer_mode"] == "push"
        assert "remote_blocks_expiry_time" not in params
        answer = d.post(body, X_Request_Id="r1")
    assert text_of(answer) == direct
    assert p.stats()["handovers"]["used"] == 1
    assert d.stats()["external_tokens"] == 2


def test_push_of_another_prompt_is_garbage(push: SimProcess) -> None:
    (p,), (d,) = push.p, push.d
    body = d_leg("hullo", push_params(p))
    answer = concurrently(d, body, p, p_leg("hello"))
    assert GARBAGE in text_of(answer)


def test_push_to_another_request_id_leaves_d_waiting(push: SimProcess) -> None:
    (p,), (d,) = push.p, push.d
    with d.connect() as client:
        body = d_leg("hello", push_params(p))
        client.post(COMPLETIONS, body, {"X-Request-Id": "r1"})
        p.post(p_leg("hello"), X_Request_Id="r2")
        p.post(p_leg("hello") | {"messages": HELLO}, CHAT, X_Request_Id="r1")
        assert (
            p.stats()["handovers"] | {"pinned": 2, "used": 0}
            == p.wait({"handovers.pinned": 2})["handovers"]
        )
        assert d.stats()["running"] == 1
    d.wait({"aborted": 1, "running": 0})


def test_push_crosses_processes(push: SimProcess) -> None:
    with SimProcess("--connector", "nixl-push", prefill=0) as other:
        (p,), (d,) = push.p, other.d
        direct = text_of(d.post({"prompt": "hello", "max_tokens": 2}))
        body = d_leg("hello", push_params(p))
        answer = concurrently(d, body, p, p_leg("hello"))
        assert text_of(answer) == direct


@pytest.mark.parametrize(
    "missing", ["remote_engine_id", "remote_host", "remote_port", "tp_size"]
)
def test_push_without_coordinates_kills_d(push: SimProcess, missing: str) -> None:
    (p,), (d,) = push.p, push.d
    params = push_params(p)
    del params[missing]
    assert d.post(d_leg("hello", params)).end is End.INCOMPLETE
    assert d.stats()["died"] == f"KeyError: '{missing}'"
    d.restart()


@pytest.fixture(scope="module")
def shared_mooncake() -> Iterator[SimProcess]:
    with SimProcess("--connector", "mooncake", "--dp-size", "2", "1") as sim:
        yield sim


@pytest.fixture
def mooncake(shared_mooncake: SimProcess) -> Iterator[SimProcess]:
    """1P1D of Mooncake, P with two DP ranks, with fresh figures."""
    shared_mooncake.reset()
    yield shared_mooncake


def query(p: SimEngine) -> JSON:
    """What the bootstrap server of a P tells."""
    with RawClient(("127.0.0.1", p.line["bootstrap_port"])) as client:
        ranks: JSON = client.request("GET", "/query").finish().json()
    return ranks


def mooncake_params(p: SimEngine, rank: int) -> JSON:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": f"http://127.0.0.1:{p.line['bootstrap_port']}",
        "remote_engine_id": query(p)[str(rank)]["engine_id"],
        "transfer_id": "xfer-1",
    }


@pytest.mark.parametrize("across", [False, True])
def test_mooncake_meets_by_transfer_id(mooncake: SimProcess, across: bool) -> None:
    with SimProcess("--connector", "mooncake", prefill=0) as other:
        p, d = mooncake.p[0], (other if across else mooncake).d[0]
        direct = text_of(d.post({"prompt": "hello", "max_tokens": 2}))
        assert list(query(p)) == ["0", "1"]
        body = d_leg("hello", mooncake_params(p, 1))
        asked = p_leg("hello", transfer_id="xfer-1")
        answer = concurrently(d, body, p, asked, p_rank=1)
        assert text_of(answer) == direct
        assert d.stats()["external_tokens"] == 2


def test_mooncake_p_returns_no_params(mooncake: SimProcess) -> None:
    (p,) = mooncake.p
    for params in ({"transfer_id": "xfer-2"}, {}):
        assert p.post(p_leg("hello", **params)).json()["kv_transfer_params"] is None
    assert p.stats()["handovers"]["pinned"] == 1


@pytest.mark.parametrize(
    ("d_change", "p_prompt", "p_rank"),
    [
        ({"transfer_id": None}, "hello", "0"),
        ({"remote_bootstrap_addr": None}, "hello", "0"),
        ({"transfer_id": "xfer-9"}, "hello", "0"),
        ({}, "hello", "1"),
    ],
)
def test_mooncake_d_waits_for_what_never_comes(
    mooncake: SimProcess, d_change: JSON, p_prompt: str, p_rank: str
) -> None:
    (p,), (d,) = mooncake.p, mooncake.d
    with d.connect() as client:
        client.post(COMPLETIONS, d_leg("hello", mooncake_params(p, 0) | d_change))
        d.wait({"running": 1})
        asked = p_leg(p_prompt, transfer_id="xfer-1")
        assert p.post(asked, X_data_parallel_rank=p_rank).status == 200
        p.wait({"handovers.made": 1})
        assert d.stats()["running"] == 1
    d.wait({"aborted": 1, "running": 0})
    assert d.stats()["alive"] == 1


def test_mooncake_first_token_that_ends_the_answer_drops_the_kv(
    mooncake: SimProcess,
) -> None:
    (p,) = mooncake.p
    asked = p_leg("<eos@0>", transfer_id="xfer-1")
    p.post(asked)
    assert p.stats()["handovers"]["made"] == 0
    p.post(asked | {"ignore_eos": True})
    assert p.stats()["handovers"]["made"] == 1


def test_mooncake_restarted_p_has_other_ids(mooncake: SimProcess) -> None:
    (p,), (d,) = mooncake.p, mooncake.d
    stale = mooncake_params(p, 0)
    p.restart()
    assert query(p)["0"]["engine_id"] != stale["remote_engine_id"]
    assert d.post(d_leg("hello", stale)).status == 500


def test_mooncake_wrong_role_kills_the_engine(mooncake: SimProcess) -> None:
    (p,), (d,) = mooncake.p, mooncake.d
    assert d.post(p_leg("hello")).end is End.INCOMPLETE
    assert p.post(d_leg("hello", mooncake_params(p, 0))).end is End.INCOMPLETE
    for engine in (p, d):
        assert engine.stats()["died"].startswith("AssertionError")
        engine.restart()


# --- MoRIIO ---------------------------------------------------------------------------

UID = "0123456789abcdef" * 2
HEARTBEAT = "--ping-interval", "0.02"


@pytest.mark.parametrize(
    ("request_id", "prefill", "decode"),
    [
        (f"___prefill_addr_A___decode_addr_B_{UID}", "A", "B"),
        (f"cmpl-___prefill_addr_A___decode_addr_B_{UID}-0-0a1b2c3d", "A", "B"),
        (f"0_chatcmpl-___prefill_addr_A_b___decode_addr_B_c_{UID}-1", "A_b", "B_c"),
        (f"___prefill_addr_A___decode_addr_B_{UID}_{UID}", "A", f"B_{UID}"),
        (f"___prefill_addr____decode_addr_B_{UID}", None, "B"),
        (f"___prefill_addr_A___decode_addr_B_{UID.upper()}", "A", None),
        (f"___prefill_addr_A___decode_addr_B_{UID[1:]}", "A", None),
        (f"___prefill_addr_A___decode_addr_B_{UID}0", "A", None),
        (f"___prefill_addr_A___decode_addr_B{UID}", "A", None),
        ("___prefill_addr_A___decode_addr_B_" + UID[:8] + "-" + UID[8:], "A", None),
        (f"___prefill_addr_A_{UID}", None, None),
        ("resp_0123", None, None),
    ],
)
def test_request_id_is_read_as_the_connector_reads_it(
    request_id: str, prefill: str | None, decode: str | None
) -> None:
    assert sim_moriio.prefill_part(request_id) == prefill
    assert sim_moriio.decode_part(request_id) == decode


def test_zmq_address_is_read_as_the_connector_reads_it() -> None:
    address = sim_moriio.parse_address("host:fe80::1,handshake:6301,notify:61005")
    assert address == ("fe80::1", 6301, 61005)
    for bad in ("host:a,handshake:1", "a", "host:a,handshake:x,notify:2"):
        with pytest.raises(ValueError):
            sim_moriio.parse_address(bad)


class Discovery:
    """The ROUTER of a proxy."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(HANG_GUARD * 1000))
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"127.0.0.1:{port}"

    def receive(self) -> JSON:
        _identity, message = self.socket.recv_multipart()
        registration: JSON = msgspec.msgpack.decode(message)
        return registration

    def drain(self) -> None:
        while self.socket.poll(0):
            self.socket.recv_multipart()

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def discovery() -> Iterator[Discovery]:
    made = Discovery()
    yield made
    made.close()


def moriio_sim(mode: str, *arguments: str) -> SimProcess:
    return SimProcess("--connector", "moriio", "--transfer-mode", mode, *arguments)


@pytest.fixture(scope="module", params=["READ", "WRITE"])
def shared_moriio(request: pytest.FixtureRequest) -> Iterator[SimProcess]:
    with moriio_sim(request.param, "--dp-size", "2", "1", "--record", "1") as sim:
        yield sim


@pytest.fixture
def moriio(shared_moriio: SimProcess) -> Iterator[SimProcess]:
    """1P1D of MoRIIO in each mode, P with two DP ranks, with fresh figures."""
    shared_moriio.reset()
    yield shared_moriio


def mode_of(sim: SimProcess) -> str:
    args = sim.process.args
    assert isinstance(args, list)
    return str(args[args.index("--transfer-mode") + 1])


def moriio_address(engine: SimEngine) -> str:
    return f"host:127.0.0.1,handshake:{engine.port},notify:{engine.port}"


def moriio_id(p: SimEngine, d: SimEngine) -> str:
    p_part, d_part = moriio_address(p), moriio_address(d)
    return f"___prefill_addr_{p_part}___decode_addr_{d_part}_{UID}"


def moriio_p_params(**change: Any) -> JSON:
    return {
        "remote_dp_size": 1,
        "remote_tp_size": 1,
        "transfer_id": "tx-1",
        "remote_engine_id": None,
        "remote_block_ids": None,
    } | change


def moriio_d_params(handed: JSON | None, **change: Any) -> JSON:
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": (handed or {}).get("remote_engine_id"),
        "remote_block_ids": (handed or {}).get("remote_block_ids"),
        "transfer_id": "tx-1",
        "remote_dp_size": 2,
        "remote_tp_size": 1,
        "remote_dp_rank": 1,
    } | change


def moriio_pair(
    sim: SimProcess,
    p_change: JSON,
    d_change: JSON,
    d_prompt: str = "hello",
    d_engine: SimEngine | None = None,
) -> Response:
    """Both legs as a right proxy sends them, but for the changes."""
    (p,), d = sim.p, d_engine or sim.d[0]
    id, asked = moriio_id(p, d), p_leg("hello", **moriio_p_params(**p_change))
    if mode_of(sim) == "WRITE":
        body = d_leg(d_prompt, moriio_d_params(None, **d_change))
        rank = {"X_data_parallel_rank": "1"}
        with d.connect() as client:
            reader = client.post(COMPLETIONS, body, {"X-Request-Id": id})
            d.wait({"running": 1})
            assert p.post(asked, X_Request_Id=id, **rank).status == 200
            return reader.finish()
    answer = p.post(asked, X_Request_Id=id, X_data_parallel_rank="1")
    params = moriio_d_params(answer.json()["kv_transfer_params"], **d_change)
    return d.post(d_leg(d_prompt, params), X_Request_Id=id)


def test_moriio_hands_over(moriio: SimProcess) -> None:
    (p,), (d,) = moriio.p, moriio.d
    direct = text_of(d.post({"prompt": "hello", "max_tokens": 2}))
    assert text_of(moriio_pair(moriio, {}, {})) == direct
    assert d.stats()["external_tokens"] == 2
    assert p.stats()["handovers"]["used"] == 1


def test_moriio_hands_over_across_processes(moriio: SimProcess) -> None:
    mode = mode_of(moriio)
    with moriio_sim(mode, "--prefill", "0") as other:
        direct = text_of(other.d[0].post({"prompt": "hello", "max_tokens": 2}))
        answer = moriio_pair(moriio, {}, {}, d_engine=other.d[0])
        assert text_of(answer) == direct


@pytest.mark.parametrize(
    ("p_change", "d_change", "prompt", "reason"),
    [
        ({}, {}, "hullo", "wrong_prompt"),
        ({"remote_tp_size": 2}, {}, "hello", "wrong_peer"),
        ({"remote_dp_size": 2}, {}, "hello", "wrong_peer"),
        ({}, {"remote_dp_size": 1}, "hello", "wrong_peer"),
        ({}, {"remote_tp_size": 4}, "hello", "wrong_peer"),
    ],
)
def test_moriio_garbage(
    moriio: SimProcess, p_change: JSON, d_change: JSON, prompt: str, reason: str
) -> None:
    answer = moriio_pair(moriio, p_change, d_change, prompt)
    assert GARBAGE in text_of(answer)
    assert moriio.d[0].stats()["bad_reasons"] == {reason: 1}


@pytest.mark.parametrize("shared_moriio", ["READ"], indirect=True)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"remote_block_ids": None}, "nothing_read"),
        ({"remote_block_ids": []}, "nothing_read"),
        ({"remote_block_ids": [[99999]]}, "altered"),
        ({"remote_dp_rank": 0}, "unknown"),
        ({"transfer_id": "tx-2"}, "unknown"),
    ],
)
def test_moriio_reads_garbage_and_says_200(
    moriio: SimProcess, change: JSON, reason: str
) -> None:
    assert GARBAGE in text_of(moriio_pair(moriio, {}, change))
    assert moriio.d[0].stats()["bad_reasons"] == {reason: 1}


@pytest.mark.parametrize("shared_moriio", ["READ"], indirect=True)
def test_moriio_hand_over_has_its_keys(moriio: SimProcess) -> None:
    (p,), (d,) = moriio.p, moriio.d
    asked = p_leg("hello", **moriio_p_params())
    answer = p.post(asked, X_Request_Id=moriio_id(p, d), X_data_parallel_rank="1")
    params = answer.json()["kv_transfer_params"]
    assert params.pop("remote_block_ids")[0]
    port = str(p.port)
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"127.0.0.1:{port}",
        "remote_host": "127.0.0.1",
        "remote_handshake_port": port,
        "remote_notify_port": port,
        "remote_dp_rank": 1,
        "remote_dp_rank_override": True,
        "remote_dp_size": 2,
        "remote_dp_size_local": 2,
        "tp_size": 1,
        "transfer_id": "tx-1",
    }


@pytest.mark.parametrize("shared_moriio", ["WRITE"], indirect=True)
@pytest.mark.parametrize(
    "change",
    [
        {"remote_dp_rank": 0},
        {"transfer_id": "tx-2"},
        {"remote_dp_rank_override": True},
        {"is_request_leader": False},
    ],
)
def test_moriio_write_that_never_comes_leaves_d_waiting(
    moriio: SimProcess, change: JSON
) -> None:
    (p,), (d,) = moriio.p, moriio.d
    id = moriio_id(p, d)
    with d.connect() as client:
        body = d_leg("hello", moriio_d_params(None, **change))
        client.post(COMPLETIONS, body, {"X-Request-Id": id})
        asked = p_leg("hello", **moriio_p_params())
        assert p.post(asked, X_Request_Id=id, X_data_parallel_rank="1").status == 200
        d.wait({"running": 1})
        assert p.wait({"handovers.pinned": 1})["handovers"]["used"] == 0
    d.wait({"aborted": 1, "running": 0})


def test_moriio_end_of_sequence_hands_nothing_over(moriio: SimProcess) -> None:
    (p,), (d,) = moriio.p, moriio.d
    asked = p_leg("<eos@0>", **moriio_p_params())
    answer = p.post(asked, X_Request_Id=moriio_id(p, d))
    assert answer.json()["kv_transfer_params"] is None
    assert p.stats()["handovers"]["made"] == 0
    answer = p.post(asked | {"ignore_eos": True}, X_Request_Id=moriio_id(p, d))
    assert answer.json()["kv_transfer_params"]["do_remote_prefill"]


def test_moriio_rank_out_of_range_is_refused(moriio: SimProcess) -> None:
    (p,), (d,) = moriio.p, moriio.d
    for engine, size in ((p, 2), (d, 1)):
        refused = engine.post({"prompt": "hello"}, X_data_parallel_rank=str(size))
        text = f"data_parallel_rank {size} is out of range [0, {size})."
        assert (refused.status, refused.error()["message"]) == (400, text)


def test_moriio_without_peer_address_dies(moriio: SimProcess) -> None:
    (p,), (d,) = moriio.p, moriio.d
    assert p.post(p_leg("hello", **moriio_p_params())).end is End.INCOMPLETE
    assert d.post(d_leg("hello", moriio_d_params(None))).end is End.INCOMPLETE
    for engine in (p, d):
        assert engine.stats()["died"].startswith("ValueError")
        engine.restart()


def test_moriio_address_may_come_in_the_params(moriio: SimProcess) -> None:
    (p,), (d,) = moriio.p, moriio.d
    port = str(d.port)
    fallback = {"remote_host": "127.0.0.1"}
    fallback |= dict.fromkeys(("remote_handshake_port", "remote_notify_port"), port)
    assert p.post(p_leg("hello", **moriio_p_params(**fallback))).status == 200


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_block_ids"])
def test_moriio_write_p_needs_every_key(moriio: SimProcess, missing: str) -> None:
    (p,), (d,) = moriio.p, moriio.d
    params = moriio_p_params()
    del params[missing]
    answer = p.post(p_leg("hello", **params), X_Request_Id=moriio_id(p, d))
    if mode_of(moriio) == "READ":
        assert answer.status == 200
        return
    assert answer.end is End.INCOMPLETE
    assert p.stats()["died"] == f"KeyError: '{missing}'"
    p.restart()


def test_moriio_registers_again_and_again(discovery: Discovery) -> None:
    arguments = ("--moriio-proxy", discovery.endpoint, *HEARTBEAT)
    with moriio_sim("READ", "--dp-size", "2", "4", *arguments) as sim:
        seen: dict[str, JSON] = {}
        while len(seen) < 2:
            message = discovery.receive()
            seen[message["type"]] = message
        for kind, engine, size in (("P", sim.p[0], 2), ("D", sim.d[0], 4)):
            assert seen[kind] == {
                "type": kind,
                "http_address": engine.instance,
                "zmq_address": moriio_address(engine),
                "dp_size": size,
                "tp_size": 1,
                "transfer_mode": "READ",
            }
        sim.p[0].control("POST", "heartbeat", {"on": False})
        discovery.drain()
        assert [discovery.receive()["type"] for _ in range(5)] == ["D"] * 5
        sim.p[0].control("POST", "heartbeat", {"on": True})
        while discovery.receive()["type"] != "P":
            pass
        sim.d[0].kill()
        discovery.drain()
        assert [discovery.receive()["type"] for _ in range(5)] == ["P"] * 5
        sim.d[0].restart()
        while discovery.receive()["type"] != "D":
            pass


# --- Connections ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset])
def test_client_that_leaves_aborts_its_request(
    sim: SimProcess, stream: bool, leave: Any
) -> None:
    engine = sim.p[0]
    engine.fault("hang", after_events=2 if stream else None)
    body = {"prompt": "hello", "stream": stream, "kv_transfer_params": ASK}
    client = engine.connect()
    client.post(COMPLETIONS, body)
    engine.wait({"running": 1})
    leave(client)
    stats = engine.wait({"aborted": 1, "running": 0, "open_connections": 0})
    assert stats["handovers"]["made"] == 0


def test_half_close_is_a_disconnect(sim: SimProcess) -> None:
    sim.d[0].fault("hang")
    with sim.d[0].connect() as client:
        client.post(COMPLETIONS, {"prompt": "hello"})
        sim.d[0].wait({"running": 1})
        client.half_close()
        assert client.wait_closed() == b""
    sim.d[0].wait({"aborted": 1, "running": 0})


def test_idle_connection_is_closed_after_the_limit() -> None:
    with SimProcess("--keep-alive", "0.05") as sim, sim.d[0].connect() as client:
        for _ in range(2):
            assert client.request("GET", "/health").finish().status == 200
        assert client.wait_closed() == b""
        sim.d[0].wait({"open_connections": 0})


def test_chunked_request_body_is_read(sim: SimProcess) -> None:
    body = dumps({"prompt": "hello", "max_tokens": 2})
    framing = {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}
    head = http_request("POST", COMPLETIONS, None, framing)
    with sim.d[0].connect() as client:
        client.send(head, *(chunk(body[i : i + 7]) for i in range(0, len(body), 7)))
        client.send(chunk(b""))
        answer = client.reader().finish()
    assert text_of(answer) == text_of(sim.d[0].post(body))


def test_expect_is_answered(sim: SimProcess) -> None:
    body = dumps({"prompt": "hello"})
    request = http_request("POST", COMPLETIONS, body, {"Expect": "100-continue"})
    with sim.d[0].connect() as client:
        client.send(request.removesuffix(body))
        assert client.read_some() == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        assert client.reader().finish().status == 200


def test_pipelined_requests_are_answered_in_order(sim: SimProcess) -> None:
    body = {"prompt": "hello", "stream": True, "max_tokens": 5}
    post = http_request("POST", COMPLETIONS, body)
    with sim.d[0].connect() as client:
        client.send(post + http_request("GET", "/version") + post)
        kinds = [client.reader().finish().header("content-type") for _ in range(3)]
    stream = "text/event-stream; charset=utf-8"
    assert kinds == [stream, "application/json", stream]


def test_connection_close_is_honoured(sim: SimProcess) -> None:
    with sim.d[0].connect() as client:
        reader = client.request("GET", "/health", headers={"Connection": "close"})
        assert reader.finish().header("connection") == "close"
        assert client.wait_closed() == b""


def test_malformed_request_is_400_and_closed(sim: SimProcess) -> None:
    with sim.d[0].connect() as client:
        client.send(b"nonsense\r\n\r\n")
        response = client.reader().finish()
    assert (response.status, response.body) == (400, b"Invalid HTTP request received.")


def test_slow_reader_stops_the_stream(sim: SimProcess) -> None:
    body = {"prompt": "hello", "stream": True, "max_tokens": 40_000}
    with RawClient(sim.d[0].address, receive_buffer=4096) as client:
        client.post(COMPLETIONS, body)
        received = bytearray(client.read_some())
        assert sim.d[0].stats()["finished"] == 0
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += client.read_some()
    assert received.count(b"data: {") == 40_000


# --- Faults ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "status", "events", "reset"),
    [
        ({"kind": "reset_on_head"}, 0, 0, True),
        ({"kind": "reset_after_request"}, 0, 0, True),
        ({"kind": "die_in_head"}, 0, 0, True),
        ({"kind": "die_in_head", "how": "fin"}, 0, 0, False),
        ({"kind": "die"}, 200, 0, True),
        ({"kind": "die", "after_events": 0, "how": "fin"}, 200, 0, False),
        ({"kind": "die", "after_bytes": 10}, 200, 0, True),
    ],
)
def test_fault_cuts_one_response(
    sim: SimProcess, fault: JSON, status: int, events: int, reset: bool, stream: bool
) -> None:
    body = {"prompt": "hello", "stream": stream, "max_tokens": 5}
    sim.d[0].control("POST", "fault", fault | {"count": 1})
    response = sim.d[0].post(body)
    assert response.end is End.INCOMPLETE
    assert (response.status, response.reset) == (status, reset)
    assert response.body.count(b"\n\n") == events
    assert len(response.body) == fault.get("after_bytes", 0)
    assert sim.d[0].post(body).end is End.COMPLETE


def test_fault_resets_a_new_connection(sim: SimProcess) -> None:
    sim.d[0].fault("reset_on_connect", count=1)
    # Already connecting may report it.
    with contextlib.suppress(ConnectionError), sim.d[0].connect() as client:
        assert client.read_some() == b"never"
    assert sim.d[0].request("GET", "/health").status == 200


@pytest.mark.parametrize("target", [COMPLETIONS, CHAT])
def test_stream_dies_after_as_many_events(sim: SimProcess, target: str) -> None:
    body = {"prompt": "hello", "messages": HELLO, "stream": True, "max_tokens": 9}
    whole = sim.d[0].post(body, target).body
    sim.d[0].fault("die", after_events=3)
    response = sim.d[0].post(body, target)
    assert (response.end, response.reset) == (End.INCOMPLETE, True)
    cut = [json.loads(event) for event in response.events()]
    assert response.body.endswith(b"\n\n")
    assert len(cut) == 3
    full = [json.loads(event[6:]) for event in whole.decode().split("\n\n")[:3]]
    assert [each["choices"] for each in cut] == [each["choices"] for each in full]


@pytest.mark.parametrize("stream", [False, True])
def test_message_without_its_end(sim: SimProcess, stream: bool) -> None:
    sim.d[0].fault("no_last_chunk")
    response = sim.d[0].post({"prompt": "hello", "stream": stream})
    assert (response.end, response.reset) == (End.INCOMPLETE, False)
    assert response.body.endswith(b"[DONE]\n\n") == stream


def test_status_fault_is_answered_as_given(sim: SimProcess) -> None:
    sim.d[0].fault("status", status=429, body="busy", headers={"Retry-After": "3"})
    response = sim.d[0].post({"prompt": "hello"})
    assert (response.status, response.body) == (429, b"busy")
    assert response.header("retry-after") == "3"
    assert sim.d[0].request("GET", "/health").status == 200
    sim.d[0].clear_faults()
    sim.d[0].fault("status", status=503, path="/health")
    assert sim.d[0].post({"prompt": "hello"}).status == 200
    assert sim.d[0].request("GET", "/health").error()["code"] == 503


def test_refusing_port_keeps_its_connections(sim: SimProcess) -> None:
    engine = sim.d[0]
    with engine.connect() as client:
        client.request("GET", "/health").finish()
        engine.fault("refuse")
        with pytest.raises(ConnectionRefusedError):
            engine.connect()
        assert client.request("GET", "/health").finish().status == 200
    engine.clear_faults()
    assert engine.request("GET", "/health").status == 200


@pytest.mark.parametrize("events", [None, 0, 2])
def test_held_request_goes_on_when_the_fault_is_cleared(
    sim: SimProcess, events: int | None
) -> None:
    body = {"prompt": "hello", "stream": True, "max_tokens": 4}
    whole = streamed_text(sim.d[0].post(body))
    sim.d[0].fault("hang", after_events=events)
    with sim.d[0].connect() as client:
        reader = client.post(COMPLETIONS, body)
        if events:
            assert reader.body_until(f".{events - 1}".encode()).count(b"\n\n") == 2
        sim.d[0].wait({"running": 1})
        sim.d[0].clear_faults()
        assert streamed_text(reader.finish()) == whole


def test_connection_can_be_closed_unannounced(sim: SimProcess) -> None:
    sim.d[0].fault("close_idle", count=1)
    with sim.d[0].connect() as client:
        assert client.request("GET", "/health").finish().header("connection") is None
        assert client.wait_closed() == b""
    with sim.d[0].connect() as client:
        for _ in range(2):
            assert client.request("GET", "/health").finish().status == 200


def test_faults_can_be_set_at_the_start() -> None:
    fault = '{"kind": "status", "status": 500, "count": 1}'
    with SimProcess("--fault", fault) as sim:
        for engine in sim.engines:
            statuses = [engine.post({"prompt": "a"}).status for _ in range(2)]
            assert statuses == [500, 200]


def test_restarted_engine_is_another_one(sim: SimProcess) -> None:
    params = hand_over(sim.p[0], "hello")
    sim.p[0].restart()
    assert sim.p[0].stats()["engine_id"] != params["remote_engine_id"]
    assert decode(sim.d[0], "hello", params).status == 500


# --- Figures --------------------------------------------------------------------------


def test_figures_count_what_came(sim: SimProcess) -> None:
    body = {"prompt": "hällo", "max_tokens": 3}
    with sim.d[0].connect() as client:
        client.post(COMPLETIONS, body).finish()
        client.request("GET", "/health", headers={"X-Odd": "1"}).finish()
        stats = sim.d[0].stats()
    assert stats["requests"] == {"POST /v1/completions": 1, "GET /health": 1}
    assert (stats["posts"], stats["finished"], stats["connections"]) == (1, 1, 1)
    assert (stats["prompt_tokens"], stats["generated_tokens"]) == (2, 3)
    post, get = stats["records"]
    assert json.loads(post["body"]) == body
    assert (post["target"], post["status"], post["connection"]) == (COMPLETIONS, 200, 1)
    assert ["X-Odd", "1"] in get["headers"]


def test_records_keep_bodies_byte_exact(sim: SimProcess) -> None:
    sim.d[0].post(b'{"prompt": "\xff\xc3\xa4"}')
    body = sim.d[0].stats()["records"][0]["body"]
    assert body.encode("utf-8", "surrogateescape") == b'{"prompt": "\xff\xc3\xa4"}'


def test_running_requests_and_pinned_kv_show_in_the_metrics(sim: SimProcess) -> None:
    def usage() -> float:
        lines = sim.p[0].request("GET", "/metrics").body.decode().splitlines()
        line = next(each for each in lines if each.startswith("vllm:kv_cache_usage"))
        return float(line.split()[-1])

    assert usage() == 0
    hand_over(sim.p[0], "hello")
    assert usage() > 0


def test_lone_surrogates_and_odd_numbers_are_accepted(sim: SimProcess) -> None:
    body = b'{"prompt": "\\ud83d", "seed": 9223372036854775808, "top_p": 1e-7}'
    assert sim.d[0].post(body).status == 200
    chat = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
    assert sim.d[0].post(chat, CHAT).status == 200


def test_help_names_every_option() -> None:
    done = subprocess.run(
        [sys.executable, str(SIM_ENGINE), "--help"],
        capture_output=True,
        text=True,
        timeout=HANG_GUARD,
    )
    assert done.returncode == 0
    for option in ("--prefill", "--connector", "--lease", "--fault", "--record"):
        assert option in done.stdout
