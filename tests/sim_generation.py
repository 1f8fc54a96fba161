# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A request that runs on a simulated engine: KV, time, tokens, and its early end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from sim_api import Answer, Api, Body, Refused, Sequence
from sim_kv import EngineDied, Verdict

if TYPE_CHECKING:
    from sim_http import Exchange


class Ticker:
    """Lets every stream say its next token, once per inter-token latency."""

    def __init__(self, loop: asyncio.AbstractEventLoop, itl: float) -> None:
        self.loop = loop
        self.itl = itl
        self.streams: list[Generation] = []
        self.running = False
        self.due = 0.0

    def add(self, stream: Generation) -> None:
        self.streams.append(stream)
        if not self.running:
            self.running = True
            self.due = self.loop.time()
            self.loop.call_soon(self.tick)

    def tick(self) -> None:
        streams, self.streams = self.streams, []
        self.streams += [stream for stream in streams if stream.step()]
        self.running = bool(self.streams)
        if not self.running:
            return
        if not self.itl:
            self.loop.call_soon(self.tick)
            return
        # A late tick is not made up for by a burst.
        self.due = max(self.due + self.itl, self.loop.time())
        self.loop.call_at(self.due, self.tick)


class Generation(Answer):
    """A request that runs on an engine, from its admission to its last token."""

    def __init__(
        self,
        exchange: Exchange,
        api: Api,
        body: Body,
        sequences: list[Sequence],
        id: str,
        rank: int,
    ) -> None:
        self.exchange = exchange
        self.connection = exchange.connection
        self.engine = self.connection.engine
        super().__init__(api, body, sequences, id, self.engine.sim.model)
        # Beam search reaches the engine without them.
        self.params = (
            (body.kv_transfer_params or {}) if not body.use_beam_search else {}
        )
        self.rank = rank
        self.longest = max(sequence.events for sequence in sequences)
        self.at = 0
        self.load_failed = False
        # Why the engine dies if the client leaves this request.
        self.fatal_to_leave: str | None = None
        self.parked = False
        self.timer: asyncio.TimerHandle | None = None
        self.loading: asyncio.Task[None] | None = None

    def internal_id(self, sequence: Sequence) -> str:
        """The engine's id of a sequence (InputProcessor.assign_request_id)."""
        n = self.body.n or 1
        child = f"{sequence.index % n}_" if n > 1 else ""
        part = f"-{sequence.index // n}" if self.api.id_prefix == "cmpl-" else ""
        return f"{child}{self.id}{part}-{os.urandom(4).hex()}"

    def admit(self) -> None:
        """Puts the request on the engine.

        Raises:
            EngineDied: it does not survive it.

        """
        self.exchange.generation = self
        self.engine.generations.add(self)
        loading = self.engine.connector.load(self)
        if loading is None:
            self.start()
            return
        if self.body.stream and not self.is_held():
            self.exchange.open_stream()
        self.loading = self.engine.sim.spawn(self.wait_for(loading))

    async def wait_for(self, loading: Coroutine[Any, Any, None]) -> None:
        await loading
        self.engine.survive(self.start)

    def judge(self, sequence: Sequence, verdict: Verdict) -> None:
        """Notes what the fetched KV of a sequence is worth."""
        if verdict.state == "unreachable":
            self.load_failed = True
            return
        sequence.loaded = True
        self.engine.external_tokens += sequence.prompt.tokens
        reason = verdict.state
        if reason == "ok":
            if verdict.prompt == sequence.prompt.key:
                return
            reason = "wrong_prompt"
        sequence.garbage = True
        bad = self.engine.bad_reasons
        bad[reason] = bad.get(reason, 0) + 1

    def start(self) -> None:
        """The KV question is settled: computes what is missing, then decodes."""
        if self.connection.closed:
            return
        if self.is_held():
            self.engine.hold(self.exchange, self.start)
            return
        if self.body.stream and not self.exchange.streaming:
            self.exchange.open_stream()
        if self.load_failed:
            self.fail()
            return
        sim = self.engine.sim
        loaded = all(sequence.loaded for sequence in self.sequences)
        if loaded and self.wants_prompt_logprobs():
            raise EngineDied("prompt log-probabilities of a prompt it never computed")
        delay = sim.itl if loaded else sim.ttft
        then = self.decode if self.body.stream else self.finish
        if not self.body.stream:
            delay += sim.itl * (self.longest - 1)
        if delay:
            self.timer = sim.loop.call_later(delay, then)
        else:
            then()

    def wants_prompt_logprobs(self) -> bool:
        body = self.body
        if body.prompt_logprobs is not None:
            return True
        return bool(body.echo) and body.logprobs is not None

    def is_held(self) -> bool:
        """Whether the fault `hang` holds the request at this point."""
        fault = self.exchange.fault
        if fault is None or fault.kind != "hang":
            return False
        if fault.after_events is None or not self.body.stream:
            return not self.exchange.streaming
        return self.exchange.streaming and self.exchange.events >= fault.after_events

    def fail(self) -> None:
        """The KV could not be loaded (kv_load_failure_policy "fail")."""
        refused = Refused("Internal server error", 500, "InternalServerError")
        self.leave_engine()
        if self.body.stream:
            opening = self.api.opening(self)
            self.exchange.close_stream(opening + self.api.error_event(refused))
        else:
            self.exchange.answer(500, self.api.error(refused))

    def decode(self) -> None:
        self.engine.sim.ticker.add(self)

    def step(self) -> bool:
        """Streams the next token; whether there are more."""
        if self.connection.closed:
            return False
        if self.is_held():
            self.engine.hold(self.exchange, self.decode)
            return False
        if self.connection.full:
            self.parked = True
            return False
        if self.at == 0 and (opening := self.api.opening(self)):
            self.exchange.send(opening)
            if self.is_held():
                self.engine.hold(self.exchange, self.decode)
                return False
        i = self.at
        self.at = i + 1
        last = self.at == self.longest
        if last:
            self.complete()
        for sequence in self.sequences:
            if i < sequence.events and not self.connection.closed:
                self.exchange.send(self.api.token(self, sequence, i))
        if last and not self.connection.closed:
            self.exchange.close_stream(self.api.closing(self))
        return not last

    def unpark(self) -> None:
        if self.parked:
            self.parked = False
            self.decode()

    def finish(self) -> None:
        """Answers a request that is not streamed."""
        self.complete()
        self.exchange.answer(200, self.api.whole(self))

    def complete(self) -> None:
        """The last token is computed: hands the KV over, leaves the engine."""
        self.kv = self.engine.connector.finish(self)
        self.engine.remember(self)
        self.engine.finished += 1
        self.engine.generated_tokens += sum(each.length for each in self.sequences)
        self.leave_engine()

    def leave_engine(self) -> None:
        self.engine.generations.discard(self)
        self.exchange.generation = None

    def stop(self) -> None:
        """Ends early, for whatever reason."""
        self.leave_engine()
        if self.timer is not None:
            self.timer.cancel()
        if self.loading is not None:
            self.loading.cancel()

    def abort(self) -> None:
        """The client is gone."""
        self.stop()
        self.engine.aborted += 1
        if self.fatal_to_leave is not None:
            self.engine.die(self.fatal_to_leave)
