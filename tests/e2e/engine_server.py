# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Starts real vLLM API servers by forking one interpreter that has imported vLLM.

An import of vLLM costs 10 s of processor time and 500 MB; forks share both. Every
engine is still vLLM's own three processes (API server, engine core, worker), in a
process group of its own.

One JSON object per line on stdin starts an engine:
    {"log": PATH, "env": {NAME: VALUE}, "args": [ARGUMENT, ...]}
and is answered by its process id on a line of stdout. The end of stdin ends the
engines, so none outlives the tests, however they end.
"""

import contextlib
import json
import os
import signal
import sys
from multiprocessing import resource_tracker

import vllm.entrypoints.launchers.api_server.entry as api_server
import vllm.envs
import vllm.model_executor.models.llama  # noqa: F401
import vllm.v1.engine.core  # noqa: F401
import vllm.v1.executor.multiproc_executor  # noqa: F401
import vllm.v1.worker.cpu_model_runner  # noqa: F401
import vllm.v1.worker.cpu_worker  # noqa: F401
from e2e import calm_cpu


def run_engine(log: str, env: dict[str, str], args: list[str]) -> None:
    """Becomes the engine; the caller exits afterwards."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with open(log, "ab") as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    os.environ.update(env)
    sys.argv = ["vllm", *args]
    api_server.main()


def start(line: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        run_engine(**json.loads(line))
        status = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    calm_cpu.apply()
    # An attribute of the module, since the CPU platform resets the variable to spawn,
    # which would import everything twice more per engine.
    vllm.envs.VLLM_WORKER_MULTIPROC_METHOD = "fork"
    # One tracker for all: it removes the shared memory that killed engines leave, and
    # vLLM, which kills its own children when it ends, does not find it.
    resource_tracker.ensure_running()
    # The kernel reaps: an engine that died is gone, not a zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    engines = []
    for line in sys.stdin:
        engines.append(start(line))
        print(engines[-1], flush=True)
    for pid in engines:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
