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
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from recipes import Recipe
from rig import (
    DISAGG_PROXY,
    JSON,
    ROOT,
    ProxyProcess,
    RawClient,
    Response,
    poll,
)

from disagg_proxy import argument_parser, prefill_settings

HERE = Path(__file__).resolve().parent

HOST = "127.0.0.1"
ADMIN_KEY = "secret"
MODEL = "tiny"
# Tokens; the smallest that vLLM's CPU attention takes.
BLOCK_SIZE = 32
# Tokens; a stream that runs to the end takes seconds, so that it can be left.
MAX_MODEL_LEN = 2048
# Requests an engine computes at the same time; more of them wait. A step takes all
# their prompts whole: of a prompt in parts, vLLM 0.32.0's ExampleConnector stores the
# first only, and a sampler with a seed ends a CPU engine.
MAX_SEQUENCES = 16

# Hang guards in seconds, several times what a busy two-core machine needs.
IMPORT_TIMEOUT = 180.0
READY_TIMEOUT = 240.0
STOP_TIMEOUT = 20.0
ANSWER_TIMEOUT = 120.0
IDLE_TIMEOUT = 60.0

# Linux hands out 32768 and above for port 0 and for outgoing connections. A port
# below stays free between the look and the engine's own bind.
PORT_RANGE = range(20000, 32000)

# Lines of a log that are shown when something fails.
LOG_TAIL = 40

# Seconds; vLLM's own default.
LEASE = 30

PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"

# Taken over by every engine. Two cores: one thread per engine, not pinned.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": HOST,
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # Structured output would build a C++ kernel on first use: 25 s and a compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # Responses can be had again, and gone on from.
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    # What vLLM sets itself where NIXL was not imported before it.
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
}


def free_port() -> int:
    """Finds a port that nothing listens on."""
    while True:
        port = random.choice(PORT_RANGE)
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port


def request(
    address: tuple[str, int], method: str, target: str, body: JSON | None = None
) -> Response:
    """One exchange with the proxy or an engine, on a connection of its own."""
    with RawClient(address) as client:
        client.socket.settimeout(ANSWER_TIMEOUT)
        return client.request(method, target, body).finish()


# --- Engines --------------------------------------------------------------------------


class Engine:
    """One running `vllm serve`: where it listens, and what it says about itself.

    Args:
        name: of the engine.
        address: where it listens.
        pid: of its API server.
        order: what the engine server was told; "log" is its log.

    """

    def __init__(
        self, name: str, address: tuple[str, int], pid: int, order: JSON
    ) -> None:
        self.name = name
        self.pid = pid
        self.order = order
        self.log = Path(order["log"])
        self.address = address
        self.port = address[1]
        self.instance = f"{address[0]}:{self.port}"
        self._exited = os.pidfd_open(pid)

    def ready(self) -> bool:
        """Whether it answers; raises RuntimeError if it has ended instead."""
        if select.select([self._exited], [], [], 0)[0]:
            raise RuntimeError(f"{self.name} ended while it started\n{self.log_tail()}")
        try:
            return request(self.address, "GET", "/health").status == 200
        except OSError:
            return False

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of `name` (a counter's name ends in `_total`)."""
        text = request(self.address, "GET", "/metrics").body.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def idle(self) -> bool:
        """Whether it runs no request and holds no KV block for one."""
        gauges = "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
        return not any(map(self.metric, gauges))

    def log_tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL:])

    def stop(self, first: signal.Signals = signal.SIGTERM) -> None:
        """Ends the whole process group: API server, engine core and worker."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, first)
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
        # What engines leave behind. Short: it is part of the paths of their sockets.
        self._scratch = tempfile.TemporaryDirectory(prefix="e2e-")
        with (logs / "engine_server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "e2e.engine_server"],
                cwd=HERE.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={
                    **os.environ,
                    **ENVIRONMENT,
                    "TMPDIR": self._scratch.name,
                },
                start_new_session=True,
                text=True,
            )

    def start(
        self,
        name: str,
        kv_transfer: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        port: int | None = None,
        host: str = HOST,
        options: Sequence[str] = (),
    ) -> Engine:
        """Forks an engine. It is not ready yet: see `Engine.ready`.

        Args:
            name: of the engine and its log.
            kv_transfer: value of `--kv-transfer-config`; None for a plain engine.
            env: additional environment variables.
            port: to listen on; None for any.
            host: to listen on.
            options: further arguments.

        """
        address = host, port or free_port()
        args = [*self._arguments(address), *options]
        if kv_transfer is not None:
            args.append(f"--kv-transfer-config={json.dumps(kv_transfer)}")
        log = self.logs / f"{name}.log"
        order = {"log": str(log), "env": env or {}, "args": args}
        return Engine(name, address, self._fork(order), order)

    def start_again(self, engine: Engine, changes: dict[str, str]) -> Engine:
        """Forks an engine that has ended once more.

        Args:
            engine: that has ended.
            changes: what stood in its arguments to what is there now.

        """
        args = engine.order["args"]
        for old, new in changes.items():
            args = [argument.replace(old, new) for argument in args]
        order = engine.order | {"args": args}
        return Engine(engine.name, engine.address, self._fork(order), order)

    def _fork(self, order: JSON) -> int:
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

    def _arguments(self, address: tuple[str, int]) -> list[str]:
        options = {
            "model": self._model,
            "served-model-name": MODEL,
            "host": address[0],
            "port": address[1],
            "dtype": "float32",
            "max-model-len": MAX_MODEL_LEN,
            "max-num-batched-tokens": MAX_SEQUENCES * MAX_MODEL_LEN,
            "max-num-seqs": MAX_SEQUENCES,
            "block-size": BLOCK_SIZE,
            "kv-cache-memory-bytes": 32 << 20,
            "tool-call-parser": "hermes",
        }
        return [f"--{name}={value}" for name, value in options.items()] + [
            "--enforce-eager",
            "--enable-auto-tool-choice",
            "--enable-log-requests",
            "--disable-uvicorn-access-log",
        ]

    def close(self) -> None:
        """Ends the server, and with it every engine that still runs."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(STOP_TIMEOUT)
        self._scratch.cleanup()


