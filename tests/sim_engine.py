# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A simulated vLLM engine: the HTTP server and the KV hand-over, without a model.

    python tests/sim_engine.py --model tiny --prefill 0 --decode 0 0 --control 0

prints one JSON line per port ({"role": "prefill", "port": 12345}), then `ready`.
Every port is an engine of its own; several processes may form one cluster. Status
codes, bodies and framing are those of vLLM 0.33, and so are the rules of the KV
connectors: a hand-over lives for a lease, serves once, and parameters that kill a
real engine kill this one (its port refuses, its connections are reset).

What an engine answers is a pure function of the prompt. A prompt's bytes are its
UTF-8 text (of chat: the messages as canonical JSON) padded to a multiple of 4; each
4 bytes are one token, whose id is their big-endian value; the *key* is a 32-bit hash
of those bytes and of the other members that shape a prompt (adapter, tools, template
arguments, cache salt, ...). Token i of the answer with index 0 is ` <key>.<i>`, for
example ` 9f3ca012.0`; other indexes have other keys. Sampling parameters do not
matter. A prompt that contains `<eos@N>` has its end of sequence after N tokens,
unless `ignore_eos`. A chat without a limit gets 16 tokens. Where a real engine would
compute on wrong KV, the tokens are ` KVGARBAGE.<i>`.

Control, on every port and on --control (there it concerns all engines, unless the
body or query names a "port"); connections used for it do not appear in the figures:

    GET    /sim/stats    the figures of each engine, by port
    POST   /sim/wait     {"port": N, "figures": {"running": 0, "handovers.used": 1}}:
                         answers the engine's figures as soon as each is reached
                         (gauges: equal; counters: at least), 408 after "timeout"
    POST   /sim/fault    adds a fault (see class Fault). DELETE clears them; requests
                         held by `hang` then go on as if nothing had been
    POST   /sim/kill     the engine dies as in a crash
    POST   /sim/restart  the engine is (back) on its port: new id, no KV
    POST   /sim/reset    clears faults, counters, records and pinned KV
    POST   /sim/heartbeat  {"on": false} pauses MoRIIO's registrations, true resumes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import uvloop
from sim_api import (
    APIS,
    DEFAULT_TOKENS,
    JSON,
    Api,
    Body,
    Prompt,
    Refused,
    Sequence,
    bytes_of,
    canonical,
    check_sampling,
    check_schema,
    invalid,
    make_prompt,
    padded,
    parse_body,
    token_ids,
)
from sim_generation import Generation, Ticker
from sim_http import ON_REQUEST, Connection, Exchange, Fault, Request
from sim_kv import (
    CACHE_BLOCKS,
    UNREACHABLE,
    Claim,
    Connector,
    EngineDied,
    KvStore,
    Mooncake,
    NixlPull,
    NixlPush,
    Verdict,
)
from sim_moriio import PING_INTERVAL, Heartbeat, Moriio

VERSION = "0.33.0"
# Tokens: 64 Mi of them are a prompt of 256 MiB, the largest body a proxy passes on.
DEFAULT_MAX_MODEL_LEN = 1 << 26
LISTEN_BACKLOG = 4096
# Seconds between two looks at the figures that POST /sim/wait waits for.
WAIT_TICK = 0.002
# Seconds after which that wait gives up unless it says otherwise.
WAIT_TIMEOUT = 20.0
# Stored /v1/responses answers per engine.
MAX_RESPONSES = 1000

# Paths that --api-key guards (vllm/entrypoints/serve/middleware/authenticate.py).
GUARDED = (b"/v1", b"/v2", b"/inference", b"/cohere")
NO_SUCH_ROUTE = b'{"detail":"Not Found"}'
NO_SUCH_METHOD = b'{"detail":"Method Not Allowed"}'

CONNECTORS: dict[str, type[Connector]] = {
    "nixl": NixlPull,
    "nixl-push": NixlPush,
    "mooncake": Mooncake,
    "moriio": Moriio,
    "none": Connector,
}

encode = msgspec.json.encode


# --- Engine ---------------------------------------------------------------------------


