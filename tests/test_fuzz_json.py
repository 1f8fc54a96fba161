# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""JSON bodies against the standard library: the same bytes must mean the same.

A leg's body is made of the raw values of the client's, so what counts is that each
value ends where it ends for others, and that a name has the value that it has for
them.
"""

import json
from typing import Any

from fuzzing import examples
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Raw

from disagg_proxy import (
    ENDPOINTS,
    ONE_TOKEN,
    Members,
    ProxyError,
    decode_body,
    forces_tool,
    prefill_body,
    split_members,
)

# --- The oracle -----------------------------------------------------------------------


def refuse_constant(name: str) -> None:
    raise ValueError(name)


def parse(text: str) -> Any:
    """Any JSON by the standard library: numbers as text, objects as tuples of pairs.

    Raises:
        ValueError: it is not JSON of RFC 8259.

    """
    return json.loads(
        text,
        parse_int=lambda digits: ("number", digits),
        parse_float=lambda digits: ("number", digits),
        parse_constant=refuse_constant,
        object_pairs_hook=lambda pairs: ("object", *pairs),
    )


def their_members(body: bytes) -> dict[str, Any] | None:
    """The members of an object, the last of each name; None: it is not one."""
    try:
        found = parse(body.decode())
    except ValueError:
        return None
    return dict(found[1:]) if found[:1] == ("object",) else None


def our_members(body: bytes) -> Members | None:
    """What the proxy makes of it; None: it refuses with a 400."""
    try:
        return split_members(body)
    except ProxyError as err:
        assert err.status == 400
        return None


def meaning(members: Members) -> dict[str, Any]:
    return {name: parse(bytes(value).decode()) for name, value in members.items()}


def is_unicode(text: str) -> bool:
    """Whether it has no lone surrogate."""
    return text.encode(errors="replace").decode() == text


# --- Bodies ---------------------------------------------------------------------------

BLANKS = st.sampled_from(["", "", "", "", " ", "\n", "\t\r\n  "])
NAMES = [
    "prompt model stream stream_options max_tokens max_completion_tokens n best_of",
    "echo logprobs prompt_logprobs use_beam_search messages tools tool_choice stop",
    "kv_transfer_params ec_transfer_params min_tokens max_output_tokens store input",
    "background previous_response_id",
]
# What a string may consist of: an escape or a character each.
CHARACTERS = [
    *[*"aé€\U0001f600{}[],: /\x7f"],
    *[r"\"", r"\\", r"\/", r"\n", r"\u0000", r"\u00e9", r"\ud83d\ude00", r"\u0022"],
]
LONE = [r"\ud83d", r"\uDE00", r"\ud83d\ud83d", r"\ude00\ud83d"]
TEXTS = st.lists(st.sampled_from(CHARACTERS), max_size=4).map("".join)
NUMBERS = st.sampled_from(["0", "-0", "1", "2", "1.0", "-1e9", "1E+999", "9" * 40])


def strings(texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return texts.map(lambda text: f'"{text}"')


@st.composite
def arrays(draw: st.DrawFn, items: st.SearchStrategy[str]) -> str:
    inner = draw(st.lists(st.tuples(BLANKS, items, BLANKS).map("".join), max_size=3))
    return f"[{','.join(inner)}]" if inner else f"[{draw(BLANKS)}]"


@st.composite
def objects(
    draw: st.DrawFn, names: st.SearchStrategy[str], items: st.SearchStrategy[str]
) -> str:
    member = st.tuples(BLANKS, names, BLANKS, st.just(":"), BLANKS, items, BLANKS)
    inner = draw(st.lists(member.map("".join), max_size=4))
    return f"{{{','.join(inner)}}}" if inner else f"{{{draw(BLANKS)}}}"


@st.composite
def known_names(draw: st.DrawFn) -> str:
    """A name that the proxy looks for, in one of its spellings."""
    name = draw(st.sampled_from(" ".join(NAMES).split()))
    at = draw(st.integers(-3, len(name) - 1))
    return name if at < 0 else f"{name[:at]}\\u{ord(name[at]):04x}{name[at + 1 :]}"


def values(texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    plain = NUMBERS | st.sampled_from(["true", "false", "null"]) | strings(texts)
    names = strings(texts)
    return st.recursive(plain, lambda v: arrays(v) | objects(names, v), max_leaves=6)


def bodies(texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    names = strings(known_names() | texts)
    return st.tuples(BLANKS, objects(names, values(texts)), BLANKS).map("".join)


# A third of the bodies has text that was cut through an emoji.
CUT_TEXTS = st.lists(st.sampled_from(CHARACTERS + LONE), max_size=4).map("".join)
BODIES = (bodies(TEXTS) | bodies(TEXTS) | bodies(CUT_TEXTS)).map(str.encode)

SPOILERS = [
    *[bytes([byte]) for byte in b'{}[],:"\\ \n01-+.eE/ntf\0\x01\x7f\x80\xc0\xed\xff'],
    *[
        b"NaN",
        b"-Infinity",
        b"null",
        b"\\u",
        b"\\ud83d",
        b"\xed\xa0\xbd",
        b"\xef\xbb\xbf",
    ],
    *[b"//x\n", b"'a'", b"\\x41", b"0x1", b"1_0", b"\xc2\xa0", b"\x0c", b"[" * 3000],
]


@st.composite
def spoilt(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bodies with one fault or two."""
    data = draw(whole)
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 0, 1, 1, 2, 9]))
        put = draw(st.sampled_from([*SPOILERS, b"", data[at : at + length] * 2]))
        data = data[:at] + put + data[at + length :]
    return data


# --- Members --------------------------------------------------------------------------


@examples(200)
@given(BODIES | spoilt(BODIES))
@example(rb'{"\ud83d":1}')
@example(rb'{"a":' + b" " * 3000 + rb'"\ud83d"}')
def test_a_body_has_the_members_that_it_has_for_others(body: bytes) -> None:
    try:
        theirs = their_members(body)
    except RecursionError:
        our_members(body)
        return
    ours = our_members(body)
    if theirs is not None and not all(map(is_unicode, theirs)):
        theirs = None  # No member of vLLM's has such a name, so it is refused.
    assert (None if ours is None else meaning(ours)) == theirs


@examples(120)
@given(BODIES)
def test_both_legs_mean_what_the_client_said(body: bytes) -> None:
    members = our_members(body)
    if members is None:
        return
    theirs = meaning(members)
    assert their_members(decode_body(members, None)) == theirs
    params = Raw(b'{"do_remote_decode":true}')
    with_params = {**theirs, "kv_transfer_params": parse(bytes(params).decode())}
    assert their_members(decode_body(members, params)) == with_params
    prefill = their_members(prefill_body(members, ONE_TOKEN, params))
    assert prefill is not None
    assert prefill["max_tokens"] == ("number", "1")
    assert prefill["stream"] is False
    same = prefill.keys() - {"stream", "max_tokens", "max_completion_tokens", "n"}
    assert {name: prefill[name] for name in same} == {
        name: with_params[name] for name in same
    }


@examples(120)
@given(BODIES, st.sampled_from(sorted(ENDPOINTS)))
@example(rb'{"prompt":["\ud83d","a"]}', "/v1/completions")
@example(rb'{"tools":[{"type":"\ud83d"}]}', "/v1/responses")
def test_whatever_is_in_a_body_it_is_decided_upon(body: bytes, path: str) -> None:
    members = our_members(body)
    if members is None:
        return
    forces_tool(members)
    try:
        assert isinstance(ENDPOINTS[path].bypass(members), str | None)
    except ProxyError as err:
        assert err.status == 400
