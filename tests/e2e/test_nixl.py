# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""2P2D over NIXL pull: real KV blocks move, and clients see one vLLM server.

The engines are the judges: a plain engine's answers, the metrics of the prefill
and decode engines, the requests they logged. The proxy's own counters prove nothing.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from e2e import engines, workload
from e2e.engines import MODEL, Engine, EngineServer, Fleet, Ledger, request
from e2e.workload import LONG, Question
from rig import CHAT, COMPLETIONS, JSON, ProxyProcess, poll

RUNNING = "vllm:num_requests_running"
GENERATED = "vllm:generation_tokens_total"
# Zero on every engine as long as no client leaves: vLLM 0.32.0 says twice that a
# request which is not streamed needs its blocks no longer, and counts the second.
FAILURES = (
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_num_failed_notifications_total",
    "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_notifications_after_expiry_total",
)


@pytest.fixture(scope="module")
def fleet(server: EngineServer, plain: Engine) -> Iterator[Fleet]:
    """Two prefill and two decode engines behind the proxy."""
    with engines.recipe_fleet(server, plain, "nixl") as fleet:
        yield fleet


# --- Sixty requests at once -----------------------------------------------------------


@dataclass
class Batch:
    """Requests that were asked at the same time, and what came of them."""

    questions: list[Question]
    answers: list[JSON]
    ledger: Ledger

    @property
    def two_legged(self) -> int:
        """How many of them needed a prefill engine."""
        return sum(question.two_legs for question in self.questions)


@pytest.fixture(scope="module")
def sixty(fleet: Fleet) -> Batch:
    """Sixty requests of every kind, all at once."""
    asked = workload.questions("nixl sixty")
    with fleet.counted() as ledger:
        answers = workload.ask_all(fleet.proxy.address, asked)
    return Batch(asked, answers, ledger)


def test_sixty_requests_at_once_answer_as_one_plain_engine_does(
    fleet: Fleet, sixty: Batch
) -> None:
    plain = fleet.plain.address
    expected = workload.judge(sixty.answers, plain, sixty.questions)
    assert {answer["status"] for answer in expected} == {200}


def test_every_two_leg_request_is_prefilled_once_and_moved_once(sixty: Batch) -> None:
    assert sixty.ledger.prefilled == sixty.two_legged
    assert sixty.ledger.transfers == sixty.two_legged


def test_every_prefill_engine_hands_over_to_every_decode_engine(
    fleet: Fleet, sixty: Batch
) -> None:
    ids = {nixl_engine_id(engine): engine.name for engine in fleet.prefill}
    assert len(ids) == len(fleet.prefill)
    pairs = [
        (ids[hand_over["remote_engine_id"]], engine.name)
        for engine in fleet.decode
        for _, hand_over in handed_over(engine)
    ]
    assert set(pairs) == set(
        itertools.product(ids.values(), (engine.name for engine in fleet.decode))
    )


def test_both_legs_carry_the_same_request_id(fleet: Fleet, sixty: Batch) -> None:
    legs = [each for engine in fleet.decode for each in handed_over(engine)]
    assert len(legs) >= sixty.two_legged
    for request_id, hand_over in legs:
        # The engine adds eight random hex digits of its own to each leg's id.
        assert hand_over["remote_request_id"].startswith(f"{request_id}-")


def nixl_engine_id(engine: Engine) -> str:
    """The id under which an engine's blocks are fetched, from its own log."""
    _, _, rest = engine.log.read_text().partition("Initializing NIXL Scheduler ")
    return rest.split()[0]


def handed_over(engine: Engine) -> Iterator[tuple[str, dict[str, str]]]:
    """Requests a decode engine logged with a hand-over: id, textual parameters."""
    for line in engine.log.read_text(errors="replace").splitlines():
        if "'do_remote_prefill': True" not in line:
            continue
        request_id = line.partition("Received request ")[2].partition(": ")[0]
        names = "remote_engine_id", "remote_request_id"
        yield (
            request_id,
            {name: line.split(f"'{name}': '")[1].split("'")[0] for name in names},
        )


# --- Where the KV came from -----------------------------------------------------------


def test_decode_engines_compute_no_prompt_token_of_a_two_leg_request(
    fleet: Fleet,
) -> None:
    asked = list(itertools.islice(workload.two_legged("nixl cold"), workload.REQUESTS))
    with fleet.counted() as ledger:
        workload.ask_all(fleet.proxy.address, asked)
    assert ledger.prefilled == ledger.transfers == len(asked)
    assert ledger.computed == 0
    assert ledger.external + ledger.local == ledger.prompt_tokens
    # The system message of the chats is all that two of these prompts share.
    assert ledger.external > ledger.local


