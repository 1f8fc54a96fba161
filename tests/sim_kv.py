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
from urllib.parse import urlsplit

import msgspec
from sim_api import JSON, Prompt, Sequence

if TYPE_CHECKING:
    from sim_engine import Engine, Simulation
    from sim_generation import Generation

BLOCK_TOKENS = 16
CACHE_BLOCKS = 1 << 20
# Seconds for which a D tries to reach the P that a hand-over names.
HANDSHAKE_TIMEOUT = 5.0
# Hand-overs that are over and still recognised as such.
REMEMBERED = 1 << 16

Loading = Coroutine[Any, Any, None]


# --- KV that waits to be fetched ------------------------------------------------------


class Claim(msgspec.Struct):
    """What a D says when it fetches KV of a P.

    Attributes:
        id: names the KV; each connector has its own way.
        engine_id: who the P should be, if the connector checks that.
        blocks: the block ids, if the connector transports them.
        about: what the D believes of both sides, as the P pinned it.
        drop: only frees the KV.
        wait: the KV need not be there yet.

    """

    id: str
    engine_id: str | None = None
    blocks: Any = None
    about: JSON = {}
    drop: bool = False
    wait: bool = False


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
    about: JSON
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
        self.waiters: dict[str, list[asyncio.Future[None]]] = {}
        self.counts: dict[str, int] = {}
        self.clear()

    def clear(self) -> None:
        for pinned in self.pinned.values():
            pinned.timer.cancel()
        self.pinned.clear()
        self.counts = {"made": 0, "used": 0, "released": 0, "expired": 0}

    def pin(self, id: str, prompt: Prompt, **about: Any) -> list[list[int]]:
        """Pins a prompt's blocks for the lease and returns their ids."""
        count = -(-prompt.tokens // BLOCK_TOKENS)
        blocks = [list(range(self.next_block, self.next_block + count))]
        self.next_block = (self.next_block + count) % CACHE_BLOCKS + 1
        timer = self.loop.call_later(self.lease, self.unpin, id, "expired")
        self.pinned[id] = Pinned(prompt.key, blocks, about, timer)
        self.counts["made"] += 1
        for waiter in self.waiters.pop(id, []):
            if not waiter.done():
                waiter.set_result(None)
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
        if claim.blocks not in (None, pinned.blocks):
            return Verdict("altered")
        if not claim.drop and claim.about != pinned.about:
            return Verdict("wrong_peer")
        return Verdict("ok", pinned.prompt)

    async def until_pinned(self, id: str) -> None:
        """Returns once KV is pinned under an id; there is no limit."""
        if id not in self.pinned:
            waiter = self.loop.create_future()
            self.waiters.setdefault(id, []).append(waiter)
            await waiter


# --- Claims across processes ----------------------------------------------------------


async def wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


class Gone(ConnectionError):
    """An engine that was reached, and left without an answer."""


async def call(host: str, port: int, method: str, path: str, body: Any = None) -> Any:
    """One JSON request to an engine of another process.

    Raises:
        OSError: not reachable within `HANDSHAKE_TIMEOUT`, or `Gone`.

    """
    content = msgspec.json.encode(body)
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    async with asyncio.timeout(HANDSHAKE_TIMEOUT):
        reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + content)
        answer = await reader.read()
        return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])
    except msgspec.DecodeError:
        raise Gone("it did not answer as an engine does") from None
    finally:
        writer.close()


async def fetch(sim: Simulation, host: Any, port: Any, claim: Claim) -> Verdict:
    """Lets the P at an address serve a claim, in whatever process it is."""
    peer = sim.peer(host, port)
    if peer is not None:
        return await peer.fetch(claim)
    if not isinstance(host, str) or not isinstance(port, int):
        return UNREACHABLE
    try:
        answer = await call(host, port, "POST", "/sim/take", claim)
    except (OSError, OverflowError) as error:
        if claim.wait and isinstance(error, Gone):
            await wait_for_ever()
        return UNREACHABLE
    return msgspec.convert(answer, Verdict)


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


