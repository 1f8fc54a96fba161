# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The rig for moriio_proxy.py: engines that register over ZMQ, and its process.

    with Fleet(prefill=2, decode=2, mode="READ") as fleet:
        fleet.post({"prompt": "a"})
        leg = fleet.p[0].next_request()

A registration is sent once, which is enough for the 15 s until it expires. What
needs heartbeats uses the simulated engines, which have them: `simulated`.
"""

import contextlib
import itertools
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgpack
import zmq
from rig import (
    COMPLETIONS,
    HANG_GUARD,
    JSON,
    ROOT,
    EngineRequest,
    ProxyProcess,
    Response,
    ScriptedEngine,
    poll,
)
from sim_moriio import decode_part, parse_address, prefill_part
from sim_process import SimProcess

MORIIO_PROXY = ROOT / "moriio_proxy.py"
REFUSED = "registration refused"
_REGISTER_AT = "engines register at "


class Proxy(ProxyProcess):
    """The proxy on loopback, and the port where engines register.

    Args:
        argv: further arguments.
        discovery: the port, 0 for a free one.
        limits: module constants to scale down.
        script: the file to run.
        trust: see `ProxyProcess`.

    """

    def __init__(
        self,
        *argv: str,
        discovery: int = 0,
        limits: Mapping[str, float] | None = None,
        script: Path = MORIIO_PROXY,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        ports = ["--host", "127.0.0.1", "--service-discovery-port", str(discovery)]
        super().__init__([*ports, *argv], script, limits=limits, trust=trust)
        line = self.wait_log(_REGISTER_AT)
        self.discovery = int(line.rpartition(":")[2].strip('"}'))

    def instances(self) -> dict[str, JSON]:
        """What /status says of each instance, by address; fails if one is twice."""
        listed: list[JSON] = self.status()["instances"]
        found = {each["instance"]: each for each in listed}
        assert len(found) == len(listed), listed
        return found

    def wait_listed(self, address: str, **members: object) -> JSON:
        """Returns an instance's entry once it is listed with such members."""

        def listed() -> JSON | None:
            entry = self.instances().get(address, {})
            return entry if entry and members.items() <= entry.items() else None

        return poll(listed, f"{address} is listed with {members}")

    def wait_gone(self, address: str) -> None:
        """Returns once an instance is not listed."""
        poll(lambda: address not in self.instances(), f"{address} has left")

    def refusals(self) -> list[str]:
        """Log lines about refused messages."""
        return [line for line in self.log if REFUSED in line]

    def wait_refusals(self, count: int) -> None:
        """Returns once exactly so many messages were refused."""
        poll(lambda: len(self.refusals()) == count, f"{count} refusals: {self.log}")