def nixl(
    server: EngineServer,
    name: str,
    role: str,
    lease: int = LEASE,
    port: int | None = None,
    options: Sequence[str] = (),
) -> Engine:
    """Starts an engine with NIXL pull.

    Args:
        server: forks it.
        name: of the engine and its log.
        role: "kv_producer" (prefill) or "kv_consumer" (decode).
        lease: seconds for which prefill keeps the blocks of a hand-over.
        port: to listen on; None for any.
        options: further arguments.

    """
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": lease},
    }
    env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    return server.start(name, config, env, port, options=options)


# --- A fleet --------------------------------------------------------------------------


@dataclass
class Ledger:
    """What the engines counted during a piece of work, by their own metrics."""

    # Requests that the prefill engines finished.
    prefilled: float = 0
    # Prompt tokens of the prefill engines.
    prompt_tokens: float = 0
    # Prompt tokens of the decode engines: from a prefill engine, from their own
    # prefix cache, computed.
    external: float = 0
    local: float = 0
    computed: float = 0
    # NIXL reads of the decode engines.
    transfers: float = 0


@dataclass
class Fleet:
    """Prefill and decode engines behind the proxy, and a plain engine to compare."""

    plain: Engine
    prefill: list[Engine]
    decode: list[Engine]
    proxy: ProxyProcess
    # The proxy's.
    arguments: list[str]
    # Of the recipe, if it was started by one.
    name: str = ""

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

    @contextlib.contextmanager
    def counted(self) -> Iterator[Ledger]:
        """Counts what the engines do inside; the ledger is filled at the end."""
        before = self._count()
        ledger = Ledger()
        yield ledger
        self.wait_idle()
        for name, count in vars(self._count()).items():
            setattr(ledger, name, count - getattr(before, name))

    def _count(self) -> Ledger:
        return Ledger(
            prefilled=self.prefilled("vllm:request_success_total"),
            prompt_tokens=self.prefilled("vllm:prompt_tokens_total"),
            external=self.decoded(PROMPT_TOKENS, source="external_kv_transfer"),
            local=self.decoded(PROMPT_TOKENS, source="local_cache_hit"),
            computed=self.decoded(PROMPT_TOKENS, source="local_compute"),
            transfers=self.decoded("vllm:nixl_xfer_time_seconds_count"),
        )

    def wait_idle(self) -> None:
        """Returns once no engine runs a request or holds a KV block for one."""
        for engine in self.engines:
            poll(engine.idle, f"{engine.name} is idle", IDLE_TIMEOUT)


