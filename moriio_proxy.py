#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prefill/decode proxy for vLLM's MoRIIO connector.

    engines ──ZMQ, every 3 s: role, addresses, sizes──▶ :36367 ┐
    client ─────────────────POST──────────────────────▶ :10001 proxy
                                     prefill, rank r ◀──P leg──┤
                                     decode, rank s ◀───D leg──┘

    python3 moriio_proxy.py

In READ mode D reads the blocks that P's answer names, so P comes first. In WRITE
mode P writes into the blocks of the D that waits for it, so both legs run at once.
The engines find each other by the addresses in the request id.

Differences from vLLM's `moriio_toy_proxy_server.py`, besides those that
`disagg_proxy.py` names: engines that fall silent leave, D has a rank of its own and
the client's token limit, P neither stops at an end of sequence (it would hand
nothing over) nor sees the client's stop conditions.

Needs `disagg_proxy.py` beside it. Facts about vLLM: 0.33.0, `kv_connector/v1/moriio/`.
"""

import argparse
import asyncio
import functools
import heapq
import logging
import math
import random
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import msgpack
import msgspec
import zmq
from msgspec import Meta, Raw

# For loading by path, as vLLM's tests do: only a script's own start adds its folder.
sys.path.append(str(Path(__file__).resolve().parent))

from disagg_proxy import (
    NULL,
    Connector,
    Exchange,
    Instance,
    InstanceCycler,
    Pair,
    Proxy,
    ProxyError,
    RoundRobinSchedulingPolicy,
    Seldom,
    Server,
    Service,
    State,
    Steps,
    add_server_flags,
    configure_logging,
    encode_json,
    forwarded_body,
    names_any,
    no_instance,
    parse_address,
    request_id_line,
    split_members,
    words,
)

logger = logging.getLogger("moriio_proxy")
not_accepted = Seldom("%d times no file descriptor was left for an engine to register")

# Seconds without a ping after which an instance leaves: five of vLLM's intervals.
PING_EXPIRY = 15.0
# How often in that time silence is looked for.
LOOKS = 30
# Bytes of a frame; registrations have 200. libzmq drops the sender of a longer one.
MAX_FRAME_BYTES = 256 * 1024
# Messages of one sender that may wait, and that are taken before HTTP has its turn.
MAX_WAITING = 64
MAX_BATCH = 256
# Instances, and ranks of one: whoever reaches the port can register.
MAX_INSTANCES = 1024
MAX_DP_SIZE = 1024
# Refused messages that are logged within so many seconds; the rest is counted.
LOG_LINES = 50
LOG_PERIOD = 10.0
# Seconds without new connections of engines when no file descriptor is left for one.
ACCEPT_PAUSE = 1.0
# Seconds for starting or stopping the engines' profilers: upstream's limit.
PROFILE_TIMEOUT = 60.0

# --- Registrations --------------------------------------------------------------------

# No blanks, no line ends: addresses become part of a header field.
Text = Annotated[str, Meta(max_length=512, pattern=r"\A[!-~]+\Z")]
Size = Annotated[int, Meta(ge=1, le=MAX_DP_SIZE)]


class Registration(TypedDict):
    """What an engine sends: a msgpack map in one frame (`_start_heartbeat`)."""

    type: Literal["P", "D"]
    # `host:port` of its HTTP server; IPv6 without brackets.
    http_address: Text
    # `host:{ip},handshake:{port},notify:{port}`.
    zmq_address: Text
    # Ranks on all nodes.
    dp_size: Size
    tp_size: Size
    transfer_mode: Literal["READ", "WRITE"]
    # The nodes of an engine that has several; vLLM 0.33.0 does not send it.
    node_hosts: NotRequired[Annotated[list[Text], Meta(max_length=MAX_DP_SIZE)]]


class Engine(NamedTuple):
    """An instance that has registered, and when it was last heard."""

    instance: Instance
    told: Registration
    heard: float


def bracketed(host: str, port: str) -> str:
    """`host:port`, where an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host and host[0] != "[" else f"{host}:{port}"


