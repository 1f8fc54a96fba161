# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whole client connections of valid, spoilt and random bytes against the proxy.

Whatever a client sends: each request that h11 reads in it is answered, and only with
what README.md says; no engine gets anything else; the connection ends; a client
beside it is served; afterwards the proxy is as it was at rest.
"""

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Sequence

import pytest
from fuzzing import examples
from hypothesis import given
from hypothesis import strategies as st
from rig import (
    CHAT,
    COMPLETIONS,
    LAST_CHUNK,
    SSE_HEAD,
    Cluster,
    EngineRequest,
    RawClient,
    Step,
    chunk,
    event,
    gather,
    hand_over,
    http_request,
    http_response,
    poll,
)
from test_fuzz_json import BODIES, their_members
from test_fuzz_json import spoilt as spoilt_body
from test_oracle import (
    CRLF,
    NOT_FORWARDED,
    REQUEST_DISAGREEMENTS,
    TEXTS,
    Reading,
    cut,
    end_to_end,
    explanations,
    framed,
    lower,
    other_fields,
    our_request,
    requests,
    spoilt,
    their_request,
    their_response,
)
from wire import Pace

from disagg_proxy import words

# What README.md says of requests that reach no engine, and of the admin routes.
REFUSALS = {400, 401, 403, 405, 408, 413, 414, 415, 417, 431, 501}
ADMIN_REFUSALS = {422, 500}
# Bytes by which the same connections may differ in what they leave behind.
MAX_GROWTH = 1 << 20

# --- What clients send ----------------------------------------------------------------

ROUTES = [
    *[COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", COMPLETIONS, CHAT],
    *["/v1/models", "/health", "/status", "/metrics"],
    *["/v1/embeddings", "/instances/add", "/instances/remove", "/sleep", "/pause/"],
    *["/v1/completions?a=b", "/v1//completions", "/%761/completions", "/a/../b", "/%"],
]
GARBAGE = st.binary(max_size=60) | st.sampled_from(
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # The start of TLS.
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\r\n",
        b"\x00" * 5000,
        b"\r\n" * 3000,
        b"x" * 70_000,
        b"GET /" + b"a" * 70_000,
        b"POST / HTTP/1.1\r\n" + b"a: b\r\n" * 12_000,
    ]
)


@st.composite
def posts(draw: st.DrawFn) -> bytes:
    """Requests to the routes there are, with a body that is JSON or nearly so."""
    method = draw(st.sampled_from([b"POST"] * 5 + [b"GET", b"HEAD", b"PUT"]))
    coding = draw(st.sampled_from(["length"] * 4 + ["chunked"] * 2 + ["none"]))
    body = b"" if coding == "none" else draw(BODIES | BODIES | spoilt_body(BODIES))
    fields, sent = framed(draw, body, coding)
    kind = draw(st.sampled_from([b"application/json"] * 4 + [b"a/b", b""]))
    fields += [b"Host: a", b"Content-Type: " + kind]
    others = other_fields(draw, "request")
    fields += [each for each in others if not each.startswith(b"Content-Type")]
    line = b"%b %b HTTP/1.1" % (method, draw(st.sampled_from(ROUTES)).encode())
    return CRLF.join([line, *fields, b"", b""]) + sent


VALID = posts() | requests(TEXTS)
MESSAGES = VALID | VALID | spoilt(VALID) | GARBAGE
CONNECTIONS = st.lists(MESSAGES, min_size=1, max_size=4).map(b"".join)
CUTS = st.lists(st.integers(0, 600), max_size=4)


# --- What the engines answer ----------------------------------------------------------


def any_hand_over(request: EngineRequest) -> list[Step]:
    return [http_response(200, {"kv_transfer_params": hand_over(request)})]


def any_answer(request: EngineRequest) -> list[Step]:
    """A stream for a POST, else something short; nothing behind the head of a HEAD."""
    if request.line.startswith(b"POST "):
        return [SSE_HEAD, chunk(event("a")), chunk(event("[DONE]")), LAST_CHUNK]
    return [http_response(200, b"" if request.line.startswith(b"HEAD ") else b"{}")]


@contextlib.contextmanager
def undemanding(limits: dict[str, float], *args: str) -> Iterator[Cluster]:
    """1P1D; the engines answer whatever they get with a 200."""
    with Cluster(limits=limits, args=args) as cluster:
        cluster.p[0].default, cluster.d[0].default = any_hand_over, any_answer
        yield cluster


class Crowd:
    """A proxy, and what clients have sent it so far."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.sent: list[bytes] = []
        self.at_rest = cluster.proxy.open_sockets()

    def legs(self) -> list[EngineRequest]:
        """The requests that have reached an engine since the last call."""
        found = [leg for each in self.cluster.engines for leg in each.requests]
        for each in self.cluster.engines:
            each.check()
            each.requests.clear()
        return found


