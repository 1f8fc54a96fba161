# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which paths reach an engine: control is closed, doubtful spellings refused."""

from collections.abc import Iterator

import pytest
from rig import COMPLETIONS, Cluster, http_response
from wire import assert_nobody_was_asked

# vLLM 0.33.0's routes that change an engine rather than use it.
CONTROL = [
    *["/sleep", "/wake_up", "/pause", "/resume", "/abort_requests", "/collective_rpc"],
    *["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"],
    *["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/release_kv_cache_memory"],
    *["/start_profile", "/stop_profile", "/inference/v1/abort_requests"],
    *["/scale_elastic_ep", "/is_scaling_elastic_ep", "/weight_checker"],
    *["/init_weight_transfer_engine", "/start_weight_update", "/update_weights"],
    *["/finish_weight_update", "/fault_tolerance/apply", "/fault_tolerance/status"],
]
SPELLED = ["/%73leep", "/sleep/", "/sleep?level=2", "/v1/%6Coad_lora_adapter"]
DOUBTFUL = [
    *["//sleep", "/v1//models", "/./sleep", "/v1/../sleep", "/v1/%2e%2e/sleep"],
    *["/v1%2fload_lora_adapter", "/v1%2Fmodels", "/v1\\models", "/v1%5cmodels"],
    *["/sleep%00", "/v1/models%0d%0a"],
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.mark.parametrize("path", [*CONTROL, *SPELLED])
def test_engine_control_is_closed_to_clients(pair: Cluster, path: str) -> None:
    for method in ("POST", "GET"):
        response = pair.request(method, path)
        assert (response.status, response.error()["code"]) == (403, 403)
    assert_nobody_was_asked(pair)


@pytest.mark.parametrize("path", DOUBTFUL)
def test_a_path_that_engines_may_read_otherwise_is_400(
    pair: Cluster, path: str
) -> None:
    response = pair.request("POST", path)
    assert (response.status, response.error()["code"]) == (400, 400)
    assert_nobody_was_asked(pair)


def test_engine_control_can_be_opened() -> None:
    with Cluster(args=["--allow-engine-control"]) as cluster:
        for path in CONTROL:
            cluster.d[0].answer(http_response(200, {"from": path}))
            response = cluster.request("POST", path, {"level": 1})
            assert (response.status, response.json()) == (200, {"from": path})
            asked = cluster.d[0].next_request()
            assert (asked.target, asked.json()) == (path, {"level": 1})
        assert cluster.p[0].requests == []
        assert cluster.post(COMPLETIONS, {"prompt": "a"}).status == 200