def test_one_request_takes_exactly_its_prompt_from_the_prefill_engine(
    fleet: Fleet,
) -> None:
    question = workload.completion(workload.text("nixl single", 40), {})
    with fleet.counted() as ledger:
        answer = workload.ask(fleet.proxy.address, question)
    assert ledger.external == answer["usage"]["prompt_tokens"]
    assert (ledger.local, ledger.computed) == (0, 0)


def test_bypassed_requests_never_touch_a_prefill_engine(fleet: Fleet) -> None:
    asked = workload.bypassed("nixl bypass")
    with fleet.counted() as ledger:
        answers = workload.ask_all(fleet.proxy.address, asked)
    assert answers == workload.ask_all(fleet.plain.address, asked)
    assert (ledger.prefilled, ledger.transfers, ledger.external) == (0, 0, 0)
    assert ledger.computed > 0


# --- One vLLM server ------------------------------------------------------------------


def both(fleet: Fleet) -> list[openai.OpenAI]:
    """The openai client, at the proxy and at the plain engine."""
    urls = [
        f"http://{host}:{port}/v1"
        for host, port in (fleet.proxy.address, fleet.plain.address)
    ]
    return [openai.OpenAI(base_url=u, api_key="none", max_retries=0) for u in urls]


def test_openai_client_completes_and_chats(fleet: Fleet) -> None:
    def story(client: openai.OpenAI) -> list[Any]:
        done = client.completions.create(
            model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=12
        )
        said = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "How are you?"}],
            temperature=0,
            max_tokens=12,
        )
        assert done.usage and said.usage
        return [
            done.choices[0].text,
            done.choices[0].finish_reason,
            done.usage.total_tokens,
            said.choices[0].message.content,
            said.usage.total_tokens,
        ]

    ours, theirs = map(story, both(fleet))
    assert ours == theirs


def test_openai_client_streams_a_chat_with_tools(fleet: Fleet) -> None:
    def called(client: openai.OpenAI) -> list[Any]:
        chunks = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Is it raining in Rome?"}],
            tools=[
                {
                    "type": "function",
                    "function": {"name": "weather", "parameters": workload.TOWN},
                }
            ],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            temperature=0,
            max_tokens=80,
            stream=True,
            stream_options={"include_usage": True},
        )
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        calls = [
            call.function
            for delta in deltas
            for call in delta.tool_calls or []
            if call.function
        ]
        # Where the arguments are cut depends on how busy an engine is.
        arguments = "".join(call.arguments or "" for call in calls)
        return [*(call.name for call in calls if call.name), arguments]

    ours, theirs = map(called, both(fleet))
    assert ours == theirs
    assert ours[0] == "weather"


def test_openai_client_lists_the_model_and_raises_its_own_errors(fleet: Fleet) -> None:
    for client in both(fleet):
        assert [model.id for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model=MODEL, prompt="a", temperature=-1)


@pytest.mark.parametrize(
    "path, options",
    [
        (COMPLETIONS, {"model": "other"}),
        (COMPLETIONS, {"temperature": -1}),
        (COMPLETIONS, {"prompt": "too long " * 2000}),
        (COMPLETIONS, {"logprobs": 30, "stream": True, "prompt": ["a", "list"]}),
        (CHAT, {"messages": "none"}),
        (CHAT, {"tools": []}),
        ("/v1/nowhere", {}),
        ("/tokenize", {}),
    ],
)
def test_what_vllm_refuses_or_serves_alone_comes_back_unchanged(
    fleet: Fleet, path: str, options: JSON
) -> None:
    body = {"model": MODEL, "prompt": "abc"} | options
    ours, theirs = (
        request(address, "POST", path, body)
        for address in (fleet.proxy.address, fleet.plain.address)
    )
    assert (ours.status, ours.body) == (theirs.status, theirs.body)


def test_a_client_cannot_bring_a_hand_over_of_its_own(fleet: Fleet) -> None:
    # Reaching a decode engine, this one would end it: no blocks are named.
    params = {"kv_transfer_params": {"do_remote_prefill": True}}
    single = workload.completion("a hand-over", params)
    alone = workload.completion(["a hand-over", "of two"], params, two_legs=False)
    for question in (single, alone):
        assert workload.ask(fleet.proxy.address, question)["status"] == 200
    assert all(engine.ready() for engine in fleet.engines)


# --- Responses and messages -----------------------------------------------------------


def test_responses_and_messages_answer_as_one_plain_engine_does(fleet: Fleet) -> None:
    asked = workload.newer("nixl newer")
    with fleet.counted() as ledger:
        answers = workload.ask_all(fleet.proxy.address, asked)
    expected = workload.judge(answers, fleet.plain.address, asked)
    assert {answer["status"] for answer in expected} == {200}
    assert ledger.prefilled == ledger.transfers == len(asked)
    assert ledger.external + ledger.local == ledger.prompt_tokens
    assert (ledger.external > ledger.local, ledger.computed) == (True, 0)


