# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""moriio_proxy.py next to those parts of vLLM's MoRIIO that need no GPU.

Its heartbeat program registers, as a process of its own, at its own pace. What the
legs carry is read by the connector's own functions, and so is the README's recipe.
"""

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from e2e.engines import IMPORT_TIMEOUT
from moriio_rig import Fleet, Proxy, registration
from recipes import Recipe
from rig import JSON, EngineRequest, ScriptedEngine, http_response, poll

# vLLM's interval, and with it the seconds until an engine is given up.
INTERVAL = 3.0
EXPIRY = 5 * INTERVAL

# Has the connector take in the legs and the configurations on stdin, and prints what
# it made of them.
TAKE_IN = """
import dataclasses, json, sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_common as m
constants = m.MoRIIOConstants
made = [constants.TRANSFER_PREFIX, constants.PING_INTERVAL]
legs, configs = json.load(sys.stdin)
for request_id, params, write_mode in legs:
    metadata = m.MoRIIOConnectorMetadata()
    metadata.add_new_req(request_id, ([1],), params, write_mode=write_mode)
    (taken,) = {**metadata.reqs_to_save, **metadata.reqs_to_recv}.values()
    made.append(dataclasses.asdict(taken))
for each in configs:
    config = KVTransferConfig(**each)
    made.append([m.get_moriio_mode(config).name, config.kv_role])
print(json.dumps(made))
"""


def vllm_file(name: str) -> Path:
    """A file of the installed package, which is not imported for it."""
    spec = importlib.util.find_spec("vllm")
    assert spec and spec.origin
    connectors = Path(spec.origin).parent / "distributed/kv_transfer/kv_connector/v1"
    return connectors / "moriio" / name


@contextlib.contextmanager
def heartbeat(proxy: Proxy, told: JSON) -> Iterator[None]:
    """VLLM's heartbeat, started and stopped as its worker does it."""
    path = vllm_file("moriio_heartbeat.py")
    spec = importlib.util.spec_from_file_location("moriio_heartbeat", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    endpoint = f"tcp://127.0.0.1:{proxy.discovery}"
    beating = module.MoRIIOHeartbeat(endpoint, told, INTERVAL)
    try:
        yield
        beating.check_health()
    finally:
        beating.shutdown()


def test_vllms_heartbeat_is_listed_expires_and_returns() -> None:
    p, d = ScriptedEngine("prefill"), ScriptedEngine("decode")
    with p, d, Proxy() as proxy, heartbeat(proxy, registration(d, "READ")):
        told = registration(p, "READ")
        with heartbeat(proxy, told):
            entry = proxy.wait_listed(p.instance, state="up")
            assert told.items() <= entry.items()
            proxy.wait_listed(d.instance, state="up")
        poll(
            lambda: p.instance not in proxy.instances(),
            "the engine without a heartbeat has left",
            limit=3 * EXPIRY,
        )
        # The other had to be heard again and again to be there still.
        assert proxy.instances()[d.instance]["last_ping_age"] < EXPIRY
        with heartbeat(proxy, told):
            proxy.wait_listed(p.instance, state="up")
            assert (
                proxy.request("POST", "/v1/completions", {"prompt": "a"}).status == 200
            )
        assert not proxy.refusals()


def test_the_connector_makes_of_the_legs_what_is_meant() -> None:
    pairs = [leg_pair(mode) for mode in ("READ", "WRITE")]
    recipe = Recipe("moriio")
    engines = [recipe.engine(role, "10.0.0.7") for role in ("prefill", "decode")]
    prefix, interval, *taken = take_in(
        [leg for pair in pairs for leg in pair],
        [engine.kv_transfer() for engine in engines],
    )
    assert interval == INTERVAL
    for of_p, of_d in (taken[:2], taken[2:4]):
        assert of_p["transfer_id"] == of_d["transfer_id"]
        assert of_p["transfer_id"].startswith(f"{prefix}-")
        assert channels(of_p) == ("10.0.0.2", 6303, 61007)
        assert channels(of_d) == ("fd00::1", 6301, 61005)
        assert (of_p["remote_dp_size"], of_p["tp_size"]) == (3, 1)
        assert (of_d["remote_dp_size"], of_d["tp_size"]) == (4, 2)
        assert of_d["remote_dp_rank"] == 0
    assert [each["remote_block_ids"] for each in taken[1:4:2]] == [[[5, 6]], None]
    assert taken[4:] == [["READ", "kv_producer"], ["READ", "kv_consumer"]]


def channels(taken: JSON) -> tuple[str, int, int]:
    """Where an engine reaches the other one."""
    names = "remote_host", "remote_handshake_port", "remote_notify_port"
    host, handshake, notify = (taken[name] for name in names)
    return host, handshake, notify


# What a scheduler sees of a leg: its own id, parameters, whether it is P's.
Leg = tuple[str, JSON, bool]


def leg_pair(mode: str) -> list[Leg]:
    """Both legs of a request to engines of several ranks, P's first."""
    with Fleet(mode=mode) as fleet:
        at_p = "host:fd00::1,handshake:6301,notify:61005"
        at_d = "host:10.0.0.2,handshake:6303,notify:61007"
        fleet.register(fleet.p[0], zmq_address=at_p, dp_size=4, tp_size=2)
        fleet.register(fleet.d[0], zmq_address=at_d, dp_size=3)
        handed = {"do_remote_prefill": True, "remote_block_ids": [[5, 6]]}
        fleet.p[0].answer(http_response(200, {"kv_transfer_params": handed}))
        assert fleet.post({"prompt": "a"}).status == 200
        return [leg(each.next_request(), each.role) for each in fleet.engines]


def leg(request: EngineRequest, role: str) -> Leg:
    """A leg with the id that vLLM makes of the request's."""
    params = request.json()["kv_transfer_params"]
    return f"cmpl-{request.header('x-request-id')}-0-12345678", params, role[0] == "p"


def take_in(legs: list[Leg], configs: list[JSON]) -> list[Any]:
    """What vLLM makes of them: constants, `add_new_req` of each leg, each mode."""
    done = subprocess.run(
        [sys.executable, "-c", TAKE_IN],
        input=json.dumps([legs, configs]),
        capture_output=True,
        text=True,
        check=True,
        timeout=IMPORT_TIMEOUT,
    )
    made: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return made