@pytest.fixture(scope="module")
def crowd() -> Iterator[Crowd]:
    limits = {"ENGINE_IDLE_TIMEOUT": 0.1, "TICK": 0.05}
    with undemanding(limits) as cluster:
        yield Crowd(cluster)


# --- What may become of it ------------------------------------------------------------


def readings(data: bytes) -> Iterator[Reading]:
    """The requests that h11 reads on a connection, until it reads no more."""
    while True:
        ours, theirs = our_request(data), their_request(data)
        reading = theirs
        if explanations(REQUEST_DISAGREEMENTS, data, ours, theirs):
            reading = ours
        if reading is None:
            return
        yield reading
        data = reading.rest


CLOSE = b"\r\nConnection: close\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def last_answer(received: bytes) -> Reading | None:
    """An answer to what is no request; it may have begun as a HEAD."""
    received = received.removeprefix(CONTINUE)
    return their_response(received) or their_response(received, to_head=True)


class Talk:
    """One connection: what was sent on it, and what came back."""

    def __init__(self, client: RawClient, pace: Pace, data: bytes) -> None:
        self.client, self.pace = client, pace
        self.requests = list(readings(data))
        self.received = b""
        self.answers: list[Reading] = []

    def listen(self) -> None:
        """Waits for the answer to each request, then for the end."""
        for request in self.requests:
            to_head = request.start[0] == b"HEAD"
            answer, is_last = self._answer(to_head)
            self.answers.append(answer)
            self.received = answer.rest
            if is_last:
                return
        # What is behind the last request has been read by then, and refused if it was
        # not the start of another.
        self.pace.wait()
        self.client.half_close()
        self.received += self.client.wait_closed()

    def _answer(self, to_head: bool) -> tuple[Reading, bool]:
        """An answer, and whether the connection has ended with it."""
        while (answer := their_response(self.received, to_head)) is None:
            received = self.client.read_some()
            assert received, ("an answer is missing, or cut", self.received)
            self.received += received
        if CLOSE not in self.received.removesuffix(answer.rest):
            return answer, False
        self.received += self.client.wait_closed()
        whole = their_response(self.received, to_head)
        assert whole is not None
        return whole, True

    def judge(self) -> None:
        """Fails where an answer is not what README.md says."""
        for answer in self.answers:
            assert_documented(answer)
        refusal = last_answer(self.received)
        if refusal is None:
            assert self.received in (b"", CONTINUE)
            return
        assert_documented(refusal)
        assert int(refusal.start[0]) >= 400
        assert not refusal.keep_alive
        assert not refusal.rest


def assert_documented(answer: Reading) -> None:
    """Fails if it is neither an engine's 200 nor an error object with its status."""
    status = int(answer.start[0])
    if status == 200:
        return
    assert status in REFUSALS | ADMIN_REFUSALS, answer
    if not answer.body:
        return  # It answers a HEAD.
    told = json.loads(answer.body)
    if status in ADMIN_REFUSALS:
        assert set(told) == {"detail"}
    elif told.get("type") == "error":  # Anthropic's, for its messages.
        assert set(told) == {"type", "error"}
        assert set(told["error"]) == {"message", "type"}
    else:
        assert set(told) == {"error"}
        assert set(told["error"]) == {"message", "type", "param", "code"}
        assert told["error"]["code"] == status


PARAMETERS = {"kv_transfer_params", "ec_transfer_params"}
CHANGED = PARAMETERS | words(
    "stream max_tokens max_completion_tokens max_output_tokens store n best_of echo "
    "logprobs top_logprobs prompt_logprobs min_tokens stop stream_options"
)


def content(body: bytes, changed: set[str]) -> object:
    """What a body says, but for the members that a leg may have otherwise."""
    members = their_members(body)
    if members is None:
        return body
    return {name: value for name, value in members.items() if name not in changed}


def assert_asked_for(legs: Iterable[EngineRequest], asked: Sequence[Reading]) -> None:
    """Fails if a leg says anything that no request of the client has said."""
    for leg in legs:
        changed = CHANGED if leg.engine.role == "prefill" else PARAMETERS
        said = tuple(leg.line.split(b" ")[:2]), content(leg.body, changed)
        assert said in [(each.start, content(each.body, changed)) for each in asked]
        fields = end_to_end(lower(leg.headers), NOT_FORWARDED)
        assert fields in [each.fields for each in asked]


ONE_REQUEST = http_request("POST", COMPLETIONS, {"prompt": "a"})


