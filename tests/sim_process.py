# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Simulated engines as a process, and their control API as methods.

with SimProcess("--itl", "5", prefill=2, decode=2) as sim:
    sim.d[0].fault("status", status=503, count=1)
    ...
    sim.p[0].wait({"handovers.used": 1, "running": 0})
"""

import http.client
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rig import COMPLETIONS, HANG_GUARD, JSON, RawClient, Response

SIM_ENGINE = Path(__file__).resolve().parent / "sim_engine.py"
MODEL = "org/tiny"


class SimEngine:
    """One engine of a `SimProcess`, addressed through the process's control port."""

    def __init__(self, sim: "SimProcess", line: JSON) -> None:
        self.sim = sim
        self.line = line
        self.role: str = line["role"]
        self.port: int = line["port"]
        self.address = ("127.0.0.1", self.port)
        self.instance = f"127.0.0.1:{self.port}"

    def connect(self) -> RawClient:
        """A new client connection."""
        return RawClient(self.address)

    def request(
        self,
        method: str,
        target: str,
        body: bytes | JSON | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One exchange on a connection of its own."""
        with self.connect() as client:
            return client.request(method, target, body, headers).finish()

    def post(
        self, body: bytes | JSON, target: str = COMPLETIONS, **headers: str
    ) -> Response:
        """One POST; `X_Request_Id="a"` sends the header X-Request-Id."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.request("POST", target, body, named)

    def control(self, method: str, action: str, body: JSON | None = None) -> Any:
        """A request below /sim/ that concerns this engine."""
        return self.sim.control(method, action, (body or {}) | {"port": self.port})

    def stats(self) -> JSON:
        """The engine's figures."""
        figures: JSON = self.control("GET", f"stats?port={self.port}")[str(self.port)]
        return figures

    def wait(self, figures: Mapping[str, int]) -> JSON:
        """Returns the engine's figures once each named one is reached."""
        wanted = {"figures": dict(figures), "timeout": HANG_GUARD}
        reached: JSON = self.control("POST", "wait", wanted)
        return reached

    def fault(self, kind: str, **members: Any) -> None:
        """Adds a fault; the members are those of `sim_http.Fault`."""
        self.control("POST", "fault", {"kind": kind} | members)

    def clear_faults(self) -> None:
        """Ends all faults, and lets go of what `hang` held."""
        self.control("DELETE", "fault")

    def restart(self) -> None:
        """The engine starts anew on its port, also after its death."""
        self.control("POST", "restart")

    def kill(self) -> None:
        """The engine dies."""
        self.control("POST", "kill")


class SimProcess:
    """Simulated engines in a process of their own.

    Args:
        arguments: further ones for sim_engine.py.
        prefill: number of P.
        decode: number of D.
        both: number of engines with both roles.

    """

    def __init__(
        self, *arguments: str, prefill: int = 1, decode: int = 1, both: int = 0
    ) -> None:
        command = [sys.executable, str(SIM_ENGINE), "--model", MODEL, "--control", "0"]
        roles = {"prefill": prefill, "decode": decode, "both": both}
        for role, count in roles.items():
            command += [f"--{role}", *["0"] * count] if count else []
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.engines: list[SimEngine] = []
        for line in self.process.stdout:
            if line == "ready\n":
                break
            self.engines.append(SimEngine(self, json.loads(line)))
        self.control_port = self.engines.pop().port
        self.p = [each for each in self.engines if each.role == "prefill"]
        self.d = [each for each in self.engines if each.role == "decode"]

    def control(self, method: str, action: str, body: JSON | None = None) -> Any:
        """A request below /sim/; fails unless it succeeds."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.control_port, timeout=2 * HANG_GUARD
        )
        try:
            connection.request(method, f"/sim/{action}", json.dumps(body or {}))
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        assert response.status == 200, (action, body, response.status, answer)
        return json.loads(answer)

    def reset(self) -> None:
        """Clears faults, figures, records and pinned KV of all engines."""
        self.control("POST", "reset")

    def stop(self) -> None:
        """Ends the process with SIGTERM: status 0."""
        self.process.terminate()
        status = self.process.wait(HANG_GUARD)
        self.close()
        assert status == 0, status

    def close(self) -> None:
        """Ends the process at once, if it is still there."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.close()
