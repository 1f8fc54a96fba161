# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Who takes part in the benchmark, and how each is started."""

import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import msgpack
import zmq
from answers import MODEL

ROOT = Path(__file__).resolve().parent.parent.parent
OURS = ROOT / "disagg_proxy.py"
MORIIO = ROOT / "moriio_proxy.py"
# Where `make bench` installs the peers that are Python packages.
PEERS = ROOT / ".cache" / "bench" / "bin"
# The demo in a vLLM source tree.
DEMO = "examples/disaggregated/disaggregated_serving/disagg_proxy_demo.py"
# Seconds between two registrations of an engine: vLLM's.
PING_INTERVAL = 3.0
# Descriptors that a proxy needs besides those of its connections.
SPARE_DESCRIPTORS = 200


class Place(NamedTuple):
    """Where a proxy listens and what it finds.

    Args:
        port: where clients are to reach it.
        others: two more free ports.
        prefill: the engines' ports.
        decode: the same.
        folder: for its files.

    """

    port: int
    others: list[int]
    prefill: list[int]
    decode: list[int]
    folder: Path


class Peer(NamedTuple):
    """One that takes part.

    Args:
        name: in the tables.
        note: what it is and how it is set.
        command: how it is started; None: there is no proxy.
        missing: why it cannot take part; empty if it can.
        legs: how many engines serve a request.
        registers: whether the engines have to register with it.

    """

    name: str
    note: str
    command: Callable[[Place], list[str]] | None
    missing: str = ""
    legs: int = 2
    registers: bool = False


def hosts(ports: list[int]) -> list[str]:
    return [f"127.0.0.1:{port}" for port in ports]


def each(flag: str, ports: list[int]) -> list[str]:
    """A flag for each engine, with its URL."""
    return [word for host in hosts(ports) for word in (flag, f"http://{host}")]


def program(name: str) -> str | None:
    """Where a program is."""
    path = os.pathsep.join([str(PEERS), os.environ["PATH"], "/usr/sbin"])
    return shutil.which(name, path=path)


# --- Ours -----------------------------------------------------------------------------


def ours(workers: int = 1) -> Peer:
    """disagg_proxy.py."""

    def command(place: Place) -> list[str]:
        return [
            *(sys.executable, str(OURS), "--model", MODEL, "--port", str(place.port)),
            *("--prefill", *hosts(place.prefill)),
            *("--decode", *hosts(place.decode)),
            *(("--workers", str(workers)) if workers > 1 else ()),
        ]

    if workers == 1:
        return Peer("disagg_proxy.py", "as it comes", command)
    return Peer(f"disagg_proxy.py x{workers}", f"--workers {workers}", command)


def moriio() -> Peer:
    """moriio_proxy.py."""

    def command(place: Place) -> list[str]:
        discovery = ["--service-discovery-port", str(place.others[0])]
        listen = ["--host", "127.0.0.1", "--port", str(place.port)]
        return [sys.executable, str(MORIIO), *listen, *discovery]

    note = "READ mode; engines that register"
    return Peer("moriio_proxy.py", note, command, registers=True)


class Registrations:
    """Registers the engines as MoRIIO's workers do, for as long as it is open."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{self.place.others[0]}")
        roles = {"P": self.place.prefill, "D": self.place.decode}
        while True:
            for role, ports in roles.items():
                for port in ports:
                    socket.send(msgpack.packb(self._registration(role, port)))
            if self.over.wait(PING_INTERVAL):
                break
        socket.close()
        context.term()

    def _registration(self, role: str, port: int) -> dict[str, object]:
        return {
            "type": role,
            "http_address": f"127.0.0.1:{port}",
            "zmq_address": f"host:127.0.0.1,handshake:{port},notify:{port}",
            "dp_size": 1,
            "tp_size": 1,
            "transfer_mode": "READ",
        }


# --- Others ---------------------------------------------------------------------------


def router(name: str, module: list[str], flags: list[str], note: str) -> Peer:
    """A router in Rust that comes as a Python package."""
    found = program(name)
    start = [str(PEERS / "python"), *module] if module else [found or ""]

    def command(place: Place) -> list[str]:
        return [
            *(*start, *flags, "--policy", "round_robin"),
            *("--host", "127.0.0.1", "--port", str(place.port)),
            *("--prometheus-port", str(place.others[0])),
            *("--worker-startup-check-interval", "1"),
            *each("--prefill", place.prefill),
            *each("--decode", place.decode),
        ]

    missing = "" if found else f"no {name}: `make bench` installs it from PyPI"
    return Peer(name, note, command, missing)


HAPROXY = """\
global
  nbthread 1
  maxconn {connections}
