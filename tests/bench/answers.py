# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the benchmark's load sends, and what its engines answer: bytes, no I/O.

A prompt begins with an order: which request it is, how many tokens it wants and how
far apart. An answer is a function of the order and nothing else, so the load knows
every byte that has to arrive, whatever stands between it and the engine.
"""

import functools
from typing import NamedTuple

MODEL = "bench/Llama-3.1-8B-Instruct"
TARGET = b"/v1/completions"
# An order whose stream waits, after its first token, for the engines' gate.
AT_THE_GATE = 9999
# Bytes of a prompt that nobody asked to be longer.
USUAL_PROMPT = 80

_ORDER = b"order %s %04d %04d "
_MARK = b"order "
# Stands for the eight digits of a request in what is made once for all requests.
_HOLE = b"\0" * 8

_CHUNK = b"%x\r\n%s\r\n"
_LAST = b"data: [DONE]\n\n"
_EVENT = (
    b'data: {"id":"cmpl-%s","object":"text_completion","created":1764466829,'
    b'"model":"%s","choices":[{"index":0,"text":" word%04d","logprobs":null,'
    b'"finish_reason":%s,"stop_reason":null,"token_ids":null}],"usage":null}\n\n'
)
_WHOLE = (
    b'{"id":"cmpl-%s","object":"text_completion","created":1764466829,"model":"%s",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":"length",'
    b'"stop_reason":null,"prompt_logprobs":null}],"usage":{"prompt_tokens":20,'
    b'"total_tokens":%d,"completion_tokens":%d},"kv_transfer_params":null}'
)


class Order(NamedTuple):
    """What a prompt asks for.

    Args:
        ident: eight digits.
        tokens: how many.
        pace: milliseconds between two of them.

    """

    ident: bytes
    tokens: int
    pace: int


def read_order(body: bytes) -> Order | None:
    """The order in a request's body, if there is one."""
    at = body.find(_MARK)
    if at < 0:
        return None
    at += len(_MARK)
    tokens, pace = int(body[at + 9 : at + 13]), int(body[at + 14 : at + 18])
    return Order(body[at : at + 8], tokens, pace)


def ident(number: int) -> bytes:
    """The eight digits of a request."""
    return b"%08d" % number


class Template(NamedTuple):
    """Bytes of a request or an answer with a hole for the eight digits."""

    parts: list[bytes]

    def fill(self, digits: bytes) -> bytes:
        """The bytes of one request's."""
        return digits.join(self.parts)


def request(port: int, stream: bool, tokens: int, pace: int, size: int) -> Template:
    """A completion request.

    Args:
        port: whom it is for.
        stream: whether it wants a stream.
        tokens: how many.
        pace: milliseconds between two of them.
        size: bytes of the prompt.

    """
    order = _ORDER % (_HOLE, tokens, pace)
    body = b'{"model":"%s","prompt":"%s","max_tokens":%d,"temperature":0.0%s}' % (
        MODEL.encode(),
        order.ljust(size, b"x"),
        tokens,
        b',"stream":true' if stream else b"",
    )
    head = (
        b"POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: bench\r\n"
        b"Accept: */*\r\nAuthorization: Bearer sk-bench\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    return Template((head % (TARGET, port, len(body)) + body).split(_HOLE))


@functools.cache
def events(tokens: int) -> list[Template]:
    """The events of a stream, as they are written, chunk by chunk."""
    found = []
    for number in range(1, tokens + 1):
        wire = _CHUNK % (len(_event(number, tokens)), _event(number, tokens))
        if number == tokens:
            wire += _CHUNK % (len(_LAST), _LAST) + b"0\r\n\r\n"
        found.append(Template(wire.split(_HOLE)))
    return found


@functools.cache
def answer(stream: bool, tokens: int) -> Template:
    """The payload of an answer, whatever its transfer coding."""
    if stream:
        payload = b"".join(_event(n, tokens) for n in range(1, tokens + 1)) + _LAST
    else:
        payload = _WHOLE % (_HOLE, MODEL.encode(), 20 + tokens, tokens)
    return Template(payload.split(_HOLE))


def _event(number: int, tokens: int) -> bytes:
    finish = b'"length"' if number == tokens else b"null"
    return _EVENT % (_HOLE, MODEL.encode(), number, finish)


def hand_over(order: Order, port: int, transfer_id: bytes) -> bytes:
    """A prefill engine's answer.

    Args:
        order: the request's.
        port: the engine's.
        transfer_id: a further member that MoRIIO and Mooncake want back, or nothing.

    """
    return (
        b'{"id":"cmpl-%s","object":"text_completion","created":1764466829,"model":"%s",'
        b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":'
        b'"length","stop_reason":null}],"usage":{"prompt_tokens":20,"total_tokens":21,'
        b'"completion_tokens":1},"kv_transfer_params":{"do_remote_prefill":true,'
        b'"do_remote_decode":false,"remote_block_ids":[[1,2,3,4,5,6,7,8,9,10,11,12]],'
        b'"remote_engine_id":"0b7c5a5e-7d1c-4f64-8a52-%012d","remote_request_id":'
        b'"cmpl-%s","remote_host":"127.0.0.1","remote_port":%d,"tp_size":1%s}}'
    ) % (
        order.ident,
        MODEL.encode(),
        port,
        order.ident,
        port % 10000 + 1000,
        transfer_id,
    )
