# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The MoRIIO connector of the simulated engine, and its heartbeat.

Addresses travel in the request id, registrations over ZMQ; both are read as strictly
as vLLM 0.33 reads them (kv_connector/v1/moriio/moriio_common.py). The side channels
of the simulation are the engines' HTTP ports.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import zmq
from sim_api import JSON, Sequence
from sim_kv import (
    UNREACHABLE,
    Claim,
    Connector,
    EngineDied,
    Loading,
    Verdict,
    fetch,
    fetch_all,
    wait_for_ever,
)

if TYPE_CHECKING:
    from sim_engine import Engine
    from sim_generation import Generation

# Seconds between two registrations (MoRIIOConstants.PING_INTERVAL).
PING_INTERVAL = 3.0

PREFILL_MARK = "___prefill_addr_"
DECODE_MARK = "___decode_addr_"
UID_LENGTH = 32
HEX = frozenset("0123456789abcdef")
# D claimed tokens of which it then fetched none.
NOTHING_READ = Verdict("nothing_read")


# --- Addresses in request ids ---------------------------------------------------------


class Address(NamedTuple):
    """A zmq_address: host and the ports of the two side channels."""

    host: str
    handshake: int
    notify: int


def prefill_part(request_id: str) -> str | None:
    """The shortest text between the first P mark and a D mark after it."""
    start = request_id.find(PREFILL_MARK)
    if start < 0:
        return None
    start += len(PREFILL_MARK)
    end = request_id.find(DECODE_MARK, start + 1)
    return request_id[start:end] if end > 0 else None


def decode_part(request_id: str) -> str | None:
    """The longest text after the first D mark that a `_` and a uid follow.

    The uid is 32 lower-case hex digits at the end of the id, or before a `-`.
    """
    start = request_id.find(DECODE_MARK)
    if start < 0:
        return None
    start += len(DECODE_MARK)
    end = len(request_id)
    while (end := request_id.rfind("_", start + 1, end)) > 0:
        uid, rest = request_id[end + 1 :][:UID_LENGTH], request_id[end + 1 :]
        is_uid = len(uid) == UID_LENGTH and HEX.issuperset(uid)
        if is_uid and rest[UID_LENGTH:][:1] in ("", "-"):
            return request_id[start:end]
    return None


def parse_address(text: str) -> Address:
    """Reads `host:H,handshake:N,notify:N`; hosts may have colons.

    Raises:
        ValueError: a part is missing, or a port is no number.

    """
    parts = dict(part.split(":", 1) for part in text.split(","))
    try:
        return Address(parts["host"], int(parts["handshake"]), int(parts["notify"]))
    except KeyError as missing:
        raise ValueError(f"{text!r} has no {missing}") from None


def peer_address(request_id: str, is_producer: bool, params: JSON) -> Address:
    """Where the other leg's engine is: from the id, else from the params.

    Raises:
        EngineDied: neither says, or the address is malformed.

    """
    text = decode_part(request_id) if is_producer else prefill_part(request_id)
    names = ("remote_host", "remote_handshake_port", "remote_notify_port")
    try:
        if text is not None:
            return parse_address(text)
        host, handshake, notify = (params[name] for name in names)
        return Address(host, int(handshake), int(notify))
    except (KeyError, TypeError, ValueError) as error:
        raise EngineDied(f"ValueError: no peer address: {error!r}") from None


# --- The connector --------------------------------------------------------------------