defaults
  mode http
  timeout connect 10s
  timeout client 300s
  timeout server 300s
  option http-no-delay
  http-reuse always
frontend clients
  bind 127.0.0.1:{port} backlog 4096
  default_backend engines
backend engines
  balance roundrobin
{engines}
"""
NGINX = """\
worker_processes 1;
daemon off;
pid {folder}/pid;
error_log {folder}/log warn;
worker_rlimit_nofile {descriptors};
events {{ worker_connections {descriptors}; multi_accept on; }}
http {{
  access_log off;
  keepalive_requests 100000000;
  client_max_body_size 64m;
  client_body_buffer_size 2m;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engines {{
{engines}
    keepalive 4096;
    keepalive_requests 100000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 300s;
    }}
  }}
}}
"""


def balancer(name: str, settings: str, line: str, flag: str, package: str) -> Peer:
    """A balancer in C: one leg, straight to the decode engines."""
    found = program(name)

    def command(place: Place) -> list[str]:
        file = place.folder / "settings"
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        lines = [line.format(n, host) for n, host in enumerate(hosts(place.decode))]
        text = settings.format(
            port=place.port,
            folder=place.folder,
            descriptors=limit - SPARE_DESCRIPTORS,
            connections=(limit - SPARE_DESCRIPTORS) // 2,
            engines="\n".join(lines),
        )
        file.write_text(text)
        return [found or "", flag, str(file)]

    missing = "" if found else f"no {name}: the Debian package {package} brings it"
    return Peer(name, "one leg: to decode only; one thread", command, missing, legs=1)


def demo(tree: str) -> Peer:
    """The demo in a vLLM source tree."""
    script = Path(tree, DEMO)

    def command(place: Place) -> list[str]:
        return [
            *(str(PEERS / "python"), str(script)),
            *("--model", MODEL, "--port", str(place.port)),
            *("--prefill", *hosts(place.prefill)),
            *("--decode", *hosts(place.decode)),
        ]

    missing = "" if tree and script.exists() else "no vLLM source tree: VLLM=path"
    return Peer("vLLM's demo", script.name, command, missing)


def floor() -> Peer:
    """The system calls of two legs in C, and nothing else."""
    compiler = shutil.which("cc")

    def command(place: Place) -> list[str]:
        out = place.folder / "floor"
        source = str(Path(__file__).with_name("floor.c"))
        subprocess.run([compiler or "", "-O2", "-o", out, source], check=True)
        ports = [",".join(map(str, ports)) for ports in (place.prefill, place.decode)]
        return [str(out), str(place.port), *ports]

    missing = "" if compiler else "no cc: the Debian package gcc brings it"
    return Peer("floor in C", "the system calls of two legs alone", command, missing)


# --- All ------------------------------------------------------------------------------


def all_peers(vllm: str) -> list[Peer]:
    """Everybody, those that are missing too.

    Args:
        vllm: a vLLM source tree; empty: none.

    """
    sglang = ["-m", "sglang_router.launch_router"]
    return [
        Peer("no proxy", "the clients ask decode themselves", None, legs=0),
        ours(),
        ours(workers=2),
        ours(workers=4),
        moriio(),
        router(
            "vllm-router",
            [],
            ["--vllm-pd-disaggregation", "--log-level", "warning"],
            "nixl; round robin",
        ),
        router(
            "sglang-router",
            sglang,
            ["--pd-disaggregation", "--log-level", "warn"],
            "both legs at once; round robin",
        ),
        balancer("haproxy", HAPROXY, "  server e{} {}", "-f", "haproxy"),
        balancer("nginx", NGINX, "    server {1};", "-c", "nginx-light"),
        floor(),
        demo(vllm),
    ]
