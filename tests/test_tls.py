# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""TLS for clients: what is agreed on, streams, ends of connections, the start."""

import contextlib
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from moriio_rig import MORIIO_PROXY, Fleet
from rig import (
    COMPLETIONS,
    DONE,
    HANG_GUARD,
    JSON,
    LAST_CHUNK,
    MODEL,
    SSE_HEAD,
    Close,
    Cluster,
    End,
    Gate,
    RawClient,
    chunk,
    event,
    http_request,
    http_response,
    openai_error,
    poll,
    run_to_exit,
)
from tls import Tls

BODY: JSON = {"prompt": "a", "messages": []}
STREAM: JSON = BODY | {"stream": True}
QUICK = {"TICK": 0.02}
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def _secured(tls: Tls) -> Iterator[Cluster]:
    with Cluster(args=[*tls.args, "--max-body-size", "4000000"], trust=tls.trust) as it:
        yield it


@pytest.fixture
def secured(_secured: Cluster) -> Iterator[Cluster]:
    """1P1D and a proxy that speaks TLS, shared by the module."""
    yield _secured
    _secured.settle()


def plain(cluster: Cluster) -> RawClient:
    """A connection without TLS to a proxy that wants it."""
    return RawClient(cluster.proxy.address)


# --- What is agreed on ----------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_1_2_and_1_3_are_spoken(
    secured: Cluster, tls: Tls, version: ssl.TLSVersion
) -> None:
    trust = tls.client()
    trust.minimum_version = trust.maximum_version = version
    trust.set_alpn_protocols(["h2", "http/1.1"])
    with RawClient(secured.proxy.address, trust=trust) as client:
        assert isinstance(client.socket, ssl.SSLSocket)
        assert client.socket.version() == version.name.replace("_", ".")
        assert client.socket.selected_alpn_protocol() == "http/1.1"
        assert client.post(COMPLETIONS, BODY).finish().status == 200


def test_tls_1_1_is_refused(secured: Cluster, tls: Tls) -> None:
    # With the ciphers of today the client itself would not speak it. That it is the
    # proxy that ends it shows in the error.
    trust = tls.client()
    trust.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        trust.minimum_version = trust.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match="UNEXPECTED_EOF|ALERT_PROTOCOL"):
        RawClient(secured.proxy.address, trust=trust)


def test_the_certificate_and_its_key_may_be_one_file(tls: Tls) -> None:
    args = ["--ssl-certfile", str(tls.both)]
    with Cluster(args=args, trust=tls.trust) as cluster:
        assert cluster.post(COMPLETIONS, BODY).status == 200


def test_moriio_speaks_it_too(tls: Tls) -> None:
    with Fleet(argv=tls.args, trust=tls.trust) as fleet:
        assert fleet.post(BODY).status == 200


# --- Requests and answers -------------------------------------------------------------


def test_each_event_arrives_before_the_next_exists(secured: Cluster) -> None:
    gates = [Gate() for _ in range(5)]
    steps = [step for gate in gates for step in (chunk(event("x")), gate)]
    secured.d[0].answer(SSE_HEAD, *steps, chunk(DONE), LAST_CHUNK)
    with secured.connect() as client:
        reader = client.post(COMPLETIONS, STREAM)
        for number, gate in enumerate(gates):
            reader.body_until(event("x") * (number + 1))
            gate.release()
        response = reader.finish()
        assert response.end is End.COMPLETE
        assert response.body == event("x") * 5 + DONE
        # The connection is kept.
        assert client.post(COMPLETIONS, BODY).finish().status == 200


def test_large_bodies_arrive_as_they_are(secured: Cluster) -> None:
    prompt = "".join(map(chr, range(32, 127))).replace('"', "").replace("\\", "")
    body = BODY | {"prompt": prompt * 40_000}
    answer = prompt.encode() * 90_000
    secured.d[0].answer(http_response(200, answer))
    response = secured.post(COMPLETIONS, body)
    assert response.body == answer
    for engine in secured.engines:
        assert engine.next_request().json()["prompt"] == body["prompt"]


def test_requests_may_be_pipelined(secured: Cluster) -> None:
    with secured.connect() as client:
        client.send(http_request("POST", COMPLETIONS, BODY) * 20)
        for _ in range(20):
            assert client.reader().finish().status == 200


def test_the_openai_client_speaks_https(secured: Cluster, tls: Tls) -> None:
    host, port = secured.proxy.address
    with openai.OpenAI(
        api_key="k",
        base_url=f"https://{host}:{port}/v1",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(verify=tls.trust),
    ) as client:
        assert [each.id for each in client.models.list()] == secured.d[0].models
        tokens = client.completions.create(model=MODEL, prompt="a", stream=True)
        assert [each.choices[0].text for each in tokens] == ["one", " two", " three"]
        error = openai_error(400, "prompt too long")
        secured.p[0].answer(http_response(400, error))
        with pytest.raises(openai.BadRequestError, match="prompt too long"):
            client.completions.create(model=MODEL, prompt="a", stream=True)