class Moriio(Connector):
    """READ: D reads the blocks that P names. WRITE: P writes to the D that waits."""

    def load(self, generation: Generation) -> Loading | None:
        params, role = generation.params, generation.engine.role
        mode = generation.engine.sim.options.transfer_mode
        if role == "prefill" and params.get("do_remote_decode"):
            self.check_producer(generation, mode)
            return None
        if role == "prefill" or not params.get("do_remote_prefill"):
            return None
        id = generation.internal_id(generation.sequences[0])
        address = peer_address(id, False, params)
        receive = self.read if mode == "READ" else self.receive
        return receive(generation, address)

    def check_producer(self, generation: Generation, mode: str) -> None:
        params = generation.params
        id = generation.internal_id(generation.sequences[0])
        peer_address(id, True, params)
        if mode == "WRITE":
            for name in ("remote_engine_id", "remote_block_ids"):
                if name not in params:
                    raise EngineDied(f"KeyError: {name!r}")

    async def read(self, generation: Generation, address: Address) -> None:
        params = generation.params
        blocks = params.get("remote_block_ids")
        if "remote_engine_id" not in params or not blocks:
            for sequence in generation.sequences:
                generation.judge(sequence, NOTHING_READ)
            return
        claim = self.claim(generation, blocks, wait=False)
        await fetch_all(generation, address.host, address.handshake, claim)

    async def receive(self, generation: Generation, address: Address) -> None:
        sim, claim = generation.engine.sim, self.claim(generation, None, wait=True)
        for sequence in generation.sequences:
            verdict = UNREACHABLE
            if self.notifies(generation):
                verdict = await fetch(sim, address.host, address.notify, claim)
            if verdict is UNREACHABLE:
                # Nobody writes, and nothing here tells.
                await wait_for_ever()
            generation.judge(sequence, verdict)

    def notifies(self, generation: Generation) -> bool:
        """Whether this rank tells P where to write to."""
        params = generation.params
        if isinstance(params.get("is_request_leader"), bool):
            return bool(params["is_request_leader"])
        if params.get("remote_dp_rank_override"):
            return bool(generation.rank == params.get("remote_dp_rank", 0))
        return True

    def claim(self, generation: Generation, blocks: Any, wait: bool) -> Claim:
        engine, params = generation.engine, generation.params
        about = {
            "p": believed_sizes(params, engine),
            "d": [engine.dp_size, engine.tp_size],
            "d_address": zmq_address(engine),
        }
        id = f"{params.get('remote_dp_rank') or 0}/{transfer_id(generation)}"
        return Claim(id, blocks=blocks, about=about, wait=wait)

    def finish(self, generation: Generation) -> JSON | None:
        engine, params = generation.engine, generation.params
        if engine.role != "prefill" or not params.get("do_remote_decode"):
            return None
        answered = None
        for sequence in generation.sequences:
            if sequence.finish_reason == "length":
                answered = self.pin(generation, sequence)
        return answered

    def pin(self, generation: Generation, sequence: Sequence) -> JSON:
        engine, params = generation.engine, generation.params
        id = generation.internal_id(generation.sequences[0])
        peer = peer_address(id, True, params)
        transfer = transfer_id(generation)
        blocks = engine.kv.pin(
            f"{generation.rank}/{transfer}",
            sequence.prompt,
            p=[engine.dp_size, engine.tp_size],
            d=believed_sizes(params, engine),
            d_address="host:{},handshake:{},notify:{}".format(*peer),
        )
        host, port = engine.sim.options.host, str(engine.port)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": blocks,
            "remote_engine_id": f"{host}:{port}",
            "remote_host": host,
            "remote_handshake_port": port,
            "remote_notify_port": port,
            "remote_dp_rank": generation.rank,
            "remote_dp_rank_override": True,
            "remote_dp_size": engine.dp_size,
            "remote_dp_size_local": engine.dp_size,
            "tp_size": engine.tp_size,
            "transfer_id": transfer,
        }


def transfer_id(generation: Generation) -> str:
    """The legs' common name; without one each engine makes up its own."""
    given = generation.params.get("transfer_id")
    if given is not None:
        return str(given)
    return f"sidecar-{generation.internal_id(generation.sequences[0])}"


def believed_sizes(params: JSON, engine: Engine) -> list[int]:
    """The DP and TP size of the other side, as the params give them."""
    tp = params.get("remote_tp_size") or params.get("tp_size") or engine.tp_size
    return [params.get("remote_dp_size") or 1, tp]


def zmq_address(engine: Engine) -> str:
    host = engine.sim.options.host
    return f"host:{host},handshake:{engine.port},notify:{engine.port}"


# --- Registration ---------------------------------------------------------------------


class Heartbeat:
    """Registers an engine with a proxy, again and again (MoRIIOHeartbeat)."""

    def __init__(self, engine: Engine, endpoint: str) -> None:
        self.engine = engine
        self.endpoint = endpoint
        self.socket: zmq.Socket[bytes] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def message(self) -> bytes:
        engine, options = self.engine, self.engine.sim.options
        registration = {
            "type": "D" if engine.role == "decode" else "P",
            "http_address": f"{options.host}:{engine.port}",
            "zmq_address": zmq_address(engine),
            "dp_size": engine.dp_size,
            "tp_size": engine.tp_size,
            "transfer_mode": options.transfer_mode,
        }
        return msgspec.msgpack.encode(registration)

    def start(self) -> None:
        if self.socket is None:
            self.socket = zmq.Context.instance().socket(zmq.DEALER)
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.connect(f"tcp://{self.endpoint}")
            self.beat(self.socket, self.message())

    def beat(self, socket: zmq.Socket[bytes], message: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            socket.send(message, zmq.NOBLOCK)
        sim = self.engine.sim
        interval = sim.options.ping_interval
        self.timer = sim.loop.call_later(interval, self.beat, socket, message)

    def stop(self) -> None:
        if self.socket is not None and self.timer is not None:
            self.timer.cancel()
            self.socket.close()
            self.socket = None