def read_registration(frames: list[bytes]) -> Registration | None:
    """The registration in a message; None for a HELLO.

    Raises:
        ValueError, msgspec.ValidationError: it is not one that engines can live with.

    """
    if len(frames) != 1:
        raise ValueError(f"{len(frames)} frames instead of one")
    # Refuses deep nesting, and lengths beyond the frame.
    message = msgpack.unpackb(frames[0])
    if isinstance(message, dict) and message.get("type") == "HELLO":
        return None
    told = msgspec.convert(message, Registration)
    parts = dict(part.split(":", 1) for part in told["zmq_address"].split(","))
    for name in ("handshake", "notify"):
        parse_address(bracketed(parts.get("host", ""), parts.get(name, "")))
    if "___" in told["zmq_address"]:
        raise ValueError("zmq_address would not be found again in a request id")
    return told


# --- Routing --------------------------------------------------------------------------

# The index of an instance, and the DP rank there; None where there is only one.
Slot = tuple[int, int | None]
# The same with the instance.
Turn = tuple[Instance, int | None]


def flat_interleaved_dp_route(
    request_number: int, instances: Sequence[Mapping[str, Any]]
) -> Slot:
    """The slot of a request, counted from 1: all have their turns, round after round.

    Of an instance only `dp_size` is read. vLLM's routing test knows this function;
    `MoRIIOProxy.slots` keeps what it would find anew for each request.
    """
    slots = interleaved_slots(tuple(each["dp_size"] for each in instances))
    return slots[(request_number - 1) % len(slots)]


@functools.lru_cache(maxsize=64)
def interleaved_slots(sizes: tuple[int, ...]) -> list[Slot]:
    """Every (instance, rank) once.

    Next is the instance with the most ranks left, but none twice in a row while there
    is another; of equals, the one that began, so that the rounds join well.
    """
    first = sizes.index(max(sizes))
    left = [(-size, index != first, index) for index, size in enumerate(sizes)]
    heapq.heapify(left)
    slots: list[Slot] = []
    resting: list[tuple[int, bool, int]] = []
    while left:
        minus, later, index = heapq.heappop(left)
        slots.append((index, sizes[index] + minus if sizes[index] > 1 else None))
        if resting:
            heapq.heappush(left, resting.pop())
        if minus < -1:
            (resting if left else left).append((minus + 1, later, index))
    return slots


# --- Legs -----------------------------------------------------------------------------


def about(told: Registration, rank: int | None, transfer: str) -> dict[str, object]:
    """What the other engine is told; the nulls too have to be there."""
    params: dict[str, object] = {
        "transfer_id": transfer,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_dp_size": told["dp_size"],
        "remote_tp_size": told["tp_size"],
    }
    if rank is not None:
        params["remote_dp_rank"] = rank
    if hosts := told.get("node_hosts"):
        params["remote_hosts"] = hosts
        params["remote_dp_size_local"] = told["dp_size"] // len(hosts)
    return params


def pin(rank: int | None) -> bytes:
    """The header line that keeps a leg on its rank."""
    return b"" if rank is None else b"X-data-parallel-rank: %d\r\n" % rank


# Not taken from P: what the proxy says, and what would silence a D on another rank.
KEPT = words("do_remote_decode do_remote_prefill remote_dp_rank_override transfer_id")


def read_params(params: dict[str, object], prefill: Instance, given: Raw) -> Raw | None:
    """D's parameters in READ mode, with what P says about the blocks.

    None where it names no blocks: D would compute on KV that nobody has written.
    """
    try:
        found = split_members(bytes(given))
    except ProxyError:
        found = {}
    if not names_any(found.get("remote_block_ids", NULL)):
        if given != NULL:
            logger.warning("prefill %s hands over no blocks", prefill)
        return None
    taken = {k: v for k, v in found.items() if k not in KEPT and v != NULL}
    return Raw(encode_json(params | taken))


