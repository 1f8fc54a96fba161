# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The proxy at work on this machine, without a model: `make demo`.

Starts two prefill and two decode engines (simulated) and the proxy in front of
them, streams one chat completion, shows which engines served it by their own
count, and stops everything. `--keep` goes on until Ctrl-C instead.

The client in here is the standard library's, as any other would be.
"""

import argparse
import contextlib
import http.client
import json
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).resolve().parent
HOST = "127.0.0.1"
MODEL = "demo"
# Milliseconds to the first token and between tokens: slow enough to be watched.
TTFT, ITL = 600, 90
TOKENS = 24
# Seconds a process may take to end by itself; the proxy drains that long.
GRACE = 2
# Words of the proxy's log line that ends in the address it serves.
LISTENING = "listening on "
# What ends the demo: Ctrl-C, `kill`, a terminal that is closed.
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Json = Any
Process = subprocess.Popen[str]


# --- Processes ------------------------------------------------------------------------


def on_ending(handler: Any) -> None:
    """Has all signals that end the demo handled alike."""
    for number in ENDINGS:
        signal.signal(number, handler)


@contextlib.contextmanager
def process(
    script: Path, *arguments: str, stderr: int | None = None
) -> Iterator[Process]:
    """A script of the project that runs inside the `with`, and no longer.

    It has a session of its own, so that a Ctrl-C is the demo's alone to handle.
    """
    child = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        # Nothing may interrupt the end: whatever was started has to go.
        on_ending(signal.SIG_IGN)
        child.terminate()
        try:
            child.wait(2 * GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def output(child: Process) -> IO[str]:
    """What a process prints."""
    assert child.stdout
    return child.stdout


def wait_for_line(child: Process, text: str) -> list[str]:
    """Returns a process' lines up to the first with `text`; exits if none comes."""
    lines = []
    for line in output(child):
        lines.append(line)
        if text in line:
            return lines
    raise SystemExit("".join(["Could not start:\n\n", *lines]))


@contextlib.contextmanager
def engines() -> Iterator[list[Json]]:
    """Two prefill and two decode engines: the facts of each; control comes last."""
    arguments = f"--model {MODEL} --prefill 0 0 --decode 0 0 --control 0"
    pace = f"--ttft {TTFT} --itl {ITL}"
    script = TESTS / "sim_engine.py"
    with process(script, *arguments.split(), *pace.split()) as child:
        yield [json.loads(line) for line in wait_for_line(child, "ready")[:-1]]
    if child.returncode:
        raise SystemExit(f"The engines ended with status {child.returncode}.")


@contextlib.contextmanager
def proxy(started: list[Json]) -> Iterator[tuple[Process, int]]:
    """The proxy in front of the engines, and its port."""
    arguments = ["--model", MODEL, "--port", "0", "--drain-timeout", str(GRACE)]
    for role in ("prefill", "decode"):
        ports = [each["port"] for each in started if each["role"] == role]
        arguments += [f"--{role}", *(f"{HOST}:{port}" for port in ports)]
    script = TESTS.parent / "disagg_proxy.py"
    with process(script, *arguments, stderr=subprocess.STDOUT) as child:
        yield child, int(wait_for_line(child, LISTENING)[-1].rpartition(":")[2])
    if child.returncode:
        raise SystemExit(f"The proxy ended with status {child.returncode}.")


# --- Client ---------------------------------------------------------------------------


def get(port: int, path: str) -> Json:
    """GETs a JSON document."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port)) as connection:
        connection.request("GET", path)
        return json.load(connection.getresponse())


def chat_request(content: str) -> str:
    """The body of a streamed chat completion."""
    message = {"role": "user", "content": content}
    body = {"model": MODEL, "messages": [message], "stream": True, "max_tokens": TOKENS}
    return json.dumps(body)


def stream_chat(port: int, content: str) -> Iterator[str]:
    """Yields the pieces of an answer as they arrive."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port)) as connection:
        headers = {"Content-Type": "application/json"}
        body = chat_request(content)
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {response.read().decode()}")
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if data and data != b"[DONE]":
                yield json.loads(data)["choices"][0]["delta"].get("content") or ""


