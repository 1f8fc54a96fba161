# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The launch recipes of the README, without the real engine: see e2e/ for that."""

import pytest
import recipes
from kv_publisher import free_ports
from moriio_rig import MORIIO_PROXY, Proxy
from recipes import Recipe
from rig import COMPLETIONS, DISAGG_PROXY, ROOT
from sim_process import MODEL, SimProcess

import disagg_proxy

# What runs them as they stand.
RUN_BY = {
    "nixl": "e2e/test_nixl.py",
    "nixl-push": "e2e/test_pairs.py",
    "mooncake": "e2e/test_pairs.py",
    "example": "e2e/test_stores.py",
    "mooncake-store": "e2e/test_stores.py",
    "moriio": "test_recipes.py",
}
NOTHING_ELSE = {"--host", "--port", "--kv-transfer-config"}
HOST = "10.0.0.7"


def test_every_recipe_is_run_by_a_test() -> None:
    assert sorted(recipes.names()) == sorted(RUN_BY)
    for name, file in RUN_BY.items():
        text = (ROOT / "tests" / file).read_text()
        assert f'"{name}"' in text


@pytest.mark.parametrize("name", RUN_BY)
def test_the_engines_of_a_recipe_fit_together(name: str) -> None:
    recipe = Recipe(name)
    commands = {role: recipe.engine(role, HOST) for role in ("prefill", "decode")}
    configs = {role: each.kv_transfer() for role, each in commands.items()}
    of_p, of_d = configs["prefill"], configs["decode"]
    assert of_p["kv_connector"] == of_d["kv_connector"]
    assert of_p.get("kv_connector_extra_config", {}).keys() == (
        of_d.get("kv_connector_extra_config", {}).keys()
    )
    assert (of_p["kv_role"], of_d["kv_role"]) in {
        ("kv_producer", "kv_consumer"),
        ("kv_both", "kv_both"),
    }
    for command in commands.values():
        assert set(command.arguments[::2]) == NOTHING_ELSE
        assert command.option("--host") == HOST


@pytest.mark.parametrize("name", [name for name in RUN_BY if name != "moriio"])
def test_the_proxy_of_a_recipe_asks_its_engines(name: str) -> None:
    recipe = Recipe(name)
    script, *argv = recipe.proxy.arguments
    assert ROOT / script == DISAGG_PROXY
    args = disagg_proxy.argument_parser().parse_args(argv)
    proxy = disagg_proxy.ProxyServer(args).proxy_instance
    roles = {"prefill": proxy.prefill_instances, "decode": proxy.decode_instances}
    for role, instances in roles.items():
        port = recipe.engine(role, HOST).option("--port")
        assert instances
        assert {instance.address.rpartition(":")[2] for instance in instances} == {port}


# No machine without its hardware can run MoRIIO's engines.
@pytest.mark.parametrize("mode", ["READ", "WRITE"])
def test_the_moriio_recipe_serves_engines_that_register_as_it_says(mode: str) -> None:
    discovery, first = free_ports(), free_ports(2)
    reads = {"READ": "true", "WRITE": "false"}[mode]
    recipe = Recipe(
        "moriio",
        {
            "10001": "0",
            "36367": str(discovery),
            "8100": str(first),
            "8200": str(first + 1),
            '"read_mode": true': f'"read_mode": {reads}',
        },
    )
    script, *argv = recipe.proxy.arguments
    assert ROOT / script == MORIIO_PROXY
    engines = ["--connector", "moriio"]
    for role in ("prefill", "decode"):
        command = recipe.engine(role, HOST)
        told = command.kv_transfer()["kv_connector_extra_config"]
        assert str(told["http_port"]) == command.option("--port")
        engines += [f"--{role}", str(told["http_port"])]
    engines += ["--transfer-mode", "READ" if told["read_mode"] else "WRITE"]
    engines += ["--moriio-proxy", f"127.0.0.1:{told['proxy_ping_port']}"]
    with (
        Proxy(*argv) as proxy,
        SimProcess(*engines, prefill=0, decode=0) as sim,
    ):
        for each in sim.engines:
            proxy.wait_listed(each.instance, state="up", transfer_mode=mode)
        body = {"model": MODEL, "prompt": "hello there", "max_tokens": 5}
        answer = proxy.request("POST", COMPLETIONS, body)
        alone = sim.d[0].post(body)
        assert answer.json()["choices"] == alone.json()["choices"]
        assert sim.p[0].stats()["handovers"]["used"] == 1
        assert [each.stats()["bad_handovers"] for each in sim.engines] == [0, 0]
