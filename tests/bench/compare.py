# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The proxies of this project side by side with others, on the same work.

    make bench                 # everybody who is installed, three rounds
    make bench QUICK=1         # one short round
    make bench VLLM=path       # vLLM's own demos too, from its source tree
    python tests/bench/compare.py --only disagg_proxy.py,haproxy --rounds 5

Two prefill and two decode engines (`engine.py`) and the clients (`load.py`) run on one
processor, the proxy with all its processes and threads on another. Rounds are
interleaved, and every proxy is started anew in each. Processor time is that of the
proxy's processes, from /proc: what else the machine does changes it little, whereas it
changes latencies. Tables and figures are medians over the rounds.

The figures in README.md are those of `measured.json` beside this file: a copy of what
a run writes, then `make docs`.
"""

import argparse
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any

import report
from answers import AT_THE_GATE
from peers import Peer, Place, Registrations, all_peers
from processes import Usage, end, raise_descriptor_limit, resident_bytes

JSON = dict[str, Any]

HERE = Path(__file__).resolve().parent
ENGINES = 2  # of each role
# Seconds for a proxy to start and to give its first right answer.
START_LIMIT = 60.0
# Seconds until a stream that is open is taken as settled.
SETTLE = 0.5
# Streams that are held open at the same time, and descriptors for other things.
OPEN_STREAMS = 10_000
OTHER_DESCRIPTORS = 1000

# Numbers of requests that a load may use, and where they begin anew: eight digits.
NUMBERS = 200_000
MAX_NUMBER = 90_000_000

# What the clients do, by name: see `load.Load`.
LOADS: dict[str, JSON] = {
    "request": {"clients": 32, "seconds": 1.5},
    "token": {
        "clients": 128,
        "seconds": 3.0,
        "stream": "yes",
        "tokens": report.TOKENS,
        "pace": 10,
    },
    "100 KB": {"clients": 16, "seconds": 1.5, "prompt": 100_000},
    "1 MB": {"clients": 4, "seconds": 1.0, "prompt": 1_000_000},
    "at 1": {"clients": 1, "seconds": 1.2, "stream": "half"},
    "at 64": {"clients": 64, "seconds": 1.2, "stream": "half", "think": 0.064},
    "at 512": {"clients": 512, "seconds": 1.5, "stream": "half", "think": 0.4},
    "burst of 512": {"clients": 512, "stream": "yes", "pace": 20},
    "burst of 2048": {"clients": 2048, "stream": "yes", "pace": 20},
}
WARM_UP: JSON = {"clients": 8, "seconds": 0.3, "stream": "half"}


class Machine:
    """The processors: one for the proxy, one or two for what stands around it."""

    def __init__(self) -> None:
        allowed = sorted(os.sched_getaffinity(0))
        if len(allowed) < 2:
            raise SystemExit("Two processors are needed: one is the proxy's alone")
        self.proxy = allowed[-1]
        self.load = allowed[0]
        self.engines = allowed[len(allowed) > 2]

    @staticmethod
    def start(
        command: Sequence[str], processor: int, log: IO[str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts a process that stays on one processor, with all it starts.

        Args:
            command: its words.
            processor: which one.
            log: for what it prints; None: it is written to and read from.

        """
        os.sched_setaffinity(0, {processor})
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if log is None else subprocess.DEVNULL,
            stdout=subprocess.PIPE if log is None else log,
            stderr=None if log is None else subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Bench:
    """Engines, and what is needed to ask a proxy in front of them.

    Args:
        machine: its processors.
        engines: the process of the engines.
        shorter: by how much loads are shortened.
        streams: how many are held open.

    """

    def __init__(
        self,
        machine: Machine,
        engines: subprocess.Popen[str],
        shorter: float,
        streams: int,
    ) -> None:
        assert engines.stdout is not None
        ports = list(map(int, engines.stdout.readline().split()))
        self.machine = machine
        self.prefill, self.decode = ports[:ENGINES], ports[ENGINES:]
        self.shorter = shorter
        self.streams = streams
        self.asked = 0

    def load(self, ports: list[int], **what: Any) -> subprocess.Popen[str]:
        """Starts a load."""
        what["seconds"] = what.get("seconds", 0) * self.shorter
        command = [sys.executable, str(HERE / "load.py")]
        load = self.machine.start(command, self.machine.load)
        assert load.stdin is not None
        load.stdin.write(json.dumps({"ports": ports, "first": self.asked, **what}))
        load.stdin.write("\n")
        load.stdin.flush()
        # No number comes twice in a row, so no answer can be mistaken for another.
        self.asked = (self.asked + NUMBERS) % MAX_NUMBER
        return load

    def drive(self, ports: list[int], **what: Any) -> JSON:
        """Runs a load; returns what it reports."""
        out, _ = self.load(ports, **what).communicate()
        found: JSON = json.loads(out)
        return found

    def open_gate(self) -> None:
        """Has the engines go on with the streams that wait."""
        with contextlib.closing(HTTPConnection("127.0.0.1", self.decode[0])) as any_:
            any_.request("GET", "/gate")
            any_.getresponse().read()

    def hold_open(self, port: int, pid: int) -> JSON:
        """Holds many streams open; returns what each takes of the proxy's memory."""
        before = resident_bytes(pid)
        many: JSON = {"stream": "yes", "tokens": 3, "pace": AT_THE_GATE}
        load = self.load([port], clients=self.streams, **many)
        assert load.stdout is not None
        line = load.stdout.readline()
        bytes_each = None
        if line == "open\n":
            time.sleep(SETTLE)
            bytes_each = (resident_bytes(pid) - before) / self.streams
            self.open_gate()
            line = load.stdout.readline()
        else:
            self.open_gate()
        load.wait()
        return {"bytes each": bytes_each, "streams": self.streams, **json.loads(line)}

    def wait_served(self, process: subprocess.Popen[str], place: Place) -> None:
        """Returns once a proxy answers as it should."""
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"it has ended with {process.returncode}")
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", place.port)).close()
                if self.drive([place.port], clients=1)["right"]:
                    return
            time.sleep(0.1)
        raise RuntimeError("it gave no right answer")

    @contextlib.contextmanager
    def proxy(self, peer: Peer, log: Path) -> Iterator[tuple[list[int], int | None]]:
        """A proxy, started: whom to ask, and its process; None if there is none."""
        if peer.command is None:
            yield self.decode, None
            return
        port, *others = free_ports(3)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            place = Place(port, others, self.prefill, self.decode, folder)
            out = stack.enter_context(log.open("w"))
            command = peer.command(place)
            process = self.machine.start(command, self.machine.proxy, out)
            stack.callback(end, process)
            if peer.registers:
                stack.enter_context(Registrations(place))
            self.wait_served(process, place)
            yield [port], process.pid

    def run(self, peer: Peer, log: Path) -> JSON:
        """One round of one peer; returns what its loads report, by name."""
        found: JSON = {}
        with self.proxy(peer, log) as (ports, pid):
            self.drive(ports, **WARM_UP)
            for name, what in LOADS.items():
                before = Usage.of(pid) if pid is not None else None
                found[name] = self.drive(ports, **what)
                if pid is not None and before is not None:
                    found[name]["cpu"] = Usage.of(pid).since(before)
        return found

    def run_streams(self, peer: Peer, log: Path) -> JSON:
        """The memory of one peer that was just started."""
        with self.proxy(peer, log) as (ports, pid):
            if pid is None:
                return {}
            return {
                "at rest": resident_bytes(pid),
                "open": self.hold_open(ports[0], pid),
            }


