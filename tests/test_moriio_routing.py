# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""moriio_proxy.py: which ranks of which instances serve a request.

The function is under test as vLLM's own tests use it: loaded by path, called with
plain dicts and numbers from 1. The shares are counted at the engines.
"""

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from moriio_rig import MORIIO_PROXY, Fleet, ids, simulated
from rig import COMPLETIONS, HANG_GUARD, JSON, gather, http_response, openai_error

from moriio_proxy import Slot, flat_interleaved_dp_route

PROMPT: JSON = {"prompt": "hello", "max_tokens": 1}
# (instances, dp_size) of the deployments in vLLM's RFC 46107.
SHAPES = [(1, 1), (2, 1), (4, 1), (1, 8), (2, 8), (3, 8)]
# The dp_size of each instance of a role.
MIXED = [
    sizes
    for count in (2, 3, 4)
    for sizes in itertools.product((1, 2, 3, 8), repeat=count)
]


def route(sizes: tuple[int, ...], rounds: int) -> list[Slot]:
    """The slots of so many rounds of requests."""
    instances = [{"dp_size": size, "tp_size": 8 // size} for size in sizes]
    numbers = range(1, sum(sizes) * rounds + 1)
    return [flat_interleaved_dp_route(number, instances) for number in numbers]


def slots(sizes: tuple[int, ...]) -> set[Slot]:
    """All (instance, rank) of a role."""
    return {
        (index, rank if size > 1 else None)
        for index, size in enumerate(sizes)
        for rank in range(size)
    }


# --- The function ---------------------------------------------------------------------


@pytest.mark.parametrize(("count", "dp_size"), SHAPES)
def test_instances_of_one_size_take_turns_rank_by_rank(
    count: int, dp_size: int
) -> None:
    expected = [
        (index, rank if dp_size > 1 else None)
        for rank in range(dp_size)
        for index in range(count)
    ]
    assert route((dp_size,) * count, rounds=3) == expected * 3


def test_every_slot_is_used_equally_whatever_the_sizes() -> None:
    for sizes in MIXED:
        used = Counter(route(sizes, rounds=3))
        assert used.keys() == slots(sizes), sizes
        assert set(used.values()) == {3}, sizes


def test_ranks_of_an_instance_come_in_order() -> None:
    for sizes in MIXED:
        for index, size in enumerate(sizes):
            ranks = [rank for i, rank in route(sizes, rounds=1) if i == index]
            assert ranks == ([None] if size == 1 else list(range(size))), sizes


def test_consecutive_requests_alternate_as_far_as_the_slots_allow() -> None:
    for sizes in MIXED:
        order = [index for index, _ in route(sizes, rounds=2)]
        repeats = sum(a == b for a, b in itertools.pairwise(order[: sum(sizes) + 1]))
        # An instance with more slots than all others has to follow itself.
        assert repeats == max(0, 2 * max(sizes) - sum(sizes)), sizes


def test_a_role_of_many_instances_has_a_slot_for_each_at_once() -> None:
    sizes = (8,) * 199 + (16,)
    assert Counter(route(sizes, rounds=1)).keys() == slots(sizes)


# --- Loading it -----------------------------------------------------------------------

# What vLLM's tests do, down to modules that are not the real ones.
STUBBED = f"""
import importlib.util, sys, types
for name in ("zmq", "msgpack", "aiohttp", "quart", "vllm"):
    sys.modules[name] = types.ModuleType(name)