async def fetch_all(generation: Generation, host: Any, port: Any, claim: Claim) -> None:
    """Makes the same claim for every sequence, as the connectors do."""
    for sequence in generation.sequences:
        verdict = await fetch(generation.engine.sim, host, port, claim)
        generation.judge(sequence, verdict)


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
        address = params["remote_host"], params["remote_port"]
        peer = generation.engine.sim.peer(*address)
        if peer is None:
            return fetch_all(generation, *address, self.claim(params))
        for sequence in generation.sequences:
            generation.judge(sequence, peer.take(self.claim(params)))
        return None

    def claim(self, params: JSON, drop: bool = False) -> Claim:
        id, engine_id = params["remote_request_id"], params["remote_engine_id"]
        blocks = params["remote_block_ids"]
        return Claim(str(id), str(engine_id), blocks, drop=drop)

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

    def key(self, internal_id: str) -> str:
        """What P's KV is claimed by."""
        return internal_id

    def pin(self, generation: Generation, sequence: Sequence) -> JSON:
        engine, id = generation.engine, generation.internal_id(sequence)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": engine.kv.pin(self.key(id), sequence.prompt),
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
        address = params["remote_host"], params["remote_port"]
        engine.sim.spawn(fetch(engine.sim, *address, self.claim(params, drop=True)))


class NixlPush(NixlPull):
    """P writes to the D that registered with it under the same request id."""

    INDEXED = ("remote_engine_id", "remote_host", "remote_port", "tp_size")

    def load(self, generation: Generation) -> Loading | None:
        params = generation.params
        if not params.get("do_remote_prefill"):
            return None
        for name in (*self.INDEXED, "remote_request_id"):
            if name not in params:
                raise EngineDied(f"KeyError: {name!r}")
        return self.register(generation)

    async def register(self, generation: Generation) -> None:
        params = generation.params
        address = params["remote_host"], params["remote_port"]
        for sequence in generation.sequences:
            id = without_suffix(generation.internal_id(sequence))
            claim = Claim(id, str(params["remote_engine_id"]), wait=True)
            verdict = await fetch(generation.engine.sim, *address, claim)
            generation.judge(sequence, verdict)

    def pin(self, generation: Generation, sequence: Sequence) -> JSON:
        params = super().pin(generation, sequence)
        del params["remote_blocks_expiry_time"]
        del params["remote_registration_generation"]
        return params | {"transfer_mode": "push"}

    def key(self, internal_id: str) -> str:
        return without_suffix(internal_id)

    def reject(self, engine: Engine, params: JSON) -> None:
        """Nothing to free: the KV is P's until it has been written."""


def without_suffix(internal_id: str) -> str:
    """A request id without the 8 hex digits that each engine adds."""
    return internal_id.rpartition("-")[0]


class Mooncake(Connector):
    """D asks the P that a bootstrap server names, by a transfer id."""

    NEEDED = ("remote_bootstrap_addr", "remote_engine_id", "transfer_id")

    def __init__(self) -> None:
        # Engine id to address, never asked again.
        self.known: dict[str, tuple[str, int]] = {}

    def load(self, generation: Generation) -> Loading | None:
        params, role = generation.params, generation.engine.role
        if params.get("do_remote_decode") and role == "decode":
            raise EngineDied("AssertionError: do_remote_decode to a kv_consumer")
        if not params.get("do_remote_prefill"):
            return None
        if role == "prefill":
            raise EngineDied("AssertionError: do_remote_prefill to a kv_producer")
        if any(params.get(name) is None for name in self.NEEDED):
            return wait_for_ever()
        return self.receive(generation)

    async def receive(self, generation: Generation) -> None:
        params = generation.params
        engine_id = str(params["remote_engine_id"])
        try:
            address = await self.address(generation.engine.sim, engine_id, params)
        except (OSError, ValueError, LookupError):
            generation.load_failed = True
            return
        claim = Claim(f"{engine_id}/{params['transfer_id']}", engine_id, wait=True)
        await fetch_all(generation, *address, claim)

    async def address(
        self, sim: Simulation, engine_id: str, params: JSON
    ) -> tuple[str, int]:
        """The P's address, from its bootstrap server (GET /query)."""
        if engine_id not in self.known:
            where = urlsplit(params["remote_bootstrap_addr"])
            host, port = where.hostname or "", where.port or 80
            ranks = await call(host, port, "GET", "/query")
            for rank in ranks.values():
                worker = urlsplit(rank["worker_addr"]["0"]["0"])
                address = worker.hostname or "", worker.port or 0
                self.known[rank["engine_id"]] = address
        return self.known[engine_id]

    def finish(self, generation: Generation) -> JSON | None:
        params, engine = generation.params, generation.engine
        if not params.get("do_remote_decode") or params.get("transfer_id") is None:
            return None
        rank_id = engine.rank_id(generation.rank)
        for sequence in generation.sequences:
            if sequence.finish_reason == "length":
                engine.kv.pin(f"{rank_id}/{params['transfer_id']}", sequence.prompt)
        return None
