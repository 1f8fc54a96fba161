# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The MoRIIO proxy at work on this machine, without a GPU: `make demo-moriio`.

Starts the proxy, which knows no engine, and four simulated ones, which register
with it; streams one chat completion, shows what its two legs carried, has an engine
fall silent and come back, and stops everything. `--mode READ` has D read the KV from
P instead. `--keep` goes on until Ctrl-C.
"""

import argparse
import contextlib
import http.client
import json
import signal
import subprocess
import textwrap
from collections.abc import Iterator

from demo import (
    GRACE,
    HOST,
    LISTENING,
    MODEL,
    TESTS,
    Json,
    Process,
    get,
    keep,
    on_ending,
    process,
    say,
    show_servers,
    show_stream,
    wait_for_line,
)

# Seconds between heartbeats, and until an engine is given up: a sixth of the real.
BEAT, PATIENCE = 0.5, 2.5
ENGINES = "--prefill 0 0 --decode 0 0 --control 0 --dp-size 4 2 --record 1"
# Milliseconds to the first token and between tokens.
PACE = "--ttft 600 --itl 90"


@contextlib.contextmanager
def proxy() -> Iterator[tuple[Process, int, int]]:
    """The proxy, its port and the port for registrations."""
    scaled = [str(TESTS.parent / "moriio_proxy.py"), f"PING_EXPIRY={PATIENCE}", "--"]
    ports = f"--host {HOST} --port 0 --service-discovery-port 0 --drain-timeout {GRACE}"
    arguments = [*scaled, *ports.split()]
    script = TESTS / "scaled_proxy.py"
    with process(script, *arguments, stderr=subprocess.STDOUT) as child:
        lines = wait_for_line(child, LISTENING)
        port = next(line for line in lines if "register at" in line)
        yield child, port_in(lines[-1]), port_in(port)
    if child.returncode:
        raise SystemExit(f"The proxy ended with status {child.returncode}.")


def port_in(line: str) -> int:
    """The port that a line ends with."""
    return int(line.rpartition(":")[2])


@contextlib.contextmanager
def engines(mode: str, discovery: int) -> Iterator[list[Json]]:
    """Two P of four ranks, two D of two: the facts of each; control comes last."""
    moriio = f"--connector moriio --transfer-mode {mode} --ping-interval {BEAT}"
    where = f"--model {MODEL} --moriio-proxy {HOST}:{discovery}"
    arguments = " ".join((ENGINES, PACE, moriio, where)).split()
    with process(TESTS / "sim_engine.py", *arguments) as child:
        yield [json.loads(line) for line in wait_for_line(child, "ready")[:-1]]
    if child.returncode:
        raise SystemExit(f"The engines ended with status {child.returncode}.")


def show_log(child: Process, text: str, count: int = 1) -> None:
    """The proxy's log up to so many lines with a text."""
    for _ in range(count):
        for line in wait_for_line(child, text):
            say(f"    {line}", end="")
    say()


def show_legs(control: int) -> None:
    """What the engines saw of the request."""
    say("What they saw of it:")
    say()
    for figures in get(control, "/sim/stats").values():
        for record in figures["records"]:
            if record["method"] == "POST":
                show_leg(figures["role"], record)


def show_leg(role: str, record: Json) -> None:
    """The part of a leg that is the proxy's."""
    headers = {name.lower(): value for name, value in record["headers"]}
    body = json.loads(record["body"])
    say(f"    {role}, rank {headers['x-data-parallel-rank']}")
    for text in (headers["x-request-id"], json.dumps(body["kv_transfer_params"])):
        say(textwrap.indent(textwrap.fill(text, 74), " " * 8))
    say()


def show_silence(child: Process, started: list[Json]) -> None:
    """An engine whose heartbeat stops, and starts again."""
    say(f"An engine falls silent. It has {PATIENCE} s here, and 15 s in earnest:")
    say()
    heartbeat(started, False)
    show_log(child, "is draining")
    say("Its next heartbeat brings it back:")
    say()
    heartbeat(started, True)
    show_log(child, "is up")


def heartbeat(started: list[Json], on: bool) -> None:
    """Stops or starts that of the first engine."""
    connection = http.client.HTTPConnection(HOST, started[-1]["port"])
    with contextlib.closing(connection):
        body = json.dumps({"port": started[0]["port"], "on": on})
        connection.request("POST", "/sim/heartbeat", body)
        connection.getresponse().read()


def show_status(port: int) -> None:
    """The proxy's own view."""
    say("GET /status of the proxy, in part:")
    say()
    shown = "instance", "role", "state", "dp_size", "transfer_mode", "last_ping_age"
    for each in get(port, "/status")["instances"]:
        say(
            "    {:<17} {:<8} {:<5} dp {}  {:<6} {:.1f} s".format(*map(each.get, shown))
        )
    say()


def main() -> None:
    """Runs the demo.

    Raises:
        SystemExit: something could not be started or did not end in order (1);
            Ctrl-C, unless it was asked for (130).

    """
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--mode", choices=("READ", "WRITE"), default="WRITE")
    parser.add_argument("--keep", action="store_true", help="go on until Ctrl-C")
    options = parser.parse_args()
    on_ending(signal.default_int_handler)
    try:
        with (
            proxy() as (child, port, discovery),
            engines(options.mode, discovery) as started,
        ):
            say(f"moriio_proxy.py serves {HOST}:{port}; engines register at port")
            say(f"{discovery}. Two P of four ranks and two D of two do so now:")
            say()
            show_log(child, "is up", count=4)
            show_stream(port)
            show_servers(started[-1]["port"])
            show_legs(started[-1]["port"])
            show_silence(child, started)
            show_status(port)
            if options.keep:
                keep(child, port)
    except KeyboardInterrupt:
        say("\n\nInterrupted. Proxy and engines have been stopped.")
        raise SystemExit(130) from None
    say("Proxy and engines have been stopped.")


if __name__ == "__main__":
    main()
