# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""1P1D over ExampleConnector: KV found by content, with the same `auto`.

Such connectors exchange no hand-over: prefill stores blocks under a hash of the
prompt, decode finds them there.
"""

from collections.abc import Iterator

import pytest
from e2e import engines, workload
from e2e.engines import BLOCK_SIZE, Engine, EngineServer, Fleet


@pytest.fixture(scope="module")
def fleet(
    server: EngineServer, plain: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """One prefill and one decode engine that share a folder."""
    storage = {"/mnt/kv": str(tmp_path_factory.mktemp("storage"))}
    with engines.recipe_fleet(server, plain, "example", storage) as fleet:
        yield fleet


def test_sixty_requests_at_once_answer_as_one_plain_engine_does(fleet: Fleet) -> None:
    asked = workload.questions("example sixty")
    with fleet.counted() as ledger:
        answers = workload.ask_all(fleet.proxy.address, asked)
    expected = workload.ask_all(fleet.plain.address, asked)
    for question, ours, theirs in zip(asked, answers, expected, strict=True):
        assert ours == theirs, question
    assert ledger.prefilled == sum(question.two_legs for question in asked)


def test_decode_engine_finds_every_block_that_the_prefill_engine_stored(
    fleet: Fleet,
) -> None:
    for words in (30, 60, 90):
        question = workload.completion(workload.text(f"example {words}", words), {})
        with fleet.counted() as ledger:
            answer = workload.ask(fleet.proxy.address, question)
        prompt_tokens = answer["usage"]["prompt_tokens"]
        # Whole blocks only, and the last token is always computed.
        assert prompt_tokens - ledger.external <= BLOCK_SIZE
        assert ledger.computed == prompt_tokens - ledger.external


def test_bypassed_requests_take_nothing_from_the_store(fleet: Fleet) -> None:
    asked = workload.bypassed("example bypass")
    with fleet.counted() as ledger:
        answers = workload.ask_all(fleet.proxy.address, asked)
    assert answers == workload.ask_all(fleet.plain.address, asked)
    assert (ledger.prefilled, ledger.external) == (0, 0)
