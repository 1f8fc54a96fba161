# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`--access-log`: one line for each request, with nothing in it that is secret."""

import json
import logging
import signal

import pytest
from moriio_rig import Fleet
from rig import (
    CHAT,
    COMPLETIONS,
    JSON,
    SSE_HEAD,
    Close,
    Cluster,
    End,
    Gate,
    ProxyProcess,
    Step,
    chunk,
    event,
    gather,
    poll,
)
from test_logs import check_lines

import disagg_proxy

BODY: JSON = {"prompt": "the prompt", "messages": []}
STREAM: JSON = BODY | {"stream": True}
IN_JSON = ["--access-log", "--log-format", "json"]


def lines(proxy: ProxyProcess, path: str, count: int) -> list[JSON]:
    """The lines about a path, once there are so many."""

    def found() -> list[JSON] | None:
        parsed: list[JSON] = [json.loads(line) for line in list(proxy.log)]
        about = [each for each in parsed if each.get("path") == path]
        return about if len(about) >= count else None

    return poll(found, f"{count} lines about {path}")


def line(proxy: ProxyProcess, path: str) -> JSON:
    """The one line about a path."""
    [only] = lines(proxy, path, 1)
    return only


def test_a_line_says_who_served_a_request_and_how() -> None:
    with Cluster(args=IN_JSON) as cluster, cluster.connect() as client:
        for body, headers in ((BODY, {}), (STREAM, {"X-Request-Id": "mine"})):
            reader = client.post(COMPLETIONS, body, headers)
            answer = reader.finish()
            assert answer.status == 200
        first, second = lines(cluster.proxy, COMPLETIONS, 2)
        p, d = cluster.p[0], cluster.d[0]
        for number, each in enumerate((first, second)):
            engine_id = p.requests[number].header("X-Request-Id")
            assert each["id"] == engine_id
            assert d.requests[number].header("X-Request-Id") == engine_id
            assert (each["prefill"], each["decode"]) == (p.instance, d.instance)
            assert (each["method"], each["status"]) == ("POST", 200)
            assert (each["mode"], each["end"]) == ("disaggregated", "whole")
            assert 0 < each["prefill_ms"] <= each["first_byte_ms"] <= each["total_ms"]
        assert "client_id" not in first and second["client_id"] == "mine"
        # All that came behind the head, and the head.
        assert second["bytes"] > len(answer.raw_body)


def test_bytes_are_those_that_the_client_got() -> None:
    with Cluster(args=IN_JSON) as cluster:
        for body in (BODY, STREAM, STREAM | {"n": 2}):
            with cluster.connect() as client:
                asked = {"Connection": "close"}
                client.post(CHAT, body, asked)
                got = len(client.wait_closed())
            assert lines(cluster.proxy, CHAT, 1)[-1]["bytes"] == got
            cluster.proxy.log.clear()


def test_other_modes_and_answers_of_the_proxys_own() -> None:
    with Cluster(args=IN_JSON) as cluster:
        proxy = cluster.proxy
        cluster.post(CHAT, BODY | {"n": 2})
        assert line(proxy, CHAT)["mode"] == "bypass"
        cluster.get("/version")
        served = line(proxy, "/version")
        assert (served["mode"], served["method"]) == ("single_leg", "GET")
        assert served["prefill"] is served["prefill_ms"] is None
        assert served["decode"] == cluster.d[0].instance
        cluster.post(COMPLETIONS, b"{")
        refused = line(proxy, COMPLETIONS)
        assert (refused["mode"], refused["status"]) == ("own", 400)
        assert refused["decode"] is refused["first_byte_ms"] is None
        with cluster.connect() as client:
            client.send(b"POST /cut/short HTTP/1.1\r\nHost: h\r\n")
            client.send(b"Transfer-Encoding: chunked\r\n\r\nno size\r\n")
            assert client.reader().finish().status == 400
        assert line(proxy, "/cut/short")["message"] == "refused"