def test_openai_client_has_responses_and_goes_on_from_them(fleet: Fleet) -> None:
    def story(client: openai.OpenAI) -> list[Any]:
        told: list[Any] = []
        for number in range(4):
            first = client.responses.create(
                model=MODEL, input=f"{number} towns", max_output_tokens=8, temperature=0
            )
            # Only the engine that made it knows it.
            again = client.responses.retrieve(first.id)
            assert again == first
            events = client.responses.create(
                model=MODEL,
                input="And then?",
                previous_response_id=first.id,
                max_output_tokens=8,
                temperature=0,
                stream=True,
            )
            *_, last = events
            assert last.type in ("response.completed", "response.incomplete"), last
            told += [first.output_text, last.type, last.response.output_text]
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.retrieve("resp_nowhere")
        return told

    ours, theirs = map(story, both(fleet))
    assert ours == theirs


def test_anthropic_client_has_messages(fleet: Fleet) -> None:
    def story(address: tuple[str, int]) -> list[Any]:
        url = f"http://{address[0]}:{address[1]}"
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        asked: list[anthropic.types.MessageParam]
        asked = [{"role": "user", "content": "Where is it warm?"}]
        message = client.messages.create(
            model=MODEL, messages=asked, max_tokens=8, extra_body={"temperature": 0}
        )
        with client.messages.stream(
            model=MODEL, messages=asked, max_tokens=8, extra_body={"temperature": 0}
        ) as stream:
            streamed = stream.get_final_message()
        (said,) = message.content
        assert said.type == "text"
        (said_again,) = streamed.content
        assert said_again.type == "text"
        assert said_again.text == said.text
        counted = client.messages.count_tokens(model=MODEL, messages=asked)
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(model="other", messages=asked, max_tokens=8)
        return [said.text, message.stop_reason, counted.input_tokens]

    ours, theirs = map(story, (fleet.proxy.address, fleet.plain.address))
    assert ours == theirs


# --- A chat's tokens ------------------------------------------------------------------


def test_chats_handed_over_in_tokens_answer_as_one_plain_engine_does(
    fleet: Fleet,
) -> None:
    asked = [
        question
        for question in workload.questions("nixl tokens")
        if question.path == CHAT
    ]
    argv = [*fleet.arguments, "--token-handover"]
    with ProxyProcess(argv) as proxy:
        proxy.wait_all_up()
        with fleet.counted() as ledger:
            answers = workload.ask_all(proxy.address, asked)
    workload.judge(answers, fleet.plain.address, asked)
    two_legged = sum(question.two_legs for question in asked)
    assert ledger.prefilled == ledger.transfers == two_legged


def test_decode_takes_the_tokens_for_the_prompt_and_looks_at_no_message(
    fleet: Fleet,
) -> None:
    told, untold = (workload.chat(text, {}) for text in ("The sea.", "The hills."))
    asks = {"do_remote_decode": True, "do_remote_prefill": False}
    leg = told.body | {"max_tokens": 1, "return_token_ids": True}
    first = fleet.prefill[0], leg | {"kv_transfer_params": asks}
    handed = request(first[0].address, "POST", CHAT, first[1]).json()
    params = handed["kv_transfer_params"] | {
        "prompt_token_ids": handed["prompt_token_ids"]
    }
    second = untold.body | {"kv_transfer_params": params}
    answer = workload.facts(request(fleet.decode[0].address, "POST", CHAT, second))
    assert answer == workload.ask(fleet.plain.address, told)
    assert answer != workload.ask(fleet.plain.address, untold)


# --- What the engines say -------------------------------------------------------------


def test_no_transfer_has_failed_and_no_hand_over_has_expired(fleet: Fleet) -> None:
    fleet.wait_idle()
    assert not [
        (engine.name, failure)
        for engine in fleet.engines
        for failure in FAILURES
        if engine.metric(failure)
    ]


# --- Clients that leave ---------------------------------------------------------------


@pytest.mark.parametrize("question", [workload.completion, workload.chat])
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_ends_the_request_on_the_decode_engine(
    fleet: Fleet, question: Callable[[str, JSON], Question], stream: bool
) -> None:
    asked = question("Tell me everything.", LONG | {"stream": stream})
    generated = fleet.decoded(GENERATED)
    with fleet.proxy.connect() as client:
        answer = client.post(asked.path, asked.body)
        if stream:
            answer.body_until(b"data: ")
        poll(lambda: fleet.decoded(RUNNING) == 1, "the request runs")
    fleet.wait_idle()
    assert fleet.decoded(GENERATED) - generated < LONG["max_tokens"]