@contextlib.contextmanager
def fleet(
    plain: Engine,
    prefill: list[Engine],
    decode: list[Engine],
    argv: list[str] | None = None,
) -> Iterator[Fleet]:
    """Waits for the engines, starts the proxy; ends all of them but the plain one.

    Args:
        plain: engine to compare with.
        prefill: engines of that role.
        decode: engines of that role.
        argv: the proxy's arguments; None for those that name the engines.

    """
    try:
        for engine in [plain, *prefill, *decode]:
            poll(engine.ready, f"{engine.name} is ready", READY_TIMEOUT)
        if argv is None:
            roles = ("--prefill", prefill), ("--decode", decode)
            argv = ["--model", MODEL]
            for flag, engines in roles:
                argv += [flag, *(engine.instance for engine in engines)]
        with ProxyProcess(argv, env={"ADMIN_API_KEY": ADMIN_KEY}) as proxy:
            proxy.wait_all_up()
            yield Fleet(plain, prefill, decode, proxy, argv)
    finally:
        for engine in prefill + decode:
            engine.stop()


# What a recipe leaves to the machine: a CPU has no memory that NIXL would register
# by itself, and no RDMA for Mooncake.
ON_A_CPU: dict[str, JSON] = {
    "nixl": {"kv_buffer_device": "cpu"},
    "nixl-push": {"kv_buffer_device": "cpu"},
    "mooncake": {"kv_connector_extra_config": {"mooncake_protocol": "tcp"}},
}
# The ports in the recipes; others may be in use on this machine.
RECIPE_PORTS = ("8100", "8200", "5600", "8998", "50051")


@contextlib.contextmanager
def recipe_fleet(
    server: EngineServer,
    plain: Engine,
    name: str,
    changes: dict[str, str] | None = None,
) -> Iterator[Fleet]:
    """Does what a recipe of the README says, on loopback addresses as machines.

    Args:
        server: forks the engines.
        plain: engine to compare with.
        name: of the recipe.
        changes: what a test has in place of what stands there.

    """
    ports = {port: str(free_port()) for port in RECIPE_PORTS}
    local = {"10.0.0.": "127.0.0.", "MODEL": MODEL}
    recipe = Recipe(name, local | ports | (changes or {}))
    script, *argv = recipe.proxy.arguments
    assert ROOT / script == DISAGG_PROXY
    args = argument_parser().parse_args(argv)
    roles = {"prefill": prefill_settings(args)[0], "decode": args.decode}
    with in_shell(recipe.before, server.logs / f"{name}.log"):
        prefill, decode = (
            [
                start_launch(server, f"{name}-{role}-{number}", recipe, role, instance)
                for number, instance in enumerate(instances)
            ]
            for role, instances in roles.items()
        )
        with fleet(plain, prefill, decode, argv) as running:
            running.name = name
            yield running


@contextlib.contextmanager
def in_shell(commands: list[str], log: Path) -> Iterator[None]:
    """Runs commands of a recipe; those in the background end with the context."""
    here = Path(sys.executable).parent
    with log.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-e"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            env={**os.environ, "PATH": f"{here}:{os.environ['PATH']}"},
            start_new_session=True,
            text=True,
        )
    try:
        script = ["exec 3>&1 >&2", *commands, "echo done >&3", "exec 3>&-", "wait"]
        assert shell.stdin
        assert shell.stdout
        with shell.stdin as told, shell.stdout as heard:
            told.write("\n".join(script))
            told.close()
            assert heard.readline() == "done\n", log.read_text()
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(STOP_TIMEOUT)


def start_launch(
    server: EngineServer, name: str, recipe: Recipe, role: str, instance: str
) -> Engine:
    """Starts one engine of a recipe, the one that the proxy knows as `instance`."""
    launch = recipe.engine(role, instance.rpartition(":")[0])
    assert launch.arguments[::2] == ["--host", "--port", "--kv-transfer-config"]
    host, port = launch.option("--host"), launch.option("--port")
    assert f"{host}:{port}" == instance
    env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), **launch.env}
    config = launch.kv_transfer() | ON_A_CPU.get(recipe.name, {})
    return server.start(name, config, env, int(port), host)