spec = importlib.util.spec_from_file_location("under_test", {str(MORIIO_PROXY)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.flat_interleaved_dp_route(2, [{{"dp_size": 8}}] * 2) == (1, 0)
"""
RUN_PATH = f"""
import runpy
names = runpy.run_path({str(MORIIO_PROXY)!r})
assert names["flat_interleaved_dp_route"](9, [{{"dp_size": 8}}]) == (0, 0)
"""
LOADING = {
    "as a script": [str(MORIIO_PROXY), "--help"],
    "as a script on a safe path": ["-P", str(MORIIO_PROXY), "--help"],
    "by path": ["-P", "-c", STUBBED],
    "by runpy": ["-P", "-c", RUN_PATH],
}


@pytest.mark.parametrize("arguments", LOADING.values(), ids=LOADING)
def test_it_loads_from_any_directory(arguments: list[str], tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=HANG_GUARD,
    )


# --- Requests -------------------------------------------------------------------------


def test_b85_every_instance_gets_its_share() -> None:
    with simulated("WRITE", prefill=3, decode=2) as (proxy, sim):
        with proxy.connect() as client:
            for _ in range(600):
                assert client.post(COMPLETIONS, PROMPT).finish().status == 200
        assert [each.stats()["posts"] for each in sim.p] == [200] * 3
        assert [each.stats()["posts"] for each in sim.d] == [300] * 2
        sim.reset()
        clients = [proxy.connect(wait=False) for _ in range(600)]
        readers = [client.post(COMPLETIONS, PROMPT) for client in clients]
        statuses = Counter(reader.finish().status for reader in readers)
        for client in clients:
            client.close()
        assert statuses == {200: 600}
        assert [each.stats()["posts"] for each in sim.p] == [200] * 3
        assert [each.stats()["posts"] for each in sim.d] == [300] * 2


@pytest.mark.parametrize("counts", [(2, 2), (3, 3), (2, 4), (3, 2)])
def test_b85_every_prefill_meets_every_decode(counts: tuple[int, int]) -> None:
    with Fleet(*counts) as fleet:
        for _ in range(counts[0] * counts[1]):
            assert fleet.post(PROMPT).status == 200
        met = Counter(ids(leg)[:2] for each in fleet.p for leg in each.requests)
        addresses = [
            [fleet.told[each]["zmq_address"] for each in engines]
            for engines in (fleet.p, fleet.d)
        ]
        assert met == dict.fromkeys(itertools.product(*addresses), 1)


def test_b85_failures_do_not_shift_the_shares() -> None:
    with Fleet(prefill=3, decode=2, argv=["--retries", "0"]) as fleet:
        for engine in fleet.engines:
            refusal = http_response(400, openai_error(400, "no"))
            engine.answer(refusal)
            engine.answer(refusal)
        calls = [lambda: fleet.post(PROMPT).status] * 60
        assert 0 < Counter(gather(calls))[400] <= 10
        for engines, share in ((fleet.p, 20), (fleet.d, 30)):
            # Where P's refusal came first, D may never have read the request.
            assert all(share - 10 <= len(e.requests) <= share for e in engines)


@pytest.mark.parametrize("mode", ["READ", "WRITE"])
@pytest.mark.parametrize("dp_sizes", [(1, 1), (2, 1), (1, 3), (4, 2), (2, 3)])
def test_each_leg_runs_on_a_rank_of_its_own(
    mode: str, dp_sizes: tuple[int, int]
) -> None:
    sizes: tuple[JSON, JSON] = ({"dp_size": dp_sizes[0]}, {"dp_size": dp_sizes[1]})
    with Fleet(2, 2, mode, sizes=sizes) as fleet:
        rounds = 2 * dp_sizes[0] * 2 * dp_sizes[1]
        for _ in range(rounds):
            assert fleet.post(PROMPT).status == 200
        for engines, dp_size in zip((fleet.p, fleet.d), dp_sizes):
            used = Counter(
                (engine.port, leg.header("x-data-parallel-rank"))
                for engine in engines
                for leg in engine.requests
            )
            ranks = [str(n) for n in range(dp_size)] if dp_size > 1 else [None]
            ports = [engine.port for engine in engines]
            share = rounds // (2 * dp_size)
            assert used == dict.fromkeys(itertools.product(ports, ranks), share)
        # Each is told where the other runs.
        pinned = {
            ids(leg).uid: (leg.header("x-data-parallel-rank"), leg.json())
            for engine in fleet.p
            for leg in engine.requests
        }
        for leg in (leg for engine in fleet.d for leg in engine.requests):
            rank, body = pinned[ids(leg).uid]
            to_d, to_p = leg.json()["kv_transfer_params"], body["kv_transfer_params"]
            own = leg.header("x-data-parallel-rank")
            assert to_d.get("remote_dp_rank") == (int(rank) if rank else None)
            assert to_p.get("remote_dp_rank") == (int(own) if own else None)
            assert (to_p["remote_dp_size"], to_d["remote_dp_size"]) == dp_sizes[::-1]


@pytest.mark.parametrize("mode", ["READ", "WRITE"])
def test_engines_with_several_ranks_find_each_others_kv(mode: str) -> None:
    sizes = "--dp-size", "3", "2", "--tp-size", "2", "4"
    with simulated(mode, *sizes, prefill=2, decode=2) as (proxy, sim):
        with proxy.connect() as client:
            for _ in range(72):
                response = client.post(COMPLETIONS, PROMPT).finish()
                assert response.status == 200 and b"GARBAGE" not in response.body
        for each in sim.p:
            figures = each.wait({"handovers.used": 36})
            assert figures["handovers"]["used"] == figures["posts"] == 36
        for each in sim.d:
            figures = each.stats()
            assert figures["bad_handovers"] == 0 and figures["posts"] == 36


def test_an_engine_of_another_size_joins_and_leaves() -> None:
    limits = {"PROBE_INTERVAL_UP": 0.1}
    with Fleet(2, 1, limits=limits, sizes=({"dp_size": 2}, {})) as fleet:
        fleet.register(fleet.p[1], dp_size=4)
        for _ in range(12):
            assert fleet.post(PROMPT).status == 200
        assert [len(each.requests) for each in fleet.p] == [4, 8]
        ranks = {leg.header("x-data-parallel-rank") for leg in fleet.p[1].requests}
        assert ranks == {"0", "1", "2", "3"}
        fleet.p[1].refuse()
        fleet.proxy.wait_listed(fleet.p[1].instance, state="down")
        for _ in range(4):
            assert fleet.post(PROMPT).status == 200
        assert len(fleet.p[0].requests) == 8