def curl(port: int) -> str:
    """A command that has the proxy stream an answer."""
    url = f"http://{HOST}:{port}/v1/chat/completions"
    body = chat_request("Hello")
    parts = ["curl", "-N", url, "-H", "Content-Type: application/json", "-d", body]
    return shlex.join(parts)


# --- What a person sees ---------------------------------------------------------------


def say(text: str = "", end: str = "\n") -> None:
    """Prints at once, also into a pipe."""
    print(text, end=end, flush=True)


def show_instances(started: list[Json], port: int) -> None:
    """Who runs where."""
    say("Started on free ports of this machine:")
    say()
    for each in started:
        say(f"    {each['role']:<9} {HOST}:{each['port']:<7} simulated engine")
    say(f"    {'proxy':<9} {HOST}:{port:<7} disagg_proxy.py")
    say()


def show_stream(port: int) -> None:
    """An answer while it arrives, and its pace."""
    say("A chat completion, streamed through the proxy. A simulated engine has no")
    say("words: a token is a hash of the whole prompt, and its number.")
    say()
    arrivals = [time.monotonic()]
    for piece in stream_chat(port, "What does a proxy do all day?"):
        if not piece:
            continue
        if len(arrivals) % 6 == 1:
            say("   ", end="")
        arrivals.append(time.monotonic())
        say(piece, end="\n" if len(arrivals) % 6 == 1 else "")
    gaps = [after - before for before, after in zip(arrivals, arrivals[1:])]
    pace = f"then one every {statistics.median(gaps[1:]):.2f} s"
    say()
    say(f"    {len(gaps)} tokens: the first after {gaps[0]:.2f} s, {pace}")
    say()


def show_servers(control_port: int) -> None:
    """Who served the request, from the engines' own figures."""
    say("Who served it, by the engines' own count (GET /sim/stats):")
    say()
    for figures in get(control_port, "/sim/stats").values():
        if figures["posts"]:
            where = f"{figures['role']:<9} {HOST}:{figures['port']:<7}"
            say(f"    {where} {deeds(figures)}")
    say()


def deeds(figures: Json) -> str:
    """What an engine did for one request."""
    if figures["role"] == "prefill":
        computed = f"computed {figures['prompt_tokens']} prompt tokens"
        return f"{computed}, {figures['handovers']['made']} hand-over made"
    fetched = f"fetched the KV of {figures['external_tokens']} prompt tokens"
    return f"{fetched}, made {figures['generated_tokens']} tokens"


def show_status(port: int) -> None:
    """The proxy's own view, an instance a line."""
    say("GET /status of the proxy:")
    say()
    status = get(port, "/status")
    instances = status.pop("instances")
    for name, value in status.items():
        say(f"    {name:<19} {json.dumps(value)}")
    for each in instances:
        words = ["instances", each["instance"], each["role"], each["state"]]
        say("    {:<19} {:<16} {:<8} {}".format(*words))
    say()


def keep(child: Process, port: int) -> None:
    """Goes on until Ctrl-C, and shows what the proxy logs."""
    say("Everything goes on until Ctrl-C. For another terminal:")
    say()
    say(f"    {curl(port)}")
    say()
    try:
        for line in output(child):
            say(f"    {line}", end="")
    except KeyboardInterrupt:
        say()


def main() -> None:
    """Runs the demo.

    Raises:
        SystemExit: something could not be started or did not end in order (1);
            Ctrl-C, unless it was asked for (130).

    """
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="go on until Ctrl-C")
    keeping = parser.parse_args().keep
    on_ending(signal.default_int_handler)
    try:
        with engines() as started, proxy(started[:-1]) as (child, port):
            show_instances(started[:-1], port)
            show_stream(port)
            show_servers(started[-1]["port"])
            show_status(port)
            if keeping:
                keep(child, port)
    except KeyboardInterrupt:
        say("\n\nInterrupted. Proxy and engines have been stopped.")
        raise SystemExit(130) from None
    say("Proxy and engines have been stopped.")


if __name__ == "__main__":
    main()
