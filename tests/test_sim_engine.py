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

import openai
import pytest
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