# --- Ends -----------------------------------------------------------------------------


def streaming(cluster: Cluster, client: RawClient) -> None:
    """Has a client receive the first event of an answer that does not end."""
    cluster.d[0].answer(SSE_HEAD, chunk(event("1")), Gate())
    client.post(COMPLETIONS, STREAM).body_until(event("1"))


def end_without_goodbye(client: RawClient) -> None:
    """FIN, but no end of TLS before it."""
    client.socket.shutdown(socket.SHUT_WR)


def garble(client: RawClient) -> None:
    """Bytes that are not TLS, within it."""
    with socket.socket(fileno=os.dup(client.socket.fileno())) as under:
        under.sendall(b"garbage" * 100)


WAYS_TO_LEAVE = [
    RawClient.half_close,
    end_without_goodbye,
    garble,
    RawClient.close,
    RawClient.reset,
]


@pytest.mark.parametrize("leave", WAYS_TO_LEAVE)
def test_a_client_that_leaves_aborts_its_request(
    secured: Cluster, leave: Callable[[RawClient], None]
) -> None:
    with secured.connect() as client:
        streaming(secured, client)
        leave(client)
        secured.d[0].requests[-1].wait_abandoned()


@pytest.mark.parametrize("case", ["too large", "wrong type", "length unknown"])
def test_a_refused_upload_sees_why(secured: Cluster, case: str) -> None:
    size = 3 * MEBIBYTE if case == "wrong type" else 8 * MEBIBYTE
    headers = {"Content-Type": "application/json", "Content-Length": str(size)}
    piece = b" " * MEBIBYTE
    if case == "wrong type":
        headers |= {"Content-Type": "text/plain"}
    if case == "length unknown":
        del headers["Content-Length"]
        headers["Transfer-Encoding"] = "chunked"
        piece = chunk(piece)
    with secured.connect() as client:
        client.send(http_request("POST", COMPLETIONS, headers=headers))
        for _ in range(size // MEBIBYTE):
            client.send(piece)
        response = client.reader().finish()
    assert response.status == (415 if case == "wrong type" else 413)
    assert response.header("connection") == "close"
    assert response.error()
    assert secured.p[0].requests == []


@pytest.mark.parametrize("close", Close)
def test_an_answer_cut_short_is_never_ended(secured: Cluster, close: Close) -> None:
    secured.d[0].answer(SSE_HEAD, chunk(event("1")), close)
    response = secured.post(COMPLETIONS, STREAM)
    assert response.end is End.INCOMPLETE
    assert response.body in (event("1"), b"")


def to_the_end(cluster: Cluster, tls: Tls, request: bytes, gate: Gate) -> bytes:
    """All that comes; fails where the connection ends before the end of TLS."""
    connection = socket.create_connection(cluster.proxy.address, HANG_GUARD)
    host = cluster.proxy.address[0]
    with tls.trust.wrap_socket(
        connection, server_hostname=host, suppress_ragged_eofs=False
    ) as client:
        client.sendall(request)
        received = client.recv(1 << 16)
        gate.release()
        while data := client.recv(1 << 16):
            received += data
    return received


def test_a_connection_to_be_closed_ends_with_the_end_of_tls(
    secured: Cluster, tls: Tls
) -> None:
    request = http_request("POST", COMPLETIONS, BODY, {"Connection": "close"})
    assert to_the_end(secured, tls, request, Gate()).startswith(b"HTTP/1.1 200 ")


def test_an_old_clients_answer_cut_short_has_no_end_of_tls(
    secured: Cluster, tls: Tls
) -> None:
    # Its reset is shown as one of these, depending on OpenSSL.
    lost = (ConnectionResetError, ssl.SSLEOFError)
    request = http_request("POST", COMPLETIONS, STREAM)
    request = request.replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    gate = Gate()
    secured.d[0].answer(SSE_HEAD, chunk(event("1")), gate, Close.RST)
    with pytest.raises(lost):
        to_the_end(secured, tls, request, gate)


def test_running_answers_end_before_the_proxy_does(tls: Tls) -> None:
    gate = Gate()
    with Cluster(args=tls.args, trust=tls.trust) as cluster:
        cluster.d[0].answer(SSE_HEAD, chunk(event("1")), gate, chunk(DONE), LAST_CHUNK)
        with contextlib.ExitStack() as stack:
            client, *idle = (stack.enter_context(cluster.connect()) for _ in range(5))
            reader = client.post(COMPLETIONS, STREAM)
            reader.body_until(event("1"))
            cluster.proxy.signal(signal.SIGTERM)
            # Those that wait for nothing say nothing, and hold nobody up.
            assert all(each.wait_closed() == b"" for each in idle)
            with pytest.raises(ConnectionRefusedError):
                plain(cluster)
            gate.release()
            response = reader.finish()
            assert response.end is End.COMPLETE
            assert response.body == event("1") + DONE
        assert cluster.proxy.wait_exit() == 0


def test_an_answer_that_does_not_end_is_cut_in_time(tls: Tls) -> None:
    args = [*tls.args, "--drain-timeout", "0.2"]
    with Cluster(args=args, trust=tls.trust) as cluster, cluster.connect() as client:
        cluster.d[0].answer(SSE_HEAD, chunk(event("1")), Gate())
        reader = client.post(COMPLETIONS, STREAM)
        reader.body_until(event("1"))
        cluster.proxy.signal(signal.SIGTERM)
        assert reader.finish().end is End.INCOMPLETE
        cluster.d[0].requests[-1].wait_abandoned()
        assert cluster.proxy.wait_exit() == 0


def test_clients_that_never_say_goodbye_do_not_delay_the_end(tls: Tls) -> None:
    limits = QUICK | {"GOODBYE_TIMEOUT": 0.1}
    with (
        Cluster(args=tls.args, trust=tls.trust, limits=limits) as cluster,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(5):
            client = stack.enter_context(cluster.connect())
            assert client.post(COMPLETIONS, BODY).finish().status == 200
        cluster.proxy.signal(signal.SIGTERM)
        # All five are connected, and read nothing; the drain would take 30 s.
        assert cluster.proxy.wait_exit() == 0


def test_no_socket_stays_behind(tls: Tls) -> None:
    limits = QUICK | {"ENGINE_IDLE_TIMEOUT": 0.1}
    with Cluster(args=tls.args, trust=tls.trust, limits=limits) as cluster:
        cluster.proxy.wait_idle()
        before = cluster.proxy.open_sockets()
        for leave in WAYS_TO_LEAVE * 5:
            with cluster.connect() as client:
                leave(client)
            with cluster.connect() as client:
                client.send(http_request("POST", COMPLETIONS, BODY)[:-5])
                leave(client)
            with cluster.connect() as client:
                streaming(cluster, client)
                leave(client)
        cluster.proxy.wait_idle()
        poll(lambda: cluster.proxy.open_sockets() <= before, "all are closed")
    assert len(cluster.proxy.log) < 20, cluster.proxy.log


# --- What is not TLS ------------------------------------------------------------------


def test_what_is_not_tls_harms_nobody(secured: Cluster) -> None:
    logged = len(secured.proxy.log)
    for garbage in (
        http_request("GET", "/health"),
        b"\x16\x03\x01\xff\xff" + b"x" * 99,
    ):
        for leave in (RawClient.wait_closed, RawClient.reset):
            with plain(secured) as client:
                client.send(garbage)
                leave(client)
    with plain(secured):
        pass
    assert secured.post(COMPLETIONS, BODY).status == 200
    assert secured.proxy.log[logged:] == []


def test_an_unfinished_handshake_has_a_limit(tls: Tls) -> None:
    limits = QUICK | {"HANDSHAKE_TIMEOUT": 0.2}
    with Cluster(args=tls.args, trust=tls.trust, limits=limits) as cluster:
        before = cluster.proxy.open_sockets()
        clients = [plain(cluster) for _ in range(20)]
        for client in clients[:10]:
            client.send(b"\x16\x03\x01")
        for client in clients:
            client.wait_closed()
            client.close()
        poll(lambda: cluster.proxy.open_sockets() <= before, "all are closed")
        log = "".join(cluster.proxy.log)
        assert "handshake" not in log.lower(), log


def test_a_client_that_trusts_nobody_is_not_served(secured: Cluster) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        RawClient(secured.proxy.address, trust=ssl.create_default_context())


# --- The start ------------------------------------------------------------------------


WRONG = ["no certificate", "no key", "garbage", "other key", "encrypted", "key only"]


@pytest.mark.parametrize(
    ("script", "case"),
    [*(("disagg", case) for case in WRONG), ("moriio", "no key")],
)
def test_a_file_that_is_missing_or_wrong_ends_the_start(
    tls: Tls, tmp_path: Path, script: str, case: str
) -> None:
    certificate, key, told = tls.certificate, tls.key, "Cannot use the certificate"
    other = tmp_path / "other.pem"
    match case:
        case "no certificate":
            certificate = other
            told = f"No such file or directory: '{other}'"
        case "no key":
            key = other
            told = f"No such file or directory: '{other}'"
        case "garbage":
            certificate = other
            other.write_text("garbage")
        case "other key":
            key = Tls(tmp_path).key
            told = "KEY_VALUES_MISMATCH"
        case "encrypted":
            key = other
            other.write_bytes(tls.encrypted_key())
    argv = [
        "--port",
        "0",
        "--ssl-certfile",
        str(certificate),
        "--ssl-keyfile",
        str(key),
    ]
    if case == "key only":
        del argv[2:4]
        told = "--ssl-keyfile needs --ssl-certfile"
    if script == "disagg":
        nowhere = ["--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1"]
        status, stderr = run_to_exit([*argv, "--model", MODEL, *nowhere])
    else:
        argv += ["--service-discovery-port", "0"]
        status, stderr = run_to_exit(argv, script=MORIIO_PROXY)
    assert status not in (0, None)
    assert told in stderr and "Traceback" not in stderr
