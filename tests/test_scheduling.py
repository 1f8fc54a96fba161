# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`--scheduling-policy`: which instance a leg goes to."""

import asyncio
from collections import Counter

import pytest
from rig import Cluster

from disagg_proxy import (
    InstanceCycler,
    LeastLoadedSchedulingPolicy,
    Leg,
    Script,
    SessionSchedulingPolicy,
    State,
)

COMPLETIONS = "/v1/completions"
BODY = b'{"model":"m","prompt":"hi","max_tokens":4}'


def cycler(count: int) -> InstanceCycler:
    """A role with so many instances, all of them up."""
    instances = InstanceCycler("decode")
    for number in range(count):
        instances.add(f"10.0.0.{number}:80").mark(State.UP)
    return instances


def test_least_loaded_takes_the_fewest_requests_in_flight() -> None:
    instances, policy = cycler(3), LeastLoadedSchedulingPolicy()
    loop = asyncio.new_event_loop()
    for instance, load in zip(instances.instances, (2, 1, 3)):
        for _ in range(load):
            leg = Leg(Script(loop), instance, b"", b"", whole=True, raw=False)
            instance.legs.add(leg)
    loop.close()
    chosen = {policy.schedule(instances) for _ in range(6)}
    assert chosen == {instances.instances[1]}


def test_least_loaded_takes_turns_among_equals() -> None:
    instances, policy = cycler(3), LeastLoadedSchedulingPolicy()
    chosen = Counter(policy.schedule(instances) for _ in range(9))
    assert set(chosen.values()) == {3}


def test_a_session_moves_only_when_its_instance_goes() -> None:
    instances, policy = cycler(4), SessionSchedulingPolicy()

    def place() -> dict[bytes, str]:
        places = {}
        for number in range(400):
            instances.session = b"session-%d" % number
            places[instances.session] = str(policy.schedule(instances))
        return places

    before = place()
    assert min(Counter(before.values()).values()) > 60
    gone = instances.instances[2]
    gone.mark(State.DOWN, "test")
    after = place()
    moved = {session for session in before if before[session] != after[session]}
    assert moved == {session for session in before if before[session] == str(gone)}


@pytest.mark.parametrize("by", ["header", "member"])
def test_the_session_policy_keeps_a_session_on_its_instances(by: str) -> None:
    with Cluster(2, 2, args=["--scheduling-policy", "session"]) as cluster:
        for number in range(12):
            name = f"s{number % 3}"
            if by == "header":
                body, headers = BODY, {"X-Session-ID": name}
            else:
                body, headers = BODY[:-1] + b',"user":"%b"}' % name.encode(), {}
            assert cluster.post(COMPLETIONS, body, headers).status == 200
        for engines in (cluster.p, cluster.d):
            homes: dict[bytes, set[int]] = {}
            for index, engine in enumerate(engines):
                for request in engine.requests:
                    named = request.header("X-Session-ID")
                    key = named.encode() if named else request.members()["user"]
                    homes.setdefault(key, set()).add(index)
            assert len(homes) == 3
            assert all(len(home) == 1 for home in homes.values())


def test_an_empty_role_has_nothing_to_choose() -> None:
    with pytest.raises(StopIteration):
        LeastLoadedSchedulingPolicy().schedule(InstanceCycler("prefill"))