class MoRIIOConnector(Connector):
    """The engines find each other by what they have registered."""

    pairs = True
    by_request_id = True
    by_length = True

    def __init__(self) -> None:
        # By `host:port`.
        self.engines: dict[str, Engine] = {}

    def pair(
        self,
        prefill: Instance,
        decode: Instance,
        p_rank: int | None = None,
        d_rank: int | None = None,
    ) -> Pair:
        """What the legs are told, each on a DP rank; None where there is only one."""
        p, d = (self.engines[i.address].told for i in (prefill, decode))
        number = random.randbytes(16).hex()
        name = (
            f"___prefill_addr_{p['zmq_address']}___decode_addr_{d['zmq_address']}"
            f"_{number}"
        )
        transfer = f"tx-{number}"
        to_p = {"do_remote_decode": True, "do_remote_prefill": False}
        to_d = {"do_remote_decode": False, "do_remote_prefill": True}
        whole_d = {**to_d, **about(p, p_rank, transfer)}
        return Pair(
            prefill,
            decode,
            request_id_line(name),
            prefill_params=Raw(encode_json({**to_p, **about(d, d_rank, transfer)})),
            decode_params=Raw(encode_json(whole_d))
            if p["transfer_mode"] == "WRITE"
            else functools.partial(read_params, whole_d),
            prefill_fields=pin(p_rank),
            decode_fields=pin(d_rank),
        )


# --- Proxy ----------------------------------------------------------------------------


