# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What `--token-handover` saves a decode engine: its processor time to a first token.

usage: .venv-e2e/bin/python tests/e2e/token_handover.py [REQUESTS]

One prefill and one decode engine over NIXL, and two proxies in front of them, one with
the option. Chats of 100 KB that differ in their last words are asked of both in turn,
for one token. The decode engine has no prefix cache, so that every prompt's KV is
moved as if it were new. The whole engine also waits busily, on a loaded machine longer.
"""

import contextlib
import doctest
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from e2e import engines, workload  # noqa: E402
from e2e.engines import Engine, EngineServer, Fleet  # noqa: E402
from rig import ProxyProcess  # noqa: E402

PROMPT_BYTES = 100_000
REQUESTS = 20
TICKS = os.sysconf("SC_CLK_TCK")

# Tokens of four letters in the mean, as in large models.
VOCABULARY = 32_000
LONG_TEXT = Path(doctest.__file__)
# Room for such a prompt, and for two of them.
LONG = ["--max-model-len=60000", "--max-num-batched-tokens=60000"]
LONG += ["--kv-cache-memory-bytes=400000000"]
ENV = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


def processes() -> dict[int, tuple[int, float]]:
    """Process group and processor time in milliseconds of every process."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            fields = stat.read_text().rpartition(")")[2].split()
            used = 1000 * (int(fields[11]) + int(fields[12])) / TICKS
            found[int(stat.parent.name)] = int(fields[2]), used
    return found


def spent(fleet: Fleet, proxy: ProxyProcess) -> dict[str, float]:
    """Milliseconds of processor time until now, by who spent it."""
    now = processes()
    (prefill,), (decode,) = fleet.prefill, fleet.decode

    def whole(engine: Engine) -> float:
        return sum(used for group, used in now.values() if group == engine.pid)

    return {
        "decode's API server": now[decode.pid][1],
        "decode, the whole engine": whole(decode),
        "prefill's API server": now[prefill.pid][1],
        "prefill, the whole engine": whole(prefill),
        "the proxy": now[proxy.pid][1],
    }


def chat(number: int) -> workload.Question:
    """A long chat; only its end is new."""
    text = LONG_TEXT.read_text()[:PROMPT_BYTES] + f"What is {number}?"
    assert len(text) > PROMPT_BYTES
    return workload.chat(text, {"max_tokens": 1, "stream": True})


def ask(proxy: ProxyProcess, number: int) -> None:
    """Asks once, until the answer has ended: with its first token."""
    answer = workload.ask(proxy.address, chat(number))
    assert answer["status"] == 200, answer


def measure(fleet: Fleet, requests: int) -> None:
    """Prints the figures."""
    (decode,) = fleet.decode
    with ProxyProcess([*fleet.arguments, "--token-handover"]) as handing:
        handing.wait_all_up()
        ways = {"as text": fleet.proxy, "in tokens": handing}
        for number, proxy in enumerate(ways.values()):
            ask(proxy, number)  # The prefill engine has all but the end cached now.
        costs: dict[str, Counter[str]] = {way: Counter() for way in ways}
        for number in range(requests):
            for offset, (way, proxy) in enumerate(ways.items()):
                costs[way].subtract(spent(fleet, proxy))
                ask(proxy, 2 + 2 * number + offset)
                costs[way].update(spent(fleet, proxy))
    tokens = decode.metric("vllm:prompt_tokens_total") / (2 * requests + 2)
    print(f"{PROMPT_BYTES} bytes, {tokens:.0f} tokens, {requests} requests each way")
    for part in costs["as text"]:
        text, handed = (costs[way][part] / requests for way in ways)
        print(
            f"{part:26} {text:6.1f} ms as text, {handed:6.1f} ms in tokens, "
            f"ratio {handed / text:.2f}"
        )


def main() -> None:
    """Starts the engines and ends them."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else REQUESTS
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        maker = [str(HERE / "tiny_model.py"), str(model), str(VOCABULARY)]
        subprocess.run([sys.executable, *maker], check=True, capture_output=True)
        os.environ.update(ENV)
        server = EngineServer(model, Path(scratch))
        try:
            fresh = [*LONG, "--no-enable-prefix-caching"]
            prefill = engines.nixl(server, "prefill", "kv_producer", options=LONG)
            decode = engines.nixl(server, "decode", "kv_consumer", options=fresh)
            # Nothing is compared with a plain engine.
            with engines.fleet(prefill, [prefill], [decode]) as fleet:
                measure(fleet, requests)
        finally:
            server.close()


if __name__ == "__main__":
    main()
