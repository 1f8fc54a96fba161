# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How the simulated engines hand KV over: stores of pinned KV, and the connectors.

A P pins the KV of a prompt under an id; a D claims it by that id, once, within the
lease. What a connector does with parameters it should never have been given is what
vLLM 0.33's does (vllm/distributed/kv_transfer/kv_connector/v1): compute on wrong KV,
wait for ever, or die.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from sim_api import JSON, Prompt, Sequence

if TYPE_CHECKING:
    from sim_engine import Engine, Generation

BLOCK_TOKENS = 16
CACHE_BLOCKS = 1 << 20
# Seconds for which a D tries to reach the P that a hand-over names.
HANDSHAKE_TIMEOUT = 5.0
# Hand-overs that are over and still recognised as such.
REMEMBERED = 1 << 16

Loading = Coroutine[Any, Any, None]


# --- KV that waits to be fetched ------------------------------------------------------


class Claim(msgspec.Struct):
    """What a D says when it fetches (or, with `drop`, only frees) KV of a P."""

    id: str
    engine_id: str
    blocks: Any = None
    drop: bool = False


class Verdict(msgspec.Struct):
    """What became of a claim: `ok` with the key of the prompt, or why not."""

    state: str
    prompt: int = 0


# The P is not there, or is not who the hand-over says: no KV, and D knows it.
UNREACHABLE = Verdict("unreachable")


class Pinned(NamedTuple):
    """The KV of one prefilled prompt, and the timer of its lease."""

    prompt: int
    blocks: list[list[int]]
    timer: asyncio.TimerHandle


class KvStore:
    """The KV that one P holds for others. Each piece is fetched once or expires."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lease: float) -> None:
        self.loop = loop
        self.lease = lease
        self.next_block = 1
        self.pinned: dict[str, Pinned] = {}
        # Why a hand-over is no more; the oldest are forgotten first.
        self.gone: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.clear()

    def clear(self) -> None:
        for pinned in self.pinned.values():
            pinned.timer.cancel()
        self.pinned.clear()
        self.counts = {"made": 0, "used": 0, "released": 0, "expired": 0}

    def pin(self, id: str, prompt: Prompt) -> list[list[int]]:
        """Pins a prompt's blocks for the lease and returns their ids."""
        count = -(-prompt.tokens // BLOCK_TOKENS)
        blocks = [list(range(self.next_block, self.next_block + count))]
        self.next_block = (self.next_block + count) % CACHE_BLOCKS + 1
        timer = self.loop.call_later(self.lease, self.unpin, id, "expired")
        self.pinned[id] = Pinned(prompt.key, blocks, timer)
        self.counts["made"] += 1
        return blocks

    def unpin(self, id: str, why: str) -> Pinned | None:
        pinned = self.pinned.pop(id, None)
        if pinned is None:
            return None
        pinned.timer.cancel()
        self.counts[why] += 1
        self.gone[id] = why
        if len(self.gone) > REMEMBERED:
            del self.gone[next(iter(self.gone))]
        return pinned

    def take(self, claim: Claim) -> Verdict:
        """Serves a claim; whatever the verdict, this KV serves no other."""
        pinned = self.unpin(claim.id, "released" if claim.drop else "used")
        if pinned is None:
            return Verdict(self.gone.get(claim.id, "unknown"))
        if claim.blocks != pinned.blocks:
            return Verdict("altered")
        return Verdict("ok", pinned.prompt)


# --- Claims across processes ----------------------------------------------------------


async def call(host: str, port: int, path: str, body: Any) -> Any:
    """Posts JSON to an engine of another process and returns its JSON answer.

    Raises:
        OSError: not reachable, no engine, or silent for `HANDSHAKE_TIMEOUT`.

    """
    content = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    async with asyncio.timeout(HANDSHAKE_TIMEOUT):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head.encode() + content)
        answer = await reader.read()
        writer.close()
    try:
        return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])
    except msgspec.DecodeError:
        raise ConnectionError("that is no engine") from None


async def take_remotely(host: str, port: int, claim: Claim) -> Verdict:
    """Lets the P at an address in another process serve a claim."""
    try:
        return msgspec.convert(await call(host, port, "/sim/take", claim), Verdict)
    except (OSError, msgspec.ValidationError):
        return UNREACHABLE


# --- Connectors -----------------------------------------------------------------------


class EngineDied(Exception):
    """What a request did to the engine core."""


class Connector:
    """No hand-over: every engine computes its prompts, or finds their KV by content."""

    def load(self, generation: Generation) -> Loading | None:
        """D: fetches the prompts' KV; a coroutine if that cannot be done at once.

        Raises:
            EngineDied: parameters that the real connector does not survive.

        """
        return None

    def finish(self, generation: Generation) -> JSON | None:
        """P: keeps the KV for a D; returns the answer's `kv_transfer_params`."""
        return None

    def reject(self, engine: Engine, params: JSON) -> None:
        """D: lets P free the KV of a request that was refused after parsing."""


async def wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


class NixlPull(Connector):
    """D reads from P by P's request id and block ids (contract of NixlConnector)."""

    ADDRESS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")

    def load(self, generation: Generation) -> Loading | None:
        params = generation.params
        if not params.get("do_remote_prefill"):
            return None
        if not params.get("remote_block_ids"):
            raise EngineDied("AssertionError: num_external_tokens == 0")
        missing = [name for name in self.ADDRESS if name not in params]
        if missing:
            generation.fatal_to_leave = f"KeyError: {missing[0]!r}"
            return wait_for_ever()
        peer = generation.engine.sim.peer(params["remote_host"], params["remote_port"])
        if peer is None:
            return self.load_remotely(generation)
        for sequence in generation.sequences:
            generation.judge(sequence, peer.take(self.claim(params)))
        return None

    async def load_remotely(self, generation: Generation) -> None:
        params = generation.params
        for sequence in generation.sequences:
            address = params["remote_host"], params["remote_port"]
            verdict = await take_remotely(*address, self.claim(params))
            generation.judge(sequence, verdict)

    def claim(self, params: JSON, drop: bool = False) -> Claim:
        id, engine_id = params["remote_request_id"], params["remote_engine_id"]
        return Claim(str(id), str(engine_id), params["remote_block_ids"], drop)

    def finish(self, generation: Generation) -> JSON | None:
        if not generation.params.get("do_remote_decode"):
            return None
        answered = None
        for sequence in generation.sequences:
            params = self.pin(generation, sequence)
            # Several were pinned, one is named: the first prompt's last choice.
            if sequence.prompt is generation.sequences[0].prompt:
                answered = params
        return answered

    def pin(self, generation: Generation, sequence: Sequence) -> JSON:
        engine, id = generation.engine, generation.internal_id(sequence)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": engine.kv.pin(id, sequence.prompt),
            "remote_engine_id": engine.rank_id(generation.rank),
            "remote_request_id": id,
            "remote_host": engine.sim.options.kv_host,
            "remote_port": engine.port,
            "tp_size": engine.tp_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": sequence.prompt.tokens,
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": 1,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    def reject(self, engine: Engine, params: JSON) -> None:
        named = all(params.get(name) is not None for name in self.ADDRESS)
        if not (named and params.get("do_remote_prefill")):
            return
        if not params.get("remote_block_ids"):
            return
        claim = self.claim(params, drop=True)
        peer = engine.sim.peer(params["remote_host"], params["remote_port"])
        if peer is not None:
            peer.take(claim)
            return
        address = params["remote_host"], params["remote_port"]
        engine.sim.spawn(take_remotely(*address, claim))


CONNECTORS: dict[str, type[Connector]] = {"nixl": NixlPull, "none": Connector}