class MoRIIOProxy(Proxy):
    """Serves with the engines that register."""

    def __init__(self, retries: int, allow_engine_control: bool) -> None:
        connector = MoRIIOConnector()
        super().__init__(
            [],
            [],
            model=None,
            scheduling_policy=RoundRobinSchedulingPolicy(),
            retries=retries,
            connector=connector,
            allow_engine_control=allow_engine_control,
        )
        self.engines, self.pair = connector.engines, connector.pair
        self.requests = 0
        # By role: the instances that are up, and their slots.
        self.rotations: dict[str, tuple[list[Instance], list[Turn]]] = {}
        # Tells the other workers, if there are any; see `Worker.say`.
        self.say: Callable[[str, Any], None] = lambda key, value: None
        del self.routes["/instances/add"], self.routes["/instances/remove"]
        for path in ("/start_profile", "/stop_profile"):
            self.routes[path] = {b"POST": self.profile}

    # Instances.

    def register(self, told: Registration, key: bytes, here: bool = True) -> None:
        """Takes in a new engine, a change of a known one, or a sign of life.

        Args:
            told: what it says.
            key: for its probes.
            here: False when another worker has heard it.

        Raises:
            ValueError: the engine is refused; if it was known, it is out.

        """
        cycler = self.prefill_cycler if told["type"] == "P" else self.decode_cycler
        host, _, port = told["http_address"].rpartition(":")
        instance = Instance(bracketed(host, port), cycler)
        address, mode = instance.address, told["transfer_mode"]
        known = self.engines.pop(address, None)
        others = (engine.told["transfer_mode"] for engine in self.engines.values())
        in_use = next(others, mode)
        if known is not None:
            if known.told != told and here:
                logger.info("%s registers anew: %s", instance, told)
            if known.instance.cycler is not cycler or mode != in_use:
                self.say(f"engine {address}", None)
                why = "it has changed its role or mode"
                known.instance.mark(State.DRAINING, why)
                known = None
        if mode != in_use:
            raise ValueError(f"{address} has transfer_mode {mode}, others {in_use}")
        if known is None and len(self.engines) >= MAX_INSTANCES:
            raise ValueError(f"{address}: there are {MAX_INSTANCES} others")
        self.say(f"engine {address}", told)
        if known is None:
            self.join(instance, key, here)
        else:
            instance = known.instance
            if instance.state is State.DOWN:
                instance.suspect()
        heard = asyncio.get_running_loop().time()
        self.engines[address] = Engine(instance, told, heard)
        if known is None or known.told != told:
            cycler.refresh()  # Its slots may be others now.

    def join(self, instance: Instance, key: bytes, here: bool) -> None:
        """A new instance is up, as it has just been heard of; then it is probed."""
        instance.cycler.instances.append(instance)
        if here:
            instance.mark(State.UP)
        else:
            instance.take(State.UP, None, time.time())
        self.watch(instance, key)

    def expire(self, now: float) -> None:
        """Engines that have been silent for too long leave."""
        silent = [a for a, e in self.engines.items() if e.heard + PING_EXPIRY <= now]
        for address in silent:
            engine = self.engines.pop(address)
            self.say(f"engine {address}", None)
            engine.instance.mark(State.DRAINING, f"no ping for {PING_EXPIRY:g} s")

    def hear(self, key: str, record: Any, engine_key: bytes) -> None:
        """Takes over what another worker says; who is in, registrations decide."""
        role, _, address = key.partition(" ")
        engine = self.engines.get(address)
        if role == "engine" and record is not None:
            self.register(record, engine_key, here=False)
        elif role == "engine" and engine is not None:
            del self.engines[address]
            engine.instance.take(State.DRAINING, None, time.time())
        elif record is not None and engine and engine.instance.cycler.role == role:
            super().hear(key, record, engine_key)

    def describe(self, instance: Instance) -> dict[str, object]:
        engine = self.engines.get(instance.address)
        if engine is None or engine.instance is not instance:
            return super().describe(instance)
        silent = asyncio.get_running_loop().time() - engine.heard
        own = {**engine.told, "last_ping_age": round(silent, 3)}
        return super().describe(instance) | own

    # Requests.

    def slots(self, cycler: InstanceCycler, avoid: list[Instance]) -> list[Turn]:
        """The slots of a role in their order, without those of some instances."""
        up, slots = self.rotations.get(cycler.role, (None, []))
        if avoid or up is not cycler.up:
            instances = [i for i in cycler.up if i not in avoid]
            sizes = (self.engines[i.address].told["dp_size"] for i in instances)
            order = interleaved_slots(tuple(sizes)) if instances else ()
            slots = [(instances[index], rank) for index, rank in order]
            if not avoid:
                self.rotations[cycler.role] = cycler.up, slots
        return slots

    def choose(self, x: Exchange, avoid: list[Instance]) -> Pair | None:
        """The next pair of slots; D's number shifts, so that every P meets every D."""
        p_slots = self.slots(self.prefill_cycler, avoid)
        d_slots = self.slots(self.decode_cycler, avoid)
        if not p_slots or not d_slots:
            return None
        number, self.requests = self.requests, self.requests + 1
        shift = number // math.lcm(len(p_slots), len(d_slots))
        p, p_rank = p_slots[number % len(p_slots)]
        d, d_rank = d_slots[(number + shift) % len(d_slots)]
        return self.pair(p, d, p_rank, d_rank)

    # The proxy's own routes.

    def health(self, x: Exchange) -> None:
        """The proxy's own: engines come and go."""
        x.answer(200, b"ok", "text/plain")

    def profile(self, x: Exchange) -> Steps:
        """Has every engine start or stop its profiler."""
        instances = [engine.instance for engine in self.engines.values()]
        if not instances:
            raise no_instance("prefill")
        body = forwarded_body(x)
        legs = [x.post(i, body, x.request_id, whole=True) for i in instances]
        for leg in legs:
            leg.deadline = monotonic() + PROFILE_TIMEOUT
        while not all(leg.settled for leg in legs):
            yield
        failed = [
            f"{leg.instance} {leg.failure.words if leg.failure else leg.status}"
            for leg in legs
            if leg.failure or leg.status != 200
        ]
        if failed:
            raise ProxyError(502, f"Not every engine succeeded: {'; '.join(failed)}")
        x.answer(200, encode_json({"instances": [i.address for i in instances]}))


# --- Discovery ------------------------------------------------------------------------


