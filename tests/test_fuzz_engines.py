# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Spoilt answers of engines: hand-overs, heads, framing, streams.

Whatever P says, D gets a hand-over that it can live with, or none, or no request;
whatever D says, the client sees just that, or an error, or an answer that is cut.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fuzzing import examples
from hypothesis import example, given
from hypothesis import strategies as st
from rig import (
    COMPLETIONS,
    JSON,
    Close,
    Cluster,
    End,
    ScriptedEngine,
    dumps,
    event,
    poll,
)
from test_fuzz_json import spoilt as spoilt_json
from test_oracle import (
    CRLF,
    CUTS,
    RESPONSE_DISAGREEMENTS,
    Reading,
    cut,
    explanations,
    framed,
    other_fields,
    our_response,
    spoilt,
    their_response,
)

from disagg_proxy import (
    AutoConnector,
    Instance,
    InstanceCycler,
    ProxyError,
    hand_over,
)
from moriio_proxy import read_params

# --- Hand-overs -----------------------------------------------------------------------

USABLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2], [3]],
    "remote_engine_id": "engine",
    "remote_request_id": "cmpl-1-0-1",
    "remote_host": "10.0.0.9",
    "remote_port": 5600,
    "tp_size": 1,
    "transfer_mode": "pull",
}
# What a member may turn into.
ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2)
    | st.sampled_from(["", "x", "5600", "127.0.0.1", "0.0.0.0", "\ud83d"]),
    lambda v: st.lists(v, max_size=2) | st.dictionaries(st.just("a"), v, max_size=1),
    max_leaves=3,
)


@st.composite
def hand_overs(draw: st.DrawFn) -> Any:
    """What stands in `kv_transfer_params`: usable, or less so."""
    params: dict[str, Any] = dict(USABLE)
    for name in draw(st.lists(st.sampled_from(sorted(USABLE)), max_size=2)):
        if draw(st.booleans()):
            params.pop(name, None)
        else:
            params[name] = draw(ODD)
    return draw(st.sampled_from([params] * 9 + [None])) or draw(ODD)


WHOLE_ANSWERS = st.builds(
    lambda params, text: dumps({"text": text, "kv_transfer_params": params}),
    hand_overs(),
    st.sampled_from(["a", "é", "\ud83d"]),
)
ANSWERS = WHOLE_ANSWERS | WHOLE_ANSWERS | spoilt_json(WHOLE_ANSWERS)


def block_ids(value: Any) -> list[int]:
    """The block ids of a list of groups, or of one group; [] if it is no such list."""
    groups = value if isinstance(value, list) else []
    ids = [
        i for group in groups for i in (group if isinstance(group, list) else [group])
    ]
    return ids if all(type(i) is int for i in ids) else []


def is_usable(params: Any) -> bool:
    """Whether D survives it: vLLM 0.33.0, `nixl/pull_scheduler.py`."""
    return (
        isinstance(params, dict)
        and bool(block_ids(params.get("remote_block_ids")))
        and all(params.get(name) for name in ("remote_engine_id", "remote_request_id"))
        and params.get("remote_port") not in (None, "")
        and isinstance(params.get("remote_host"), str)
        and params["remote_host"] != ""
    )


def claims(params: Any) -> bool:
    return isinstance(params, dict) and params.get("do_remote_prefill") is True


PREFILL = Instance("10.0.0.1:8100", InstanceCycler("prefill"))


@examples(300)
@given(ANSWERS)
@example(dumps({"kv_transfer_params": USABLE | {"remote_host": "\ud83d"}}))
@example(dumps({"kv_transfer_params": USABLE | {"remote_block_ids": [[None]]}}))
def test_decode_gets_a_usable_hand_over_or_none(answer: bytes) -> None:
    try:
        params = hand_over(AutoConnector().decode_params, PREFILL, answer)
    except ProxyError as err:
        assert err.status == 502
        return
    given_params = json.loads(answer).get("kv_transfer_params")
    if params is None:
        assert not claims(given_params)
        return
    passed_on = json.loads(bytes(params))
    assert claims(passed_on)
    assert is_usable(passed_on), passed_on
    assert passed_on["remote_host"] in (given_params.get("remote_host"), PREFILL.host)
    assert passed_on | {"remote_host": 0} == given_params | {"remote_host": 0}


@examples(200)
@given(ANSWERS)
def test_moriio_decode_gets_the_blocks_or_no_parameters(answer: bytes) -> None:
    about = {"do_remote_prefill": True, "transfer_id": "tx-1", "remote_block_ids": None}
    try:
        read = functools.partial(read_params, dict(about))
        params = hand_over(read, PREFILL, answer)
    except ProxyError as err:
        assert err.status == 502
        return
    if params is not None:
        passed_on = json.loads(bytes(params))
        assert block_ids(passed_on["remote_block_ids"])
        assert passed_on["transfer_id"] == about["transfer_id"]
        assert passed_on["do_remote_prefill"] is True


# --- Answers on the wire --------------------------------------------------------------