def run_rounds(bench: Bench, peers: list[Peer], rounds: int, logs: Path) -> JSON:
    """All rounds; returns what was found by peer, and what went wrong."""
    found: JSON = {peer.name: [] for peer in peers}
    began = time.monotonic()
    for number in range(1, rounds + 1):
        for peer in peers:
            log = logs / f"{peer.name.replace(' ', '-')}.{number}.log"
            try:
                got = bench.run(peer, log)
                if number == 1:
                    got |= bench.run_streams(peer, log.with_suffix(".memory.log"))
            except (RuntimeError, ValueError) as err:
                got = {"failed": f"{err}; see {log}"}
            found[peer.name].append(got)
            seconds = time.monotonic() - began
            state = got.get("failed") or "done"
            print(
                f"{seconds:4.0f} s  round {number}  {peer.name}: {state}",
                file=sys.stderr,
                flush=True,
            )
    return found


def chosen(options: argparse.Namespace) -> tuple[list[Peer], dict[str, str]]:
    """The peers that take part, and why others do not."""
    peers = all_peers(options.vllm)
    if options.only:
        names = ["no proxy", *options.only.split(",")]
        peers = [peer for peer in peers if peer.name in names]
    absent = {peer.name: peer.missing for peer in peers if peer.missing}
    return [peer for peer in peers if not peer.missing], absent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--only", default="", metavar="NAME,...")
    parser.add_argument("--vllm", default="", help="a vLLM source tree, for its demos")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    machine, limit = Machine(), raise_descriptor_limit()
    # A stream takes two descriptors of the proxy.
    streams = min(OPEN_STREAMS, (limit - OTHER_DESCRIPTORS) // 2)
    peers, absent = chosen(options)
    command = [sys.executable, str(HERE / "engine.py"), str(ENGINES), str(ENGINES)]
    engines = machine.start(command, machine.engines)
    try:
        bench = Bench(
            machine,
            engines,
            0.25 if options.quick else 1.0,
            streams // 5 if options.quick else streams,
        )
        rounds = 1 if options.quick else options.rounds
        found = run_rounds(bench, peers, rounds, options.out)
    finally:
        end(engines)
    result = {
        "when": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "rounds": rounds,
        "peers": {peer.name: {"note": peer.note, "legs": peer.legs} for peer in peers},
        "absent": absent,
        "found": found,
    }
    summed = report.summary(result)
    files = {
        "rounds.json": json.dumps(result, indent=1),
        "measured.json": json.dumps(summed, indent=1) + "\n",
        "measured.md": report.markdown(summed),
        "measured.svg": report.plot(summed),
    }
    for name, content in files.items():
        (options.out / name).write_text(content)
    print(report.text(summed))
    print(f"In {options.out}: {', '.join(files)}, and the proxies' logs")


if __name__ == "__main__":
    main()
