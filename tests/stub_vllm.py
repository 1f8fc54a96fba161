# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stands in for `vllm serve` under kv_events.sh: answers, and publishes real events.

Environment:
    STUB_REPORTS: port of a test that wants to know. What happens is sent there, as
        JSON lines: the arguments first, then each request's body.
    STUB_MODE: what goes wrong, see `MODES`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kv_publisher import HOST, Publisher, batch, stored

MODES = {
    "fine": "nothing",
    "die": "it ends while it starts, with a word in its log",
    "deaf": "it never listens",
    "broken": "completions are answered with 500",
    "hang": "completions are never answered",
    "silent": "it publishes nothing",
    "stubborn": "it is deaf, and neither it nor its child ends on TERM",
}
LAST_WORDS = "RuntimeError: out of memory"


class Handler(BaseHTTPRequestHandler):
    publisher: Publisher
    reports: Any
    mode: str
    count = 0

    def _answer(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        report(self.reports, request)
        if self.mode == "hang":
            threading.Event().wait()
        if self.mode == "broken":
            return self._answer(500, {"error": {"message": "engine is dead"}})
        if self.mode != "silent":
            block = 1000 + Handler.count
            self.publisher.publish(Handler.count, batch(stored(block)))
            Handler.count += 1
        return self._answer(200, {"choices": [{"text": f"to {request['prompt']}"}]})


def report(to: Any, what: Any) -> None:
    to.write(json.dumps(what) + "\n")
    to.flush()


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def serve(reports: Any, mode: str) -> None:
    config = json.loads(option("--kv-events-config"))
    Handler.reports = reports
    Handler.mode = mode
    Handler.publisher = Publisher(
        port_of(config["endpoint"]), port_of(config["replay_endpoint"])
    )
    ThreadingHTTPServer((HOST, int(option("--port"))), Handler).serve_forever()


def main() -> None:
    mode = os.environ["STUB_MODE"]
    assert mode in MODES
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    address = HOST, int(os.environ["STUB_REPORTS"])
    with socket.create_connection(address) as connection:
        reports = connection.makefile("w")
        report(reports, sys.argv[1:])
        if mode == "die":
            sys.exit(LAST_WORDS)
        if mode in ("deaf", "stubborn"):
            threading.Event().wait()
        serve(reports, mode)


if __name__ == "__main__":
    main()
