# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KV events of a real engine: the script as it is, and a subscriber that is hindered.

What the engine holds is known from two sources that share nothing with the
subscriber: a replay from 0, read with msgspec here, and the engine's own counter of
prompt tokens found in its cache.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import zmq
from e2e import engines
from e2e.engines import BLOCK_SIZE, HOST, MODEL, READY_TIMEOUT, Engine, EngineServer
from kv_publisher import (
    END_MARKER,
    TOPIC,
    SubscriberProcess,
    free_ports,
    session_members,
)
from rig import JSON, ROOT, poll

# Messages that the engine queues for a subscriber; small, so that it overflows.
HIGH_WATER = 10
PROMPT_BLOCKS = 60
# Prompts, of which the last few fit into the cache. Their events are 9 KB each, and
# the sockets of a stopped subscriber take about 3 MB.
BURST = 500
AT_ONCE = 4
CACHE_HITS = "vllm:prefix_cache_hits_total"
SCRIPT_ARGS = f"""--dtype float32 --enforce-eager --max-model-len 1024
    --max-num-batched-tokens 1024 --max-num-seqs 8 --block-size {BLOCK_SIZE}
    --kv-cache-memory-bytes 33554432"""


# --- The script -----------------------------------------------------------------------


def test_the_script_prints_both_answers_and_the_events_of_a_real_engine(
    model: Path, tmp_path: Path
) -> None:
    vllm = tmp_path / "bin" / "vllm"
    vllm.parent.mkdir()
    # This build's own `vllm` command fails. Arguments: serve MODEL OPTION...
    module = "vllm.entrypoints.openai.api_server"
    vllm.write_text(
        f'#!/bin/sh\nshift\nmodel=$1\nshift\nexec "{sys.executable}" -m {module} '
        '--model "$model" "$@"\n'
    )
    vllm.chmod(0o755)
    python = Path(sys.executable).parent
    script = subprocess.Popen(
        ["bash", str(ROOT / "kv_events.sh")],
        cwd=tmp_path,
        env={
            **os.environ,
            **engines.ENVIRONMENT,
            "PATH": f"{vllm.parent}:{python}:{os.environ['PATH']}",
            "HF_MODEL_NAME": str(model),
            "PORT": str(free_ports()),
            "KV_EVENTS_PORT": str(free_ports()),
            "KV_REPLAY_PORT": str(free_ports()),
            "VLLM_ARGS": SCRIPT_ARGS,
            "STARTUP_TIMEOUT": str(int(READY_TIMEOUT)),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = script.communicate(timeout=2 * READY_TIMEOUT)
    assert script.returncode == 0, err
    answers = [line for line in out.splitlines() if line.startswith("Answer: ")]
    assert len(answers) == 2
    for answer in answers:
        completion = json.loads(answer.removeprefix("Answer: "))
        assert completion["usage"]["completion_tokens"] > 0
    events = out.partition("Events:\n")[2]
    assert '"type":"BlockStored"' in events
    assert " GPU resident" in events
    poll(lambda: not session_members(script.pid), "no process is left")


# --- The engine's own view ------------------------------------------------------------


@dataclass
class Ports:
    """Where an engine publishes; kept over its restart."""

    live: int
    replay: int

    def options(self) -> list[str]:
        """For the subscriber."""
        return [
            f"--endpoint=tcp://{HOST}:{self.live}",
            f"--replay-endpoint=tcp://{HOST}:{self.replay}",
        ]

    def config(self) -> str:
        """For the engine."""
        return json.dumps(
            {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{self.live}",
                "replay_endpoint": f"tcp://{HOST}:{self.replay}",
                "topic": TOPIC,
                "hwm": HIGH_WATER,
            }
        )

    def recorded(self) -> list[tuple[int, list[JSON]]]:
        """Every batch the engine ever published, by a replay from 0."""
        batches: list[tuple[int, list[JSON]]] = []
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(f"tcp://{HOST}:{self.replay}")
            dealer.send_multipart([b"", bytes(8)])
            while True:
                assert dealer.poll(int(1000 * engines.ANSWER_TIMEOUT))
                *_, seq, payload = dealer.recv_multipart()
                if seq == END_MARKER:
                    return batches
                _, events, _ = msgspec.msgpack.decode(payload)
                batches.append((int.from_bytes(seq, "big"), events))


class Blocks:
    """Blocks as a router's index keeps them, from events in the form of JSON."""

    def __init__(self) -> None:
        self.copies: Counter[int] = Counter()
        self._child: dict[tuple[int | None, tuple[int, ...]], int] = {}

    def apply(self, event: JSON) -> None:
        """Takes the next event."""
        if event["type"] == "BlockStored":
            parent, tokens = event["parent_block_hash"], iter(event["token_ids"])
            for block in event["block_hashes"]:
                self.copies[block] += 1
                chunk = tuple(itertools.islice(tokens, event["block_size"]))
                self._child[parent, chunk] = parent = block
        elif event["type"] == "BlockRemoved":
            self.copies.subtract(event["block_hashes"])
            self.copies = +self.copies
        else:
            self.copies.clear()

    def cached(self, prompt: list[int]) -> int:
        """Tokens of a prompt that need not be computed: whole blocks, never all."""
        parent: int | None = None
        for start in range(0, len(prompt) - BLOCK_SIZE, BLOCK_SIZE):
            chunk = tuple(prompt[start : start + BLOCK_SIZE])
            parent = self._child.get((parent, chunk))
            if not self.copies[parent or 0]:
                return start
        return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


class Follower:
    """The subscriber as a process, and the blocks that its lines leave."""

    def __init__(self, ports: Ports, *where: str) -> None:
        self.blocks = Blocks()
        options = where or ports.options()
        self.process = SubscriberProcess("--format=json", *options)
        self.restarts = 0
        self._ports = ports
        self._last = -1

    def catch_up(self) -> None:
        """Reads until the last event that the engine has published."""
        last, events = self._ports.recorded()[-1]
        # A prompt that was found whole changes nothing.
        left = len(events) if last != self._last else 0
        self._last = last
        while left:
            event = self.process.next_event()
            assert event["type"] != "BatchesLost", event
            self.restarts += event["type"] == "PublisherRestarted"
            self.blocks.apply(event)
            left -= event["seq"] == last

    def recorded(self) -> Blocks:
        """What it should have found."""
        blocks = Blocks()
        for _, events in self._ports.recorded():
            for event in events:
                blocks.apply(event)
        return blocks

    def summary(self) -> str:
        """Ends it, and returns its last words."""
        assert self.process.stop() == []
        return self.process.log[-1]


# --- Hindered subscribers -------------------------------------------------------------


def start(server: EngineServer, ports: Ports, name: str) -> Engine:
    """Forks an engine that publishes, and waits for it."""
    options = [f"--kv-events-config={ports.config()}"]
    # With /reset_prefix_cache.
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    engine = server.start(name, env=env, options=options)
    poll(engine.ready, f"{name} is ready", READY_TIMEOUT)
    return engine


@pytest.fixture(scope="module")
def ports() -> Ports:
    return Ports(free_ports(), free_ports())


@pytest.fixture(scope="module")
def engine(server: EngineServer, ports: Ports) -> Iterator[Engine]:
    engine = start(server, ports, "kv-events")
    yield engine
    engine.stop()


def prompts(seed: str, count: int) -> list[list[int]]:
    """Random prompts, with one token beyond their last whole block."""
    dice = random.Random(seed)
    length = PROMPT_BLOCKS * BLOCK_SIZE + 1
    return [dice.choices(range(10, 500), k=length) for _ in range(count)]


def ask(engine: Engine, *asked: list[int]) -> None:
    """Has the engine compute prompts."""
    body = {"model": MODEL, "prompt": list(asked), "max_tokens": 1}
    answer = engines.request(engine.address, "POST", "/v1/completions", body)
    assert answer.status == 200, answer.body


def compare_with_engine(
    engine: Engine, follower: Follower, asked: list[list[int]]
) -> set[int]:
    """Asks again; each time the engine must find what the blocks let expect."""
    follower.catch_up()
    assert follower.blocks.copies == follower.recorded().copies
    seen = set()
    for prompt in asked:
        before = engine.metric(CACHE_HITS)
        expected = follower.blocks.cached(prompt)
        ask(engine, prompt)
        assert engine.metric(CACHE_HITS) - before == expected
        seen.add(expected)
        follower.catch_up()
    return seen


def test_b81_stopped_beyond_the_high_water_mark_and_started_late(
    engine: Engine, ports: Ports
) -> None:
    asked = prompts("burst", BURST)
    ask(engine, asked[0])
    follower = Follower(ports)
    with follower.process:
        follower.catch_up()
        follower.process.signal(signal.SIGSTOP)
        for at in range(1, BURST, AT_ONCE):
            ask(engine, *asked[at : at + AT_ONCE])
        follower.process.signal(signal.SIGCONT)
        again = [*asked[-3:], *asked[:3], asked[-1]]
        # Found whole, or evicted.
        assert compare_with_engine(engine, follower, again) == {
            PROMPT_BLOCKS * BLOCK_SIZE,
            0,
        }
        late = Follower(ports)
        with late.process:
            late.catch_up()
            assert late.blocks.copies == follower.blocks.copies
            assert f"{len(late.blocks.copies)} GPU resident" in late.summary()
        summary = follower.summary()
        assert f"{len(follower.blocks.copies)} GPU resident" in summary
        assert " 0 batches lost" in summary
        # The first one was the start. The burst did overflow, as it took another:
        # for a gap, or if all of its end was lost, because it was quiet.
        assert int(summary.split()[-2]) > 1


def test_b81_a_reset_of_the_cache_leaves_no_block(engine: Engine, ports: Ports) -> None:
    asked = prompts("reset", 2)
    # What the engine says about its endpoints is enough to follow it.
    follower = Follower(ports, f"--source=http://{engine.instance}")
    with follower.process:
        ask(engine, asked[0])
        follower.catch_up()
        assert follower.blocks.cached(asked[0])
        target = "/reset_prefix_cache"
        assert engines.request(engine.address, "POST", target, {}).status == 200
        ask(engine, asked[1])
        follower.catch_up()
        assert not follower.blocks.cached(asked[0])
        assert len(follower.blocks.copies) == PROMPT_BLOCKS
        assert f" {PROMPT_BLOCKS} GPU resident" in follower.summary()


def test_b81_a_restarted_engine_is_noted_and_followed(
    server: EngineServer,
) -> None:
    ports = Ports(free_ports(), free_ports())
    asked = prompts("restart", 4)
    follower = Follower(ports)
    with follower.process:
        first = start(server, ports, "kv-events-first")
        try:
            ask(first, asked[0])
            follower.catch_up()
        finally:
            first.stop()
        second = start(server, ports, "kv-events-again")
        try:
            for prompt in asked[1:]:
                ask(second, prompt)
            compare_with_engine(second, follower, asked)
            assert follower.restarts == 1
            assert len(follower.blocks.copies) == 4 * PROMPT_BLOCKS
            assert f" {4 * PROMPT_BLOCKS} GPU resident" in follower.summary()
            assert any("PublisherRestarted" in line for line in follower.process.log)
        finally:
            second.stop()