class Peer:
    """A DEALER at the discovery port.

    Args:
        port: where to connect to.
        identity: what the proxy's ROUTER tells it by; made up by ZMQ if empty.

    """

    def __init__(self, port: int, identity: bytes = b"") -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, int(HANG_GUARD * 1000))
        if identity:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, *frames: bytes) -> None:
        """Sends one message."""
        self._socket.send_multipart(frames)

    def send_large(self, frame: bytes) -> None:
        """Sends one frame without a copy; what libzmq has not sent is forgotten."""
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.send(frame, copy=False)

    def register(self, registration: JSON) -> None:
        """Sends a registration as an engine does."""
        self.send(msgpack.packb(registration))

    def close(self) -> None:
        """Ends the connection after what was sent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_side_channels = itertools.count(7000, 2)


def registration(engine: ScriptedEngine, mode: str, **changes: object) -> JSON:
    """What a worker of an engine sends, with side channels of its own each time."""
    port = next(_side_channels)
    return {
        "type": engine.role[0].upper(),
        "http_address": f"{engine.host}:{engine.port}",
        "zmq_address": f"host:10.0.0.1,handshake:{port},notify:{port + 1}",
        "dp_size": 1,
        "tp_size": 1,
        "transfer_mode": mode,
    } | changes


class Fleet:
    """Scripted engines that have registered, and the proxy.

    Args:
        prefill: how many prefill engines, or the engines.
        decode: the same for decode.
        mode: READ or WRITE.
        argv: further arguments of the proxy.
        limits: module constants to scale down.
        sizes: `dp_size` and `tp_size` of (prefill, decode).
        trust: see `ProxyProcess`.

    """

    def __init__(
        self,
        prefill: int | Sequence[ScriptedEngine] = 1,
        decode: int | Sequence[ScriptedEngine] = 1,
        mode: str = "WRITE",
        argv: Sequence[str] = (),
        limits: Mapping[str, float] | None = None,
        sizes: tuple[JSON, JSON] = ({}, {}),
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self.mode = mode
        self.p, self.d = (
            [ScriptedEngine(role) for _ in range(given)]
            if isinstance(given, int)
            else list(given)
            for role, given in (("prefill", prefill), ("decode", decode))
        )
        self.sizes = {"prefill": sizes[0], "decode": sizes[1]}
        self.proxy = Proxy(*argv, limits=limits, trust=trust)
        self.connect = self.proxy.connect
        # The latest registration of each engine.
        self.told: dict[ScriptedEngine, JSON] = {}

    @property
    def engines(self) -> list[ScriptedEngine]:
        """All of them, prefill first."""
        return [*self.p, *self.d]

    def register(self, engine: ScriptedEngine, **changes: Any) -> JSON:
        """Registers an engine (anew), waits until it is up, and returns its entry."""
        told = registration(engine, self.mode, **self.sizes[engine.role] | changes)
        with Peer(self.proxy.discovery) as peer:
            peer.register(told)
        self.told[engine] = told
        return self.proxy.wait_listed(
            engine.instance, zmq_address=told["zmq_address"], state="up"
        )

    def post(
        self,
        body: bytes | JSON,
        target: str = COMPLETIONS,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One POST on a connection of its own."""
        return self.proxy.request("POST", target, body, headers)

    def settle(self) -> None:
        """Waits until nothing is in flight, then forgets scripts and records."""
        try:
            self.proxy.wait_idle()
            for each in self.engines:
                each.check()
        finally:
            for each in self.engines:
                each.forget()

    def __enter__(self) -> Self:
        try:
            for each in self.engines:
                self.register(each)
        except BaseException as error:
            self.__exit__(error)
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.proxy.__exit__(kind)
        finally:
            for each in self.engines:
                each.close()


@contextlib.contextmanager
def simulated(
    mode: str,
    *arguments: str,
    prefill: int = 1,
    decode: int = 1,
    limits: Mapping[str, float] | None = None,
) -> Iterator[tuple[Proxy, SimProcess]]:
    """A proxy, and simulated engines that registered with their own heartbeat."""
    with Proxy(limits=limits) as proxy:
        where = f"127.0.0.1:{proxy.discovery}"
        given = ["--connector", "moriio", "--transfer-mode", mode, *arguments]
        given += ["--moriio-proxy", where]
        with SimProcess(*given, prefill=prefill, decode=decode) as sim:
            for each in sim.engines:
                proxy.wait_listed(each.instance, state="up")
            yield proxy, sim


class Ids(NamedTuple):
    """What an engine's connector makes of a leg's ids."""

    prefill: str
    decode: str
    uid: str
    transfer: str


def ids(leg: EngineRequest) -> Ids:
    """Reads a leg's ids as both engines' connectors do; fails where they could not."""
    header = leg.header("x-request-id")
    assert header is not None
    # The engine's own id: the header and what vLLM puts around it.
    seen = f"cmpl-{header}-0-12345678"
    prefill, decode = prefill_part(seen), decode_part(seen)
    assert prefill and decode, header
    for address in (prefill, decode):
        parse_address(address)
    uid = header.removeprefix(f"___prefill_addr_{prefill}___decode_addr_{decode}_")
    return Ids(prefill, decode, uid, leg.json()["kv_transfer_params"]["transfer_id"])