class Engine:
    """One engine and its HTTP server, on one port."""

    def __init__(self, sim: Simulation, role: str) -> None:
        self.sim = sim
        self.role = role
        self.port = 0
        self.server: asyncio.Server | None = None
        # Keeps the port while nobody listens, so that connecting is refused.
        self.place: socket.socket | None = None
        self.died: str | None = None
        self.connector = CONNECTORS[sim.options.connector]()
        self.kv = KvStore(sim.loop, sim.options.lease)
        # The first size is that of P, the last that of D.
        of_role = -1 if role == "decode" else 0
        self.dp_size: int = sim.options.dp_size[of_role]
        self.tp_size: int = sim.options.tp_size[of_role]
        # What lives and dies with the engine: other servers, its registration.
        self.bootstrap: Bootstrap | None = None
        self.heartbeat: Heartbeat | None = None
        self.next_rank = -1
        self.connections: set[Connection] = set()
        self.generations: set[Generation] = set()
        self.faults: list[Fault] = []
        self.held: list[tuple[Exchange, Callable[[], None]]] = []
        self.responses: dict[str, tuple[Prompt, bytes]] = {}
        self.new_identity()
        self.clear_figures()

    def new_identity(self) -> None:
        self.engine_id = str(uuid.uuid4())

    def clear_figures(self) -> None:
        self.accepted = len(self.connections)
        self.requests: dict[tuple[bytes, bytes], int] = {}
        self.records: deque[JSON] = deque(maxlen=self.sim.options.record)
        self.aborted = self.finished = 0
        self.prompt_tokens = self.external_tokens = self.generated_tokens = 0
        self.bad_reasons: dict[str, int] = {}

    def rank_id(self, rank: int) -> str:
        return f"{self.engine_id}_dp{rank}" if self.dp_size > 1 else self.engine_id

    # Listening and dying.

    async def listen(self) -> None:
        if self.server is not None:
            return
        if self.place is None:
            self.place = self.sim.bind(self.port)
        self.port = self.place.getsockname()[1]
        self.server = await self.sim.loop.create_server(
            lambda: Connection(self), sock=self.place, backlog=LISTEN_BACKLOG
        )
        self.place = None

    async def start(self) -> None:
        """Opens the engine's ports and registers it."""
        await self.listen()
        if self.bootstrap is not None:
            await self.bootstrap.listen()
        if self.heartbeat is not None:
            self.heartbeat.start()

    def stop(self) -> None:
        """Closes all that `start` opened, and forgets all KV."""
        for server in (self, self.bootstrap):
            if server is not None:
                server.stop_listening()
                server.drop_connections()
        if self.heartbeat is not None:
            self.heartbeat.stop()
        self.kv.clear()

    def stop_listening(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None
            self.place = self.sim.bind(self.port)

    def die(self, reason: str) -> None:
        """The engine core is dead and takes the API server with it."""
        if self.died is not None:
            return
        self.died = reason
        self.stop()
        print(f"engine on port {self.port} died: {reason}", file=sys.stderr, flush=True)
        self.sim.check_alive()

    def drop_connections(self) -> None:
        for connection in list(self.connections):
            if connection.counted:
                connection.reset()

    def survive(self, action: Callable[[], None]) -> None:
        """Runs what the engine may not survive."""
        try:
            action()
        except EngineDied as death:
            self.die(str(death))

    # Faults.

    def next_fault(self, kinds: set[str], request: Request | None = None) -> Any:
        """The first fault of these kinds that hits; a counted one is used up."""
        for fault in self.faults:
            if fault.kind not in kinds:
                continue
            if request is not None and not fault.concerns(request):
                continue
            if fault.count is not None:
                fault.count -= 1
                if fault.count <= 0:
                    self.faults.remove(fault)
            return fault
        return None

    def add_fault(self, fault: Fault) -> None:
        if fault.kind == "refuse":
            self.stop_listening()
        else:
            self.faults.append(fault)

    def hold(self, exchange: Exchange, then: Callable[[], None]) -> None:
        self.held.append((exchange, then))

    def clear_faults(self) -> None:
        self.faults.clear()
        held, self.held = self.held, []
        for exchange, then in held:
            exchange.fault = None
            if not exchange.connection.closed:
                self.survive(then)

    # Requests.

    def serve(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.path.startswith(b"/sim/"):
            exchange.connection.leave_figures()
            exchange.control = self.sim.spawn(control(self, exchange))
            return
        if self.role == "control":
            exchange.answer(404, NO_SUCH_ROUTE)
            return
        key = request.method, request.path
        self.requests[key] = self.requests.get(key, 0) + 1
        if self.sim.options.record:
            self.keep_record(exchange)
        fault = self.next_fault(ON_REQUEST, request) if self.faults else None
        if fault is None:
            self.route(exchange)
        else:
            self.serve_badly(exchange, fault)

    def serve_badly(self, exchange: Exchange, fault: Fault) -> None:
        if fault.kind == "reset_after_request":
            exchange.connection.reset()
        elif fault.kind == "status":
            pairs = fault.headers.items()
            headers = "".join(f"{name}: {value}\r\n" for name, value in pairs)
            kind = fault.content_type.encode()
            exchange.answer(fault.status, fault.content(), kind, headers.encode())
        elif fault.kind == "hang" and exchange.request.path not in APIS:
            self.hold(exchange, lambda: self.route(exchange))
        else:
            exchange.meet(fault)
            self.route(exchange)

    def keep_record(self, exchange: Exchange) -> None:
        request = exchange.request
        exchange.record = {
            "connection": exchange.connection.number,
            "method": request.method.decode(),
            "target": request.target.decode("latin-1"),
            "headers": [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in request.headers
            ],
            "body": request.body.decode("utf-8", "surrogateescape"),
            "status": None,
        }
        self.records.append(exchange.record)

    def route(self, exchange: Exchange) -> None:
        request = exchange.request
        key = self.sim.options.api_key
        if key is not None and request.path.startswith(GUARDED):
            given = request.header(b"authorization")
            if given != b"Bearer " + key.encode() and request.method != b"OPTIONS":
                exchange.answer(401, b'{"error":"Unauthorized"}')
                return
        api = APIS.get(request.path)
        if api is not None and request.method == b"POST":
            self.generate(exchange, api)
            return
        methods: dict[bytes, Route] = ROUTES.get(request.path, {})
        if request.path.startswith(b"/v1/responses/"):
            methods = {b"GET": stored_response, b"POST": stored_response}
        if request.method in methods:
            try:
                methods[request.method](self, exchange)
            except Refused as refused:
                exchange.answer(refused.status, encode({"error": refused.error}))
        elif methods or api is not None:
            allowed = b", ".join(methods or [b"POST"])
            headers = b"allow: %b\r\n" % allowed
            exchange.answer(405, NO_SUCH_METHOD, headers=headers)
        else:
            exchange.answer(404, NO_SUCH_ROUTE)

    def generate(self, exchange: Exchange, api: Api) -> None:
        body: Body | None = None
        try:
            if not exchange.request.is_json():
                raise invalid(
                    "Unsupported Media Type: Only 'application/json' is allowed"
                )
            body = parse_body(exchange.request.body)
            check_schema(body)
            generation = self.prepare(exchange, api, body)
        except Refused as refused:
            self.refuse(exchange, api, body, refused)
            return
        self.survive(generation.admit)

    def prepare(self, exchange: Exchange, api: Api, body: Body) -> Generation:
        """Checks a parsed request in the order of vLLM's serving layer.

        Raises:
            Refused: it cannot run.

        """
        sim = self.sim
        if body.model is not None and body.model not in sim.options.model:
            raise Refused(
                f"The model `{body.model}` does not exist. "
                f"Valid aliases: {', '.join(sim.options.model)}.",
                404,
                "NotFoundError",
                "model",
            )
        prompts = self.with_context(body, api.prompts(body, body.shape(sim.model)))
        limit = self.limit(api.limit(body), max(prompt.tokens for prompt in prompts))
        check_sampling(body, limit)
        self.check_tools(body, limit)
        rank = self.rank(exchange.request)
        n = body.n or 1
        sequences = [
            Sequence(prompt, i * n + child, child, body, limit)
            for i, prompt in enumerate(prompts)
            for child in range(n)
        ]
        self.prompt_tokens += sum(prompt.tokens for prompt in prompts)
        id = self.request_id(exchange.request, api, body)
        return Generation(exchange, api, body, sequences, id, rank)

    def with_context(self, body: Body, prompts: list[Prompt]) -> list[Prompt]:
        """Puts the conversation that a response continues before its prompt."""
        previous = body.previous_response_id
        if previous is None:
            return prompts
        stored = self.responses.get(previous)
        if stored is None:
            raise response_not_found(previous)
        shape = body.shape(self.sim.model)
        return [make_prompt(stored[0].data + prompts[0].data, shape)]

    def limit(self, wanted: int | None, prompt_tokens: int) -> int:
        """The effective max_tokens."""
        longest: int = self.sim.options.max_model_len
        if prompt_tokens > longest:
            raise Refused(
                f"This model's maximum context length is {longest} tokens. However, "
                f"your prompt contains at least {longest + 1} input tokens. Please "
                "reduce the length of the input prompt. "
                f"(parameter=input_tokens, value={longest + 1})",
                param="input_tokens",
            )
        wanted = DEFAULT_TOKENS if wanted is None else wanted
        return min(wanted, longest - prompt_tokens)

    def check_tools(self, body: Body, limit: int) -> None:
        parser = self.sim.options.tool_call_parser
        if parser == "none" and body.tools:
            if body.tool_choice in (None, "auto"):
                raise Refused(
                    '"auto" tool choice requires --enable-auto-tool-choice and '
                    "--tool-call-parser to be set"
                )
            if body.tool_choice == "required":
                raise Refused(
                    'tool_choice="required" requires --tool-call-parser to be set'
                )
        if parser == "strict" and body.forces_tool() and limit == 1:
            raise Refused("Internal server error", 500, "InternalServerError")

    def rank(self, request: Request) -> int:
        """The data parallel rank that serves a request."""
        header = request.header(b"x-data-parallel-rank")
        try:
            rank = int(header) if header is not None else None
        except ValueError:
            rank = None
        if rank is None:
            self.next_rank = (self.next_rank + 1) % self.dp_size
            return self.next_rank
        if not 0 <= rank < self.dp_size:
            raise Refused(
                f"data_parallel_rank {rank} is out of range [0, {self.dp_size}).",
                late=True,
            )
        return rank

    def request_id(self, request: Request, api: Api, body: Body) -> str:
        header = request.header(b"x-request-id") if api.takes_request_id else None
        if header is not None:
            return header.decode("latin-1")
        return body.request_id or uuid.uuid4().hex

    def refuse(
        self, exchange: Exchange, api: Api, body: Body | None, refused: Refused
    ) -> None:
        if body is not None and refused.parsed and body.kv_transfer_params:
            self.connector.reject(self, body.kv_transfer_params)
        if refused.late and body is not None and body.stream:
            exchange.open_stream()
            exchange.close_stream(api.error_event(refused))
        else:
            exchange.answer(refused.status, api.error(refused))

    def remember(self, generation: Generation) -> None:
        """Stores a response that may be asked for or continued."""
        if generation.api.path != b"/v1/responses" or generation.body.store is False:
            return
        whole = generation.api.whole(generation)
        self.responses[generation.id] = generation.sequences[0].prompt, whole
        if len(self.responses) > MAX_RESPONSES:
            del self.responses[next(iter(self.responses))]

    # KV and figures.

    def take(self, claim: Claim) -> Verdict:
        """Serves a claim of a D at once."""
        return self.kv.take(claim) if self.is_meant(claim) else UNREACHABLE

    async def fetch(self, claim: Claim) -> Verdict:
        """Serves a claim of a D, when its KV is there if the claim waits for it."""
        if claim.wait and self.is_meant(claim):
            await self.kv.until_pinned(claim.id)
        return self.take(claim)

    def is_meant(self, claim: Claim) -> bool:
        ids = [self.rank_id(rank) for rank in range(self.dp_size)]
        return self.died is None and claim.engine_id in (None, *ids)

    def cache_usage(self) -> float:
        """The share of the KV cache that requests and hand-overs hold."""
        running = [s.prompt.tokens for g in self.generations for s in g.sequences]
        pinned = [len(ids) for kv in self.kv.pinned.values() for ids in kv.blocks]
        return (sum(running) // 16 + len(running) + sum(pinned)) / CACHE_BLOCKS

    def figures(self) -> JSON:
        requests = self.requests.items()
        counted = [each for each in self.connections if each.counted]
        return {
            "role": self.role,
            "port": self.port,
            "engine_id": self.engine_id,
            "alive": int(self.died is None),
            "died": self.died,
            "listening": int(self.server is not None),
            "connections": self.accepted,
            "open_connections": len(counted),
            "requests": {f"{m.decode()} {p.decode()}": n for (m, p), n in requests},
            "posts": sum(n for (_, path), n in requests if path in APIS),
            "running": len(self.generations),
            "finished": self.finished,
            "aborted": self.aborted,
            "prompt_tokens": self.prompt_tokens,
            "external_tokens": self.external_tokens,
            "generated_tokens": self.generated_tokens,
            "handovers": {**self.kv.counts, "pinned": len(self.kv.pinned)},
            "bad_handovers": sum(self.bad_reasons.values()),
            "bad_reasons": self.bad_reasons,
            "records": list(self.records),
        }


class Bootstrap(Engine):
    """The server in a Mooncake P that tells where its workers are."""

    def __init__(self, sim: Simulation, owner: Engine) -> None:
        super().__init__(sim, "bootstrap")
        self.owner = owner

    def route(self, exchange: Exchange) -> None:
        request, owner = exchange.request, self.owner
        if (request.method, request.path) != (b"GET", b"/query"):
            exchange.answer(404, NO_SUCH_ROUTE)
            return
        address = f"tcp://{self.sim.options.host}:{owner.port}"
        workers = {str(tp): {"0": address} for tp in range(owner.tp_size)}
        ranks = {
            str(rank): {"engine_id": owner.rank_id(rank), "worker_addr": workers}
            for rank in range(owner.dp_size)
        }
        exchange.answer(200, encode(ranks))


# --- Routes ---------------------------------------------------------------------------

Route = Callable[[Engine, Exchange], None]


def empty(engine: Engine, exchange: Exchange) -> None:
    exchange.answer(200)


def models(engine: Engine, exchange: Exchange) -> None:
    cards = [
        {
            "id": name,
            "object": "model",
            "created": engine.sim.started,
            "owned_by": "vllm",
            "root": name,
            "parent": engine.sim.model if name != engine.sim.model else None,
            "max_model_len": engine.sim.options.max_model_len,
            "permission": [],
        }
        for name in engine.sim.options.model
    ]
    exchange.answer(200, encode({"object": "list", "data": cards}))


def version(engine: Engine, exchange: Exchange) -> None:
    exchange.answer(200, encode({"version": VERSION}))


def load(engine: Engine, exchange: Exchange) -> None:
    exchange.answer(200, encode({"server_load": len(engine.generations)}))


def metrics(engine: Engine, exchange: Exchange) -> None:
    labels = f'{{engine="0",model_name="{engine.sim.model}"}}'
    figures: dict[str, tuple[str, float]] = {
        "num_requests_running": ("gauge", len(engine.generations)),
        "num_requests_waiting": ("gauge", 0),
        "kv_cache_usage_perc": ("gauge", engine.cache_usage()),
        "prompt_tokens_total": ("counter", engine.prompt_tokens),
        "generation_tokens_total": ("counter", engine.generated_tokens),
        "external_prefix_cache_queries_total": ("counter", engine.prompt_tokens),
        "external_prefix_cache_hits_total": ("counter", engine.external_tokens),
        "request_success_total": ("counter", engine.finished),
        "nixl_num_kv_expired_reqs_total": ("counter", engine.kv.counts["expired"]),
    }
    lines = [
        f"# TYPE vllm:{name} {kind}\nvllm:{name}{labels} {value}\n"
        for name, (kind, value) in figures.items()
    ]
    kind = b"text/plain; version=0.0.4; charset=utf-8"
    exchange.answer(200, "".join(lines).encode(), kind)


def tokenize(engine: Engine, exchange: Exchange) -> None:
    body = parse_body(exchange.request.body)
    if body.messages is not None:
        data = padded(canonical(body.messages))
    elif isinstance(body.prompt, str):
        data = padded(body.prompt.encode("utf-8", "surrogatepass"))
    else:
        raise invalid("{'type': 'missing', 'loc': ('body', 'prompt')}")
    ids = token_ids(data)
    longest = engine.sim.options.max_model_len
    answer = {"count": len(ids), "max_model_len": longest, "tokens": ids}
    exchange.answer(200, encode({**answer, "token_strs": None}))


def detokenize(engine: Engine, exchange: Exchange) -> None:
    body = msgspec.json.decode(exchange.request.body)
    text = bytes_of(body["tokens"]).rstrip(b"\0").decode("utf-8", "replace")
    exchange.answer(200, encode({"prompt": text}))


def stored_response(engine: Engine, exchange: Exchange) -> None:
    """GET a stored response, or POST to cancel it (which finds it complete)."""
    id, _, verb = exchange.request.path[len("/v1/responses/") :].partition(b"/")
    stored = engine.responses.get(id.decode("latin-1"))
    if stored is None or verb not in (b"", b"cancel"):
        raise response_not_found(id.decode("latin-1"))
    exchange.answer(200, stored[1])


def response_not_found(id: str) -> Refused:
    text = f"Response with id '{id}' not found."
    return Refused(text, 404, "invalid_request_error", "response_id")


ROUTES: dict[bytes, dict[bytes, Route]] = {
    b"/health": {b"GET": empty},
    b"/ping": {b"GET": empty, b"POST": empty},
    b"/v1/models": {b"GET": models},
    b"/version": {b"GET": version},
    b"/load": {b"GET": load},
    b"/metrics": {b"GET": metrics},
    b"/tokenize": {b"POST": tokenize},
    b"/detokenize": {b"POST": detokenize},
    b"/start_profile": {b"POST": empty},
    b"/stop_profile": {b"POST": empty},
}


# --- Control --------------------------------------------------------------------------

GAUGES = {"alive", "listening", "open_connections", "running", "handovers.pinned"}


class Wait(msgspec.Struct, forbid_unknown_fields=True):
    """What POST /sim/wait waits for; a figure is named as in the statistics."""

    figures: dict[str, int]
    port: int | None = None
    timeout: float = WAIT_TIMEOUT

    def reached(self, engine: Engine) -> bool:
        figures = engine.figures()
        return all(
            self.holds(name, wanted, figures) for name, wanted in self.figures.items()
        )

    def holds(self, name: str, wanted: int, figures: Any) -> bool:
        value = figures
        for part in [name] if name.startswith(("GET ", "POST ")) else name.split("."):
            value = value.get(part, 0)
        return bool(value == wanted if name in GAUGES else value >= wanted)


async def control(engine: Engine, exchange: Exchange) -> None:
    """Serves a request below /sim/."""
    request = exchange.request
    action = ACTIONS.get((request.method.decode(), request.path[5:].decode()))
    if action is None:
        exchange.answer(404, NO_SUCH_ROUTE)
        return
    try:
        body = msgspec.json.decode(request.body) if request.body else {}
        engines = engine.sim.addressed(engine, body, request.query())
        status, answer = await action(engines, body)
    except (msgspec.MsgspecError, LookupError) as error:
        status, answer = 400, {"error": repr(error)}
    if not exchange.connection.closed:
        # Not by msgspec, which has no escape for bytes that are no UTF-8.
        exchange.answer(status, json.dumps(answer).encode())


async def show_stats(engines: list[Engine], body: Any) -> tuple[int, Any]:
    return 200, {str(engine.port): engine.figures() for engine in engines}


async def wait_for_figures(engines: list[Engine], body: Any) -> tuple[int, Any]:
    wait = msgspec.convert(body, Wait)
    deadline = asyncio.get_running_loop().time() + wait.timeout
    while not wait.reached(engines[0]):
        if asyncio.get_running_loop().time() > deadline:
            return 408, engines[0].figures()
        await asyncio.sleep(WAIT_TICK)
    return 200, engines[0].figures()


async def add_fault(engines: list[Engine], body: Any) -> tuple[int, Any]:
    for engine in engines:
        engine.add_fault(msgspec.convert(body, Fault))
    return 200, {}


async def clear_faults(engines: list[Engine], body: Any) -> tuple[int, Any]:
    for engine in engines:
        engine.clear_faults()
        if engine.died is None:
            await engine.listen()
    return 200, {}


async def kill(engines: list[Engine], body: Any) -> tuple[int, Any]:
    for engine in engines:
        engine.die("killed")
    return 200, {}


async def restart(engines: list[Engine], body: Any) -> tuple[int, Any]:
    for engine in engines:
        engine.stop()
        engine.died = None
        engine.new_identity()
        await engine.start()
    return 200, {}


async def reset(engines: list[Engine], body: Any) -> tuple[int, Any]:
    await clear_faults(engines, body)
    for engine in engines:
        engine.kv.clear()
        engine.clear_figures()
    return 200, {}


async def beat(engines: list[Engine], body: Any) -> tuple[int, Any]:
    for engine in engines:
        if engine.heartbeat is not None and body["on"]:
            engine.heartbeat.start()
        elif engine.heartbeat is not None:
            engine.heartbeat.stop()
    return 200, {}


async def take(engines: list[Engine], body: Any) -> tuple[int, Any]:
    """A D of another process claims KV."""
    verdict = await engines[0].fetch(msgspec.convert(body, Claim))
    return 200, msgspec.structs.asdict(verdict)


Action = Callable[[list[Engine], Any], Coroutine[Any, Any, tuple[int, Any]]]
ACTIONS: dict[tuple[str, str], Action] = {
    ("GET", "stats"): show_stats,
    ("POST", "wait"): wait_for_figures,
    ("POST", "fault"): add_fault,
    ("DELETE", "fault"): clear_faults,
    ("POST", "kill"): kill,
    ("POST", "restart"): restart,
    ("POST", "reset"): reset,
    ("POST", "heartbeat"): beat,
    ("POST", "take"): take,
}


# --- Process --------------------------------------------------------------------------


class Simulation:
    """All engines of a process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.started = int(time.time())
        self.model: str = options.model[0]
        self.ttft: float = options.ttft / 1000
        self.itl: float = options.itl / 1000
        self.ticker = Ticker(self.loop, self.itl)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.engines: dict[int, Engine] = {}
        # The engines and the servers that belong to them.
        self.ports: dict[int, Engine] = {}
        self.bootstrap_ports = iter(options.bootstrap)
        self.control: Engine | None = None
        self.hosts = {"localhost", "127.0.0.1", "::1", options.host, options.kv_host}
        # The process's exit status, once it ends.
        self.end: asyncio.Future[int] = self.loop.create_future()

    async def run(self) -> int:
        """Opens the ports, serves until a signal or the last engine's death."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.stop, 0)
        for role in ("prefill", "decode", "both"):
            for port in getattr(self.options, role):
                await self.open(Engine(self, role), port)
        if self.options.control is not None:
            self.control = Engine(self, "control")
            await self.open(self.control, self.options.control)
        print("ready", flush=True)
        status = await self.end
        for engine in self.engines.values():
            engine.stop()
        return status

    async def open(self, engine: Engine, port: int) -> None:
        """Starts an engine on a port and tells the reader of stdout."""
        engine.port = port
        options = self.options
        if options.connector == "mooncake" and engine.role in ("prefill", "both"):
            engine.bootstrap = Bootstrap(self, engine)
            engine.bootstrap.port = next(self.bootstrap_ports, 0)
        await engine.listen()
        line = {"role": engine.role, "port": engine.port}
        if engine.role != "control":
            self.engines[engine.port] = self.ports[engine.port] = engine
            if options.moriio_proxy is not None:
                engine.heartbeat = Heartbeat(engine, options.moriio_proxy)
            await engine.start()
            for fault in options.fault:
                if fault.port in (None, port):
                    engine.add_fault(msgspec.structs.replace(fault))
        if engine.bootstrap is not None:
            line["bootstrap_port"] = engine.bootstrap.port
            self.ports[engine.bootstrap.port] = engine.bootstrap
        print(encode(line).decode(), flush=True)

    def bind(self, port: int) -> socket.socket:
        """A socket that holds a port without listening on it."""
        family = socket.AF_INET6 if ":" in self.options.host else socket.AF_INET
        place = socket.socket(family)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((self.options.host, port))
        return place

    def peer(self, host: Any, port: Any) -> Engine | None:
        """The engine of this process at an address."""
        return self.engines.get(port) if host in self.hosts else None

    def addressed(self, engine: Engine, body: Any, query: JSON) -> list[Engine]:
        """The engines that a control request concerns.

        Raises:
            LookupError: it names a port of no engine.

        """
        port = body.get("port") or int(query.get("port", [0])[0])
        if port:
            return [self.ports[port]]
        return [engine] if engine.role != "control" else list(self.engines.values())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def check_alive(self) -> None:
        """A process whose engines are all dead ends, unless it can revive them."""
        if self.control is None and all(each.died for each in self.engines.values()):
            self.stop(1)

    def stop(self, status: int) -> None:
        if not self.end.done():
            self.end.set_result(status)


def fault_option(text: str) -> Fault:
    try:
        return msgspec.json.decode(text, type=Fault)
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Simulated vLLM engines. Port 0 is any free port.",
        epilog="Answers, control API and faults: see the docstrings of this file "
        "and of sim_http.py.",
    )
    add = parser.add_argument
    add("--model", nargs="+", required=True, help="served ids; the first is the base")
    for role in ("prefill", "decode", "both"):
        add(f"--{role}", nargs="+", type=int, default=[], metavar="PORT")
    add("--control", type=int, metavar="PORT", help="a port for /sim/ only")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--kv-host", default="localhost", help="the remote_host that a P names")
    add("--connector", choices=sorted(CONNECTORS), default="nixl")
    add("--ttft", type=float, default=0, metavar="MS", help="time of a prefill")
    add("--itl", type=float, default=0, metavar="MS", help="time of a decode step")
    add("--lease", type=float, default=30, metavar="SECONDS", help="of pinned KV")
    add("--keep-alive", type=float, default=5, metavar="SECONDS", help="when idle")
    add("--api-key", help="demanded on /v1 and the like")
    add("--max-model-len", type=int, default=DEFAULT_MAX_MODEL_LEN, metavar="TOKENS")
    add("--dp-size", type=int, nargs="+", default=[1], help="of P; of D if it differs")
    add("--tp-size", type=int, nargs="+", default=[1], help="likewise")
    add(
        "--bootstrap",
        type=int,
        nargs="+",
        default=[],
        metavar="PORT",
        help="Mooncake: of each P",
    )
    add("--moriio-proxy", metavar="HOST:PORT", help="where to register (MoRIIO)")
    add("--transfer-mode", choices=("READ", "WRITE"), default="WRITE", help="MoRIIO")
    add("--ping-interval", type=float, default=PING_INTERVAL, metavar="SECONDS")
    add(
        "--tool-call-parser",
        choices=("lenient", "strict", "none"),
        default="lenient",
        help="strict: an old engine, 500 for a forced tool call of one token",
    )
    add("--record", type=int, default=0, metavar="N", help="keep the last N requests")
    add(
        "--fault",
        type=fault_option,
        action="append",
        default=[],
        metavar="JSON",
        help="a fault of every engine (or of its port) from the start",
    )
    return parser.parse_args()


async def run(options: argparse.Namespace) -> int:
    return await Simulation(options).run()


def main() -> None:
    sys.exit(uvloop.run(run(parse_args())))


if __name__ == "__main__":
    main()