def test_answers_that_are_not_whole() -> None:
    begun: list[Step] = [SSE_HEAD, chunk(event("1"))]
    with Cluster(args=IN_JSON) as cluster:
        d, proxy = cluster.d[0], cluster.proxy
        d.answer(*begun, Close.RST)
        cluster.post(CHAT, STREAM)
        d.next_request()
        cut = line(proxy, CHAT)
        assert (cut["status"], cut["end"]) == (200, "cut")
        for path, steps in ((COMPLETIONS, []), ("/v1/models/x", begun)):
            d.answer(*steps, Gate())
            with cluster.connect() as client:
                reader = client.post(path, STREAM)
                if steps:
                    reader.body_until(b"1")
                d.next_request()
            aborted = line(proxy, path)
            assert aborted["status"] == (200 if steps else None)
            assert aborted["end"] == "aborted"


def test_what_the_end_of_the_proxy_cuts_is_said_to_be_cut() -> None:
    with Cluster(args=[*IN_JSON, "--drain-timeout", "0"]) as cluster:
        cluster.d[0].answer(SSE_HEAD, chunk(event("1")), Gate())
        with cluster.connect() as client:
            reader = client.post(CHAT, STREAM)
            reader.body_until(b"1")
            cluster.proxy.signal(signal.SIGTERM)
            assert reader.finish().end is End.INCOMPLETE
        assert cluster.proxy.wait_exit() == 0
        assert line(cluster.proxy, CHAT)["end"] == "cut"
        said = [json.loads(each)["message"] for each in cluster.proxy.log]
        assert "stopping" in said[-3] and said[-1] == "stopped"


@pytest.mark.parametrize("connector", ["nixl-push", "moriio"])
def test_a_pair_has_the_id_that_its_engines_have(connector: str) -> None:
    fleet = Fleet(argv=IN_JSON) if connector == "moriio" else None
    with fleet or Cluster(args=IN_JSON, connector=connector) as cluster:
        cluster.proxy.request("POST", COMPLETIONS, BODY)
        logged = line(cluster.proxy, COMPLETIONS)["id"]
        assert logged == cluster.p[0].requests[0].header("X-Request-Id")
        assert logged == cluster.d[0].requests[0].header("X-Request-Id")


def test_a_line_of_text_has_the_same() -> None:
    with Cluster(args=["--access-log"]) as cluster:
        cluster.post(COMPLETIONS, BODY)
        text = cluster.proxy.wait_log(f"path={COMPLETIONS}")
    _, _, told = text.partition(" INFO request ")
    words = dict(word.partition("=")[::2] for word in told.split())
    assert words.pop("id") == cluster.p[0].requests[0].header("X-Request-Id")
    assert words["decode"] == cluster.d[0].instance
    assert list(words)[:4] == ["method", "path", "status", "end"]


def test_no_log_level_hides_it() -> None:
    assert disagg_proxy.access_logger.level == logging.INFO
    assert disagg_proxy.access_logger.parent is disagg_proxy.logger


def test_nobody_can_forge_a_line_or_read_a_secret_in_one() -> None:
    evil = [b"/x\x9b1m\xc2\x85?api_key=secret", b"/x%0a%00%9b?api_key=secret"]
    with Cluster(args=["--access-log"], env={"OPENAI_API_KEY": "secret"}) as cluster:
        headers = {"Authorization": "Bearer secret", "X-Request-Id": "a\x9bb"}
        cluster.post(COMPLETIONS + "?key=secret", BODY, headers)
        for target in evil:
            with cluster.connect() as client:
                client.send(b"GET %s HTTP/1.1\r\nHost: h\r\n\r\n" % target)
                assert client.reader("GET").finish().status == 400
        long = "/" + "y" * 10_000
        cluster.get(long)
        gather([lambda: cluster.post(CHAT, BODY)] * 4)
        cluster.proxy.wait_log(f"path={long[:512]} ")
        poll(lambda: str(cluster.proxy.log).count(CHAT) == 4, "all are logged")
    check_lines(cluster.proxy.log, "text")
    for word in ("secret", "the prompt", "\x9b"):
        assert word not in "".join(cluster.proxy.log)
    assert "path=/x%0a%00%9b " in "".join(cluster.proxy.log)


def test_it_is_off_by_default(pair: Cluster) -> None:
    pair.post(COMPLETIONS, BODY)
    pair.get("/no/such/path")
    assert not [each for each in pair.proxy.log if "path" in each]