@st.composite
def prefill_answers(draw: st.DrawFn) -> bytes:
    """P's answers in every framing; most of them successes."""
    status = draw(st.sampled_from([200] * 8 + [204, 206, 302, 400, 503]))
    coding = draw(st.sampled_from(["length", "chunked", "close"]))
    fields, sent = framed(draw, draw(ANSWERS), coding)
    fields = draw(st.permutations([*fields, *other_fields(draw, "response")]))
    head = CRLF.join([b"HTTP/1.1 %d X" % status, *fields, b"", b""])
    return head if status == 204 else head + sent


EVENTS = st.lists(
    st.sampled_from(
        [
            event({"choices": [{"text": "é"}]}),
            event({"error": {"message": "x", "code": 500}}),
            event("[DONE]"),
            b": comment\n\n",
            b"data: {",
            b"\n",
        ]
    ),
    max_size=4,
).map(b"".join)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """D's answers to a request for a stream."""
    coding = draw(st.sampled_from(["chunked", "chunked", "close", "length"]))
    fields, sent = framed(draw, draw(EVENTS), coding)
    fields = draw(st.permutations([*fields, *other_fields(draw, "response")]))
    head = [b"HTTP/1.1 200 OK", b"Content-Type: text/event-stream", *fields]
    return CRLF.join([*head, b"", b""]) + sent


def reading_of(data: bytes) -> Reading | None:
    """An answer with which the connection ends, as h11 reads it."""
    ours, theirs = our_response(data), their_response(data)
    differ = explanations(RESPONSE_DISAGREEMENTS, data, ours, theirs)
    return ours if differ else theirs


def play(
    cluster: Cluster, engine: ScriptedEngine, data: bytes, cuts: list[int]
) -> None:
    """Has an engine answer with just these bytes, and close.

    Returns once the proxy has seen the end of the last example's connection.
    """
    engine.forget()
    engine.answer(*filter(None, cut(data, cuts)), Close.FIN)
    engine.wait_connections(0)
    cluster.proxy.wait_all_up()


LIMITS = {"ENGINE_IDLE_TIMEOUT": 0.1, "TICK": 0.05}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(limits=LIMITS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pushing() -> Iterator[Cluster]:
    """The legs run side by side."""
    args = ["--kv-connector", "nixl-push"]
    args += ["--prefill-engine-id", "e", "--prefill-kv-host", "127.0.0.1"]
    with Cluster(limits=LIMITS, args=args) as cluster:
        yield cluster


ASKED: JSON = {"prompt": "a", "stream": True}


@examples(60)
@given(prefill_answers() | spoilt(prefill_answers()), CUTS)
def test_a_spoilt_prefill_answer_never_harms_decode(
    cluster: Cluster, data: bytes, cuts: list[int]
) -> None:
    [p], [d] = cluster.p, cluster.d
    play(cluster, p, data, cuts)
    response = cluster.post(COMPLETIONS, ASKED)
    p.next_request()
    reading = reading_of(data)
    assert response.end is End.COMPLETE or reading is None
    status = int(reading.start[0]) if reading else 0
    if response.status == 200:
        assert status == 200
        leg = d.next_request()
        params = leg.json().pop("kv_transfer_params", {})
        assert not claims(params) or is_usable(params)
    elif response.status == 502:
        assert response.error()["code"] == 502
    else:
        assert response.status >= 400
        assert status in (response.status, 0)
    assert not d.requests[1:]
    cluster.settle()


@examples(60)
@given(streams() | spoilt(streams()), CUTS)
def test_a_spoilt_stream_is_passed_on_or_cut(
    cluster: Cluster, data: bytes, cuts: list[int]
) -> None:
    play(cluster, cluster.d[0], data, cuts)
    response = cluster.post(COMPLETIONS, ASKED)
    reading = reading_of(data)
    if reading is None:
        assert response.status == 502 or response.end is End.INCOMPLETE
    else:
        assert response.end is End.COMPLETE
        assert (b"%d" % response.status, response.body) == (
            reading.start[0],
            reading.body,
        )
    cluster.settle()


@examples(40)
@given(
    prefill_answers() | spoilt(prefill_answers()), streams() | spoilt(streams()), CUTS
)
def test_spoilt_answers_of_both_legs_side_by_side(
    pushing: Cluster, p_data: bytes, d_data: bytes, cuts: list[int]
) -> None:
    play(pushing, pushing.p[0], p_data, cuts)
    play(pushing, pushing.d[0], d_data, cuts)
    response = pushing.post(COMPLETIONS, ASKED)
    p_reading, reading = reading_of(p_data), reading_of(d_data)
    if response.status == 200 and response.end is End.COMPLETE:
        assert reading is not None
        assert response.body == reading.body
        assert p_reading is None or p_reading.start[0] == b"200"
    elif response.status not in (0, 200, 502):
        said = {each.start[0] for each in (p_reading, reading) if each is not None}
        assert b"%d" % response.status in said or None in (p_reading, reading)
    pushing.settle()


@pytest.mark.parametrize("name", ["cluster", "pushing"])
def test_spoilt_answers_leave_nothing_behind(
    request: pytest.FixtureRequest, name: str
) -> None:
    cluster: Cluster = request.getfixturevalue(name)
    proxy = cluster.proxy
    assert cluster.post(COMPLETIONS, ASKED).status == 200
    # The listening socket, and perhaps a probe's connection to each engine.
    poll(lambda: proxy.open_sockets() <= 3, "engine connections are closed")
