# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Connectors whose legs work at the same time: NIXL push, Mooncake over TCP.

As in test_nixl.py, the engines are the judges.
"""

import signal
from collections.abc import Callable, Iterator

import pytest
from e2e import engines, workload
from e2e.engines import Engine, EngineServer, Fleet
from e2e.workload import LONG, MESSAGES, RESPONSES, Question
from rig import JSON, poll

GENERATED = "vllm:generation_tokens_total"
RUNNING = "vllm:num_requests_running"
# Of the tiny model.
EOS_ID = 2


@pytest.fixture(scope="module", params=["nixl-push", "mooncake"])
def fleet(
    request: pytest.FixtureRequest, server: EngineServer, plain: Engine
) -> Iterator[Fleet]:
    """What the connector's recipe starts."""
    with engines.recipe_fleet(server, plain, request.param) as fleet:
        yield fleet


def test_cold_prompts_answer_as_one_plain_engine_does(fleet: Fleet) -> None:
    asked = workload.cold("cold pairs", workload.REQUESTS)
    with fleet.counted() as ledger:
        answers = workload.ask_all(fleet.proxy.address, asked)
    workload.judge(answers, fleet.plain.address, asked)
    # Every prompt token comes from a prefill engine.
    assert ledger.prefilled == len(asked)
    assert ledger.external == ledger.prompt_tokens > 0
    assert (ledger.local, ledger.computed) == (0, 0)


def test_sixty_requests_of_every_kind_answer_as_one_plain_engine_does(
    fleet: Fleet,
) -> None:
    asked = workload.questions("sixty pairs")
    with fleet.counted() as ledger:
        answers = workload.ask_all(fleet.proxy.address, asked)
    workload.judge(answers, fleet.plain.address, asked)
    assert ledger.prefilled == sum(question.two_legs for question in asked)


def test_responses_and_messages_answer_as_one_plain_engine_does(fleet: Fleet) -> None:
    # A response has an id of the engine's own, by which push cannot find its other
    # leg; a message may end with its first token, of which Mooncake moves nothing.
    two_legs = RESPONSES if fleet.name == "mooncake" else MESSAGES
    asked = workload.newer("newer pairs")
    with fleet.counted() as ledger:
        answers = workload.ask_all(fleet.proxy.address, asked)
    workload.judge(answers, fleet.plain.address, asked)
    assert ledger.prefilled == sum(question.path == two_legs for question in asked)


def test_answers_that_end_with_their_first_token_are_given(fleet: Fleet) -> None:
    ends = {"logit_bias": {str(EOS_ID): 100}}
    asked = [
        Question(question.path, question.body | ends)
        for question in workload.cold("it is over", 4)
    ]
    with fleet.counted() as ledger:
        answers = workload.ask_all(fleet.proxy.address, asked)
    assert answers == workload.ask_all(fleet.plain.address, asked)
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {1}
    assert ledger.external == ledger.prompt_tokens > 0


@pytest.mark.parametrize("question", [workload.completion, workload.chat])
def test_leaving_ends_the_request_on_the_decode_engine(
    fleet: Fleet, question: Callable[[str, JSON], Question]
) -> None:
    asked = question("Tell me everything.", LONG | {"stream": True})
    generated = fleet.decoded(GENERATED)
    with fleet.proxy.connect() as client:
        client.post(asked.path, asked.body).body_until(b"data: ")
        poll(lambda: fleet.decoded(RUNNING) == 1, "the request runs")
    fleet.wait_idle()
    assert fleet.decoded(GENERATED) - generated < LONG["max_tokens"]


def test_a_prefill_engine_that_was_restarted_serves_under_its_new_id(
    server: EngineServer, fleet: Fleet
) -> None:
    engine = fleet.prefill[0]
    engine.stop(signal.SIGKILL)
    key = "prefill", engine.instance
    poll(lambda: fleet.proxy.states()[key] == "down", f"{key} is down")
    # Decode engines would wait for the one that had the old id, so an id that was
    # given in the command has to be another one. Mooncake makes its own.
    named = {"prefill-127.0.0.1": "prefill-again"}
    pushes = fleet.name == "nixl-push"
    if pushes:
        admin(fleet, "remove", {"type": "prefill", "instance": engine.instance})
    again = server.start_again(engine, named if pushes else {})
    fleet.prefill[0] = again
    poll(again.ready, "it is ready again", engines.READY_TIMEOUT)
    if pushes:
        admin(fleet, "add", added(again, *named.values()))
    fleet.proxy.wait_all_up()
    asked = workload.cold("cold restart", 8)
    with fleet.counted() as ledger:
        answers = workload.ask_all(fleet.proxy.address, asked)
    assert answers == workload.ask_all(fleet.plain.address, asked)
    assert ledger.external == ledger.prompt_tokens > 0
    assert again.metric("vllm:request_success_total") > 0


def admin(fleet: Fleet, action: str, order: JSON) -> None:
    """A request to one of the proxy's admin routes."""
    headers = {"X-API-Key": engines.ADMIN_KEY}
    answer = fleet.proxy.request("POST", f"/instances/{action}", order, headers)
    assert answer.status == 200, answer


def added(engine: Engine, engine_id: str) -> JSON:
    """What is said of an engine that pushes."""
    return {
        "type": "prefill",
        "instance": engine.instance,
        "engine_id": engine_id,
        "kv_host": engine.address[0],
        "side_channel_port": int(engine.order["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
    }
