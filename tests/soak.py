# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Random requests against random faults: `make soak`.

    python tests/soak.py [--seconds 300] [--seed N]

Simulated engines fail and recover while clients ask, wait or leave. An answer is a
pure function of its prompt, so each is compared with that of an engine in which
nothing fails; anything else has to be an error or a cut that `fault_table.py` allows.
At the end no request is in flight, no socket is left, and the proxy has the memory
that it had when it was warm. The same seed has the same faults and requests, though
not the same timing. The exit status says whether all of it held.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter

from rig import COMPLETIONS, JSON, End, ProxyProcess, Response, poll
from sim_process import MODEL, SimEngine, SimProcess

CLIENTS = 4
# Seconds between two requests of a client, and between two faults.
PACE = 0.02
FAULT_PACE = 0.1
# Seconds after which memory is taken as that of a warm proxy.
WARM = 60.0
# Bytes of growth since then.
MAX_GROWTH = 5 * 1024 * 1024
ALLOWED_ERRORS = {400, 429, 500, 502, 503, 504}
FAULTS: list[JSON] = [
    {"kind": "reset_on_head"},
    {"kind": "reset_after_request"},
    *({"kind": "status", "status": status} for status in (400, 429, 500, 503)),
    {"kind": "die_in_head"},
    {"kind": "die", "after_bytes": 0},
    {"kind": "die", "after_bytes": 40},
    {"kind": "no_last_chunk"},
    {"kind": "close_idle"},
]


# --- What is right --------------------------------------------------------------------


def content(response: Response, stream: bool) -> list[JSON]:
    """The JSON of an answer, without what differs between two equal ones."""
    texts = response.events() if stream else [response.body.decode()]
    found = [json.loads(each) for each in texts if each != "[DONE]"]
    for each in found:
        each.pop("id", None)
        each.pop("created", None)
        each.pop("kv_transfer_params", None)
    return found


class Tally:
    """What became of all requests."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def add(self, what: str, wrong: str | None = None) -> None:
        """Counts one."""
        with self._lock:
            self.counts[what] += 1
            if wrong:
                self.wrong.append(wrong)


def judge(response: Response, oracle: SimEngine, body: JSON, tally: Tally) -> None:
    """Compares an answer with that of an engine in which nothing fails."""
    stream = body["stream"]
    if response.end is not End.COMPLETE:
        tally.add("cut", None if response.status == 200 else f"cut: {response}")
    elif response.status != 200:
        allowed = response.status in ALLOWED_ERRORS
        tally.add(str(response.status), None if allowed else f"status: {response}")
    else:
        expected = content(oracle.post(body), stream)
        same = content(response, stream) == expected
        done = not stream or response.body.endswith(b"data: [DONE]\n\n")
        tally.add("200", None if same and done else f"differs: {body} {response}")


# --- Clients and faults ---------------------------------------------------------------


class Soak:
    """One run."""

    def __init__(self, seed: int, sim: SimProcess, oracle: SimEngine) -> None:
        self.seed, self.sim, self.oracle = seed, sim, oracle
        argv = ["--model", MODEL]
        argv += ["--prefill", *(each.instance for each in sim.p)]
        argv += ["--decode", *(each.instance for each in sim.d)]
        self.proxy = ProxyProcess(argv)
        self.tally = Tally()
        self.over = threading.Event()

    def client(self, number: int) -> None:
        """Asks until the end; one client in eight leaves."""
        rng = random.Random(f"{self.seed} client {number}")
        count = 0
        while not self.over.wait(PACE):
            count += 1
            body: JSON = {
                "prompt": f"{number} {count} " + "x" * rng.choice((1, 50, 20000)),
                "max_tokens": rng.randint(1, 12),
                "stream": rng.random() < 0.5,
            }
            try:
                self.ask(body, rng)
            except Exception as error:
                self.tally.add("raised", f"{body['prompt'][:20]}: {error!r}")

    def ask(self, body: JSON, rng: random.Random) -> None:
        """One request, to its end or not."""
        with self.proxy.connect() as client:
            reader = client.post(COMPLETIONS, body)
            if rng.random() < 1 / 8:
                if rng.random() < 0.5:
                    reader.head()
                client.reset() if rng.random() < 0.5 else client.close()
                self.tally.add("left")
                return
            judge(reader.finish(), self.oracle, body, self.tally)

    def disturb(self) -> None:
        """Has engines fail, one request at a time, and die and return."""
        rng = random.Random(f"{self.seed} faults")
        while not self.over.wait(FAULT_PACE):
            engine = rng.choice(self.sim.engines)
            if rng.random() < 0.05:
                engine.kill()
                self.over.wait(rng.uniform(0, 1))
                engine.restart()
                continue
            fault = dict(rng.choice(FAULTS))
            engine.fault(fault.pop("kind"), count=1, **fault)

    def run(self, seconds: float) -> list[str]:
        """Runs; returns what was wrong."""
        self.proxy.wait_all_up()
        # At rest: what it listens on, and a probe's connection for each engine.
        at_rest = self.proxy.open_sockets()
        work = [threading.Thread(target=self.disturb)]
        work += [
            threading.Thread(target=self.client, args=(n,)) for n in range(CLIENTS)
        ]
        for each in work:
            each.start()
        started = time.monotonic()
        self.over.wait(min(WARM, seconds / 2))
        warm = self.proxy.resident_bytes()
        self.over.wait(max(0.0, seconds - (time.monotonic() - started)))
        self.over.set()
        for each in work:
            each.join()
        return [*self.tally.wrong, *self.left_behind(warm, at_rest)]

    def left_behind(self, warm: int, at_rest: int) -> list[str]:
        """What should not be there any more."""
        for each in self.sim.engines:
            each.clear_faults()
        self.proxy.wait_all_up()
        self.proxy.wait_idle()
        wrong = []
        growth = self.proxy.resident_bytes() - warm
        print(f"memory: {warm} bytes warm, {growth:+} since")
        if growth > MAX_GROWTH:
            wrong.append(f"memory grew by {growth} bytes")
        try:
            poll(lambda: self.proxy.open_sockets() <= at_rest, "sockets are closed")
        except TimeoutError:
            wrong.append(f"{self.proxy.open_sockets()} sockets are left")
        return wrong


def main() -> None:
    """Runs, prints, and exits with 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.seconds:g} s", flush=True)
    with SimProcess(prefill=2, decode=2) as sim, SimProcess(prefill=0) as reference:
        soak = Soak(args.seed, sim, reference.d[0])
        with soak.proxy:
            wrong = soak.run(args.seconds)
    print(dict(sorted(soak.tally.counts.items())))
    for each in wrong[:20]:
        print("WRONG", each[:400])
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
