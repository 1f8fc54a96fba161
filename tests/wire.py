# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Wire cases: how they are delivered, and what a refusal must leave untouched."""

import itertools
from collections.abc import Callable, Iterable
from typing import Self

from rig import (
    COMPLETIONS,
    Cluster,
    ProxyProcess,
    RawClient,
    Response,
    http_request,
)

# A request that some receiver might be tricked into seeing behind a refused one.
SECOND = http_request("POST", COMPLETIONS, {"prompt": "second"})

# The ways each wire case is sent: name to pieces.
DELIVERIES: dict[str, Callable[[bytes], list[bytes]]] = {
    "whole": lambda data: [data],
    "bytewise": lambda data: [data[at : at + 1] for at in range(len(data))],
    "followed": lambda data: [data + SECOND],
}

_markers = itertools.count(1)


class Pace:
    """Lets a client send its next piece only after the proxy has read the last.

    The kernel reports readable sockets in the order in which they became so. The
    answer on this connection, asked for after a piece was sent on another, hence
    proves that the piece was read. What the proxy writes because of it leaves in
    the same round of its loop: it is out when one more answer is here.
    """

    def __init__(self, proxy: Cluster | ProxyProcess) -> None:
        self._client = proxy.connect()

    def wait(self) -> None:
        """Returns once the proxy has read all that was sent to it before."""
        self._client.send(b"HEAD /health HTTP/1.1\r\nHost: proxy\r\n\r\n")
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            received = self._client.read_some()
            assert received, "the connection that sets the pace was closed"
            answer += received

    def send(self, client: RawClient, pieces: Iterable[bytes]) -> None:
        """Sends pieces such that the proxy reads each of them by itself."""
        for piece in pieces:
            client.send(piece)
            self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def assert_nobody_was_asked(cluster: Cluster) -> None:
    """Fails if an engine of a 1P1D cluster got a request that no test has taken.

    A request of its own marks the moment: anything that came before it shows.
    """
    prompt = f"marker {next(_markers)}"
    assert cluster.post(COMPLETIONS, {"prompt": prompt}).status == 200
    for engine in cluster.engines:
        assert engine.next_request().json()["prompt"] == prompt


def refusal(
    cluster: Cluster, pieces: Iterable[bytes], method: str = "POST"
) -> Response:
    """Sends what is to be refused; returns the refusal.

    It is one error object, announces that the connection ends, the connection then
    ends orderly, and no engine heard of it.
    """
    with cluster.connect() as client, Pace(cluster) as pace:
        pace.send(client, pieces)
        response = client.reader().finish()
        assert client.read_some() == b"", "bytes behind the refusal"
    assert response.header("connection") == "close", response
    assert response.error()["code"] == response.status
    assert_nobody_was_asked(cluster)
    return response
