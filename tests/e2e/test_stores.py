# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""1P1D over stores in which KV is found by its content, with the same `auto`.

Such connectors exchange no hand-over: prefill stores blocks under a hash of the
prompt, decode finds them there. ExampleConnector does so before it answers,
MooncakeStoreConnector beside it, so that decode may come too early and compute.
"""

from collections.abc import Iterator

import pytest
from e2e import engines, workload
from e2e.engines import BLOCK_SIZE, Engine, EngineServer, Fleet
from e2e.workload import Question
from rig import poll

# What a recipe has for machines of a cluster.
SIZES = {"4GB": "64MB", "1GB": "64MB"}
PUTS = "vllm:mooncake_store_operation_keys_total"


@pytest.fixture(scope="module", params=["example", "mooncake-store"])
def fleet(
    request: pytest.FixtureRequest,
    server: EngineServer,
    plain: Engine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    """One prefill and one decode engine that share a store."""
    folder = str(tmp_path_factory.mktemp("storage"))
    changes = {"/mnt/kv": folder, "/etc/mooncake": folder, **SIZES}
    with engines.recipe_fleet(server, plain, request.param, changes) as fleet:
        yield fleet


def test_sixty_requests_at_once_answer_as_one_plain_engine_does(fleet: Fleet) -> None:
    asked = workload.questions("stored sixty")
    with fleet.counted() as ledger:
        answers = workload.ask_all(fleet.proxy.address, asked)
    workload.judge(answers, fleet.plain.address, asked)
    assert ledger.prefilled == sum(question.two_legs for question in asked)
    assert ledger.external > 0


# Not whole blocks: ExampleConnector does not find those again.
@pytest.mark.parametrize("words", [30, 60, 91])
def test_decode_engine_finds_every_block_that_the_prefill_engine_stored(
    fleet: Fleet, words: int
) -> None:
    question = workload.completion(workload.text(f"stored {words}", words), {})
    if "mooncake" in fleet.name:
        store(fleet.prefill[0], question)
    with fleet.counted() as ledger:
        answer = workload.ask(fleet.proxy.address, question)
    assert answer == workload.ask(fleet.plain.address, question)
    prompt_tokens = answer["usage"]["prompt_tokens"]
    found = prompt_tokens // BLOCK_SIZE * BLOCK_SIZE
    assert 0 < found < prompt_tokens
    assert (ledger.prefilled, ledger.external, ledger.local) == (1, found, 0)
    assert ledger.computed == prompt_tokens - found


def store(engine: Engine, question: Question) -> None:
    """Has a prefill engine store the KV of a prompt, and waits until it has."""
    before = engine.metric(PUTS, operation="save_put")
    blocks = workload.ask(engine.address, question)["usage"]["prompt_tokens"]
    blocks //= BLOCK_SIZE

    def stored() -> bool:
        # Figures come with an engine's next step.
        workload.ask(engine.address, workload.completion("a", {"max_tokens": 1}))
        return bool(engine.metric(PUTS, operation="save_put") >= before + blocks)

    poll(stored, "the blocks are stored", engines.ANSWER_TIMEOUT)


def test_bypassed_requests_take_nothing_from_the_store(fleet: Fleet) -> None:
    asked = workload.bypassed("stored bypass")
    with fleet.counted() as ledger:
        answers = workload.ask_all(fleet.proxy.address, asked)
    assert answers == workload.ask_all(fleet.plain.address, asked)
    assert (ledger.prefilled, ledger.external) == (0, 0)