class Discovery:
    """Hears the engines on a ZMQ ROUTER, in the event loop.

    Raises:
        SystemExit: the port is taken.

    """

    def __init__(self, proxy: MoRIIOProxy, key: bytes, host: str, port: int) -> None:
        self.proxy, self.key = proxy, key
        self.loop = asyncio.get_running_loop()
        # Messages refused in this LOG_PERIOD.
        self.refused = 0
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        # An engine that comes back may have the identity it had.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
        self.socket.setsockopt(zmq.LINGER, 0)
        try:
            address = str(socket.getaddrinfo(host, port)[0][4][0])
            self.socket.setsockopt(zmq.IPV6, ":" in address)
            self.socket.bind(f"tcp://{bracketed(address, str(port or '*'))}")
        except (OSError, zmq.ZMQError) as err:
            raise SystemExit(f"Cannot listen on {host}:{port}: {err}") from None
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        logger.info("engines register at %s", self.endpoint)
        self.loop.add_reader(self.socket.fileno(), self.receive)
        self.failures = self.socket.get_monitor_socket(zmq.EVENT_ACCEPT_FAILED)
        self.loop.add_reader(self.failures.fileno(), self.pause)
        self.pause()
        self.receive()
        self.look()

    def receive(self) -> None:
        """Takes all messages there are: the descriptor tells only of the first."""
        for _ in range(MAX_BATCH):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return  # Nothing is left; or it was closed after a full batch.
            self.take(frames[1:])
        self.loop.call_soon(self.receive)

    def pause(self) -> None:
        """Stops listening for a while: libzmq would try to accept without rest."""
        if self.failures.poll(0):
            self.loop.remove_reader(self.failures.fileno())
            not_accepted.note()
            self.socket.unbind(self.endpoint)
            self.loop.call_later(ACCEPT_PAUSE, self.go_on)

    def go_on(self) -> None:
        """Listens again; engines connect anew by themselves."""
        while self.failures.poll(0):
            self.failures.recv_multipart()
        try:
            self.socket.bind(self.endpoint)
        except zmq.ZMQError:
            self.loop.call_later(ACCEPT_PAUSE, self.go_on)
            return
        self.loop.add_reader(self.failures.fileno(), self.pause)
        self.receive()

    def look(self) -> None:
        """Looks for silent engines, from time to time."""
        self.loop.call_later(PING_EXPIRY / LOOKS, self.look)
        self.proxy.expire(self.loop.time())

    def take(self, frames: list[bytes]) -> None:
        """One message, without its sender's identity."""
        try:
            told = read_registration(frames)
            if told is not None:
                self.proxy.register(told, self.key)
        except (ValueError, msgspec.ValidationError) as err:
            self.refuse(str(err))

    def refuse(self, why: str) -> None:
        """One line, but whoever sends much cannot fill the log."""
        if not self.refused:
            self.loop.call_later(LOG_PERIOD, self.count_anew)
        self.refused += 1
        if self.refused <= LOG_LINES:
            logger.warning("registration refused: %.300r", why)

    def count_anew(self) -> None:
        if self.refused > LOG_LINES:
            logger.warning("%d messages were refused", self.refused)
        self.refused = 0

    def close(self) -> None:
        for each in (self.socket, self.failures):
            self.loop.remove_reader(each.fileno())
        self.context.destroy()


# --- Command line ---------------------------------------------------------------------


class MoRIIOServer(Server):
    """Serves a proxy, and hears its engines; see `Server`."""

    # Of several workers the first hears the engines.
    discovery: Discovery | None = None

    async def prepare(self, service: Service) -> None:
        args, proxy, worker = self.args, service.proxy, self.worker
        assert isinstance(proxy, MoRIIOProxy)
        if worker is not None:
            proxy.requests = worker.index
            proxy.say = worker.say
        if worker is None or worker.index == 0:
            self.discovery = Discovery(
                proxy, service.engine_key, args.host, args.service_discovery_port
            )

    def finish(self) -> None:
        if self.discovery is not None:
            self.discovery.close()


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="vLLM disaggregated proxy server for MoRIIO.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_server_flags(parser, host="0.0.0.0", port=10001)
    parser.add_argument(
        "--service-discovery-port",
        type=int,
        default=36367,
        metavar="PORT",
        help="where the engines register (their proxy_ping_port)",
    )
    return parser


def main() -> None:
    args = argument_parser().parse_args()
    configure_logging(args.log_level, args.log_format)
    proxy = MoRIIOProxy(args.retries, args.allow_engine_control)
    MoRIIOServer(proxy, args).run_server()


if __name__ == "__main__":
    main()
