# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Real vLLM engines as processes, for the tests of this folder."""

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rig import ProxyProcess, poll

HERE = Path(__file__).resolve().parent

HOST = "127.0.0.1"
MODEL = "tiny"
# Tokens; the smallest that vLLM's CPU attention takes.
BLOCK_SIZE = 32
# Tokens; a stream that runs to the end takes seconds, so that it can be left.
MAX_MODEL_LEN = 2048

# Hang guards in seconds, several times what a busy two-core machine needs.
IMPORT_TIMEOUT = 180.0
READY_TIMEOUT = 240.0
STOP_TIMEOUT = 20.0
ANSWER_TIMEOUT = 120.0

# Linux hands out 32768 and above for port 0 and for outgoing connections. A port
# below stays free between the look and the engine's own bind.
PORT_RANGE = range(20000, 32000)

# Lines of a log that are shown when something fails.
LOG_TAIL = 40

# Taken over by every engine. Two cores: one thread per engine, not pinned.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": HOST,
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # What vLLM sets itself where NIXL was not imported before it.
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
}


def free_port() -> int:
    """Finds a port that nothing listens on."""
    while True:
        port = random.choice(PORT_RANGE)
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port


# --- Engines --------------------------------------------------------------------------


class Engine:
    """One running `vllm serve`: where it listens, and what it says about itself."""

    def __init__(self, name: str, port: int, pid: int, log: Path) -> None:
        self.name = name
        self.port = port
        self.pid = pid
        self.log = log
        self.address = f"{HOST}:{port}"
        self.url = f"http://{self.address}"
        self._exited = os.pidfd_open(pid)

    def ready(self) -> bool:
        """Whether it answers; raises RuntimeError if it has ended instead."""
        if select.select([self._exited], [], [], 0)[0]:
            raise RuntimeError(f"{self.name} ended while it started\n{self.log_tail()}")
        try:
            return httpx.get(f"{self.url}/health").is_success
        except httpx.TransportError:
            return False

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of `name` (a counter's name ends in `_total`)."""
        text = httpx.get(f"{self.url}/metrics", timeout=ANSWER_TIMEOUT).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def log_tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL:])

    def stop(self) -> None:
        """Ends the whole process group: API server, engine core and worker."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
            select.select([self._exited], [], [], STOP_TIMEOUT)
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self._exited)


class EngineServer:
    """The process that forks engines; see engine_server.py.

    Args:
        model: folder of the model all engines serve.
        logs: folder their logs are written to.

    """

    def __init__(self, model: Path, logs: Path) -> None:
        self.logs = logs
        self._model = model
        with (logs / "engine_server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "engine_server.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
                text=True,
            )

    def start(
        self,
        name: str,
        kv_transfer: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> Engine:
        """Forks an engine. It is not ready yet: see `Engine.ready`.

        Args:
            name: of the engine and its log.
            kv_transfer: value of `--kv-transfer-config`; None for a plain engine.
            env: additional environment variables.

        """
        port = free_port()
        args = self._arguments(port)
        if kv_transfer is not None:
            args += ["--kv-transfer-config", json.dumps(kv_transfer)]
        log = self.logs / f"{name}.log"
        order = {"log": str(log), "env": env or {}, "args": args}
        return Engine(name, port, self._fork(order), log)

    def _fork(self, order: dict[str, Any]) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        # The first answer comes after the import of vLLM.
        answered, _, _ = select.select([self._process.stdout], [], [], IMPORT_TIMEOUT)
        pid = self._process.stdout.readline() if answered else ""
        if not pid:
            log = (self.logs / "engine_server.log").read_text()
            raise RuntimeError(f"vLLM was not imported\n{log}")
        return int(pid)

    def _arguments(self, port: int) -> list[str]:
        options = {
            "model": self._model,
            "served-model-name": MODEL,
            "host": HOST,
            "port": port,
            "dtype": "float32",
            "max-model-len": MAX_MODEL_LEN,
            "max-num-batched-tokens": MAX_MODEL_LEN,
            "max-num-seqs": 16,
            "block-size": BLOCK_SIZE,
            "kv-cache-memory-bytes": 32 << 20,
            "tool-call-parser": "hermes",
        }
        flags = ["enforce-eager", "enable-auto-tool-choice", "enable-log-requests"]
        return [f"--{name}={value}" for name, value in options.items()] + [
            f"--{flag}" for flag in flags
        ]

    def close(self) -> None:
        """Ends the server, and with it every engine that still runs."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(STOP_TIMEOUT)


def nixl(server: EngineServer, name: str, role: str) -> Engine:
    """Starts an engine with NIXL pull.

    Args:
        server: forks it.
        name: of the engine and its log.
        role: "kv_producer" (prefill) or "kv_consumer" (decode).

    """
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
    }
    return server.start(
        name, config, {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    )


def example(server: EngineServer, name: str, storage: Path) -> Engine:
    """Starts an engine that shares its KV blocks as files in `storage`."""
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    return server.start(name, config)


# --- A fleet --------------------------------------------------------------------------


@dataclass
class Fleet:
    """Prefill and decode engines behind the proxy, and a plain engine to compare."""

    plain: Engine
    prefill: list[Engine]
    decode: list[Engine]
    proxy: ProxyProcess

    @property
    def url(self) -> str:
        """Where the proxy listens."""
        host, port = self.proxy.address
        return f"http://{host}:{port}"

    @property
    def engines(self) -> list[Engine]:
        """Prefill and decode engines."""
        return self.prefill + self.decode

    def prefilled(self, name: str, **labels: str) -> float:
        """Sum of a metric over the prefill engines."""
        return sum(engine.metric(name, **labels) for engine in self.prefill)

    def decoded(self, name: str, **labels: str) -> float:
        """Sum of a metric over the decode engines."""
        return sum(engine.metric(name, **labels) for engine in self.decode)

    def wait_idle(self) -> None:
        """Returns once no engine runs a request or holds a KV block for one."""
        gauges = "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
        for engine in self.engines:
            for gauge in gauges:
                poll(lambda e=engine, g=gauge: not e.metric(g), f"{gauge} is 0")


@contextlib.contextmanager
def fleet(
    plain: Engine, prefill: list[Engine], decode: list[Engine]
) -> Iterator[Fleet]:
    """Waits for the engines, starts the proxy; ends all of them but the plain one."""
    try:
        for engine in [plain, *prefill, *decode]:
            poll(engine.ready, f"{engine.name} is ready", READY_TIMEOUT)
        addresses = [
            ["--prefill", *(engine.address for engine in prefill)],
            ["--decode", *(engine.address for engine in decode)],
        ]
        with ProxyProcess(["--model", MODEL, *sum(addresses, [])]) as proxy:
            proxy.wait_all_up()
            yield Fleet(plain, prefill, decode, proxy)
    finally:
        for engine in prefill + decode:
            engine.stop()