@examples(80)
@given(CONNECTIONS, CUTS)
def test_a_connection_gets_documented_answers_and_harms_nobody(
    crowd: Crowd, data: bytes, cuts: list[int]
) -> None:
    crowd.sent.append(data)
    crowd.legs()
    connect = crowd.cluster.connect
    with connect() as client, connect() as innocent, Pace(crowd.cluster) as pace:
        innocent.send(ONE_REQUEST[:50])
        talk = Talk(client, pace, data)
        with contextlib.suppress(ConnectionError):
            pace.send(client, filter(None, cut(data, cuts)))
        talk.listen()
        talk.judge()
        assert_asked_for(crowd.legs(), talk.requests)
        innocent.send(ONE_REQUEST[50:])
        assert innocent.reader().finish().status == 200


def test_the_same_connections_again_leave_nothing_behind(crowd: Crowd) -> None:
    def again() -> int:
        for data in crowd.sent:
            with crowd.cluster.connect() as client:
                with contextlib.suppress(ConnectionError):
                    client.send(data)
                    client.half_close()
                client.wait_closed()
        proxy.wait_idle()
        poll(lambda: proxy.open_sockets() <= crowd.at_rest, "all is as at rest")
        crowd.legs()
        return proxy.resident_bytes()

    proxy = crowd.cluster.proxy
    crowd.sent = crowd.sent[-1000:]
    before = again()
    assert again() - before < MAX_GROWTH


# --- Keys -----------------------------------------------------------------------------

KEY = b"sesame"
AUTHORIZATION = st.sampled_from(
    [
        *[b"Authorization: Bearer sesame"] * 3,
        *[b"authorization:  bearer sesame ", b"Authorization: Bearer sesame2"],
        *[
            b"Authorization: Bearer",
            b"Authorization: Basic sesame",
            b"X: Bearer sesame",
        ],
        *[
            b"Authorization: Bearer sesame\r\nAuthorization: a",
            b"Authorization : sesame",
        ],
        *[b"Proxy-Authorization: Bearer sesame", b"Authorization: Bearer\tsesame"],
    ]
)


@st.composite
def with_a_key(draw: st.DrawFn) -> bytes:
    """A request with something like a key in it."""
    line, _, rest = draw(VALID).partition(CRLF)
    return CRLF.join([line, draw(AUTHORIZATION), rest])


KEYED = with_a_key() | with_a_key() | spoilt(with_a_key()) | VALID


@pytest.fixture(scope="module")
def guarded() -> Iterator[Crowd]:
    with undemanding({}, "--api-key", KEY.decode()) as cluster:
        yield Crowd(cluster)


@examples(50)
@given(st.lists(KEYED, min_size=1, max_size=3).map(b"".join), CUTS)
def test_without_the_key_nothing_reaches_an_engine_and_the_key_never_does(
    guarded: Crowd, data: bytes, cuts: list[int]
) -> None:
    guarded.legs()
    with guarded.cluster.connect() as client, Pace(guarded.cluster) as pace:
        talk = Talk(client, pace, data)
        with contextlib.suppress(ConnectionError):
            pace.send(client, filter(None, cut(data, cuts)))
        talk.listen()
        talk.judge()
    known = [
        each
        for each in talk.requests
        if each.read.get(b"authorization", b"").split()
        in ([b"Bearer", KEY], [b"bearer", KEY])
    ]
    legs = guarded.legs()
    assert_asked_for(legs, known)
    assert not any(value.endswith(KEY) for leg in legs for _, value in leg.headers)


# --- Clients that do nothing more -----------------------------------------------------

# Seconds after which a client is no longer waited for.
PATIENCE = dict.fromkeys(
    ["HEAD_TIMEOUT", "BODY_STALL_TIMEOUT", "KEEP_ALIVE_TIMEOUT", "LINGER_TIMEOUT"], 0.2
)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Cluster]:
    with undemanding(PATIENCE | {"TICK": 0.02}) as cluster:
        yield cluster


@examples(6)
@given(st.lists(st.tuples(CONNECTIONS, CUTS), min_size=8, max_size=8))
def test_a_connection_ends_though_its_client_does_nothing_more(
    impatient: Cluster, talks: list[tuple[bytes, list[int]]]
) -> None:
    def talk(data: bytes, cuts: list[int]) -> bytes:
        with impatient.connect() as client:
            with contextlib.suppress(ConnectionError):
                client.send(*filter(None, cut(data, cuts)))
            return client.wait_closed()

    for received in gather(functools.partial(talk, *each) for each in talks):
        assert received == b"" or received.startswith(b"HTTP/1.1 "), received
    impatient.settle()
    impatient.p[0].default, impatient.d[0].default = any_hand_over, any_answer
