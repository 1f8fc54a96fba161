# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sixty different requests, and what of an answer must be the same everywhere.

Greedy decoding on a random model: an answer depends on every prompt token, so one
that equals a plain engine's was decoded from the right KV cache.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from e2e.engines import MODEL, request
from rig import CHAT, COMPLETIONS, JSON, End, Response

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

# How many requests are asked at once.
REQUESTS = 60

# --- Questions ------------------------------------------------------------------------

# Words of the prompts, several tokens each: in a block, just over one, in many.
LENGTHS = (1, 2, 5, 8, 11, 30, 90)

TOWN = {
    "type": "object",
    "properties": {"town": {"enum": ["Rome", "Oslo"]}},
    "required": ["town"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": TOWN}}]
NAMED = {"type": "function", "function": {"name": "weather"}}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
# An answer that would take many seconds to its end.
LONG = {"max_tokens": 1800, "ignore_eos": True}
TOWN_FORMAT = {"type": "json_schema", "json_schema": {"name": "town", "schema": TOWN}}

# Added to a request for a completion. Each is served by two legs.
COMPLETION_OPTIONS: list[JSON] = [
    {},
    {"stream": True},
    {**WITH_USAGE, "max_tokens": 40, "ignore_eos": True},
    {"max_tokens": 1},
    {"max_tokens": None},
    {"min_tokens": 8, "max_tokens": 12},
    {"stop": ["e", "a"]},
    {"logprobs": 3},
    {"echo": True},
    {"temperature": 1, "seed": 7, "stream": True},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"logit_bias": {"100": 5}, "stream": True},
]
# Added to a request for a chat completion.
CHAT_OPTIONS: list[JSON] = [
    {},
    {"stream": True},
    {"max_completion_tokens": 30, **WITH_USAGE},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "auto", "stream": True},
    {"tools": TOOLS, "tool_choice": "required", "max_completion_tokens": 80},
    {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 80, "stream": True},
    {"tools": TOOLS, "tool_choice": "none"},
    {"response_format": TOWN_FORMAT, "max_tokens": 60},
    {"logprobs": True, "top_logprobs": 2},
    {"temperature": 1, "seed": 8, "stream": True},
    {"add_generation_prompt": False},
]
FUNCTION = {"type": "function", "name": "weather", "parameters": TOWN}
TOOL = {"name": "weather", "input_schema": TOWN}
# Added to a request for a response.
RESPONSE_OPTIONS: list[JSON] = [
    {},
    {"stream": True},
    {"instructions": "Be brief. " * 5},
    {"tools": [FUNCTION], "stream": True},
    {"tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 80},
    {"max_output_tokens": 1},
    {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
]
# Added to a request for a message.
MESSAGE_OPTIONS: list[JSON] = [
    {},
    {"stream": True},
    {"system": "Be brief. " * 5},
    {"stop_sequences": ["e", "a"]},
    {"tools": [TOOL], "stream": True},
    {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 80},
    {"max_tokens": 1},
]
# No hand-over of one prompt and one sequence fits these.
SAMPLED_TWICE = {"n": 2, "temperature": 1, "seed": 9}


@dataclass(frozen=True)
class Question:
    """A request, and whether one hand-over can serve it (else: decode alone)."""

    path: str
    body: JSON
    two_legs: bool = True


def text(salt: str, words: int) -> str:
    """A text that nobody asked before, from its first token on."""
    return f"{salt}: " + " ".join(f"{salt} {i}" for i in range(words))


def completion(prompt: Any, options: JSON, two_legs: bool = True) -> Question:
    """A completion: 16 greedy tokens unless the options say otherwise."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    return Question(COMPLETIONS, body | options, two_legs)


def chat(content: str, options: JSON, two_legs: bool = True) -> Question:
    """A chat completion; every chat begins with the same system message."""
    messages = [
        {"role": "system", "content": "You are brief. " * 8},
        {"role": "user", "content": content},
    ]
    body = {"model": MODEL, "messages": messages, "temperature": 0}
    if "max_completion_tokens" not in options:
        body["max_tokens"] = 16
    return Question(CHAT, body | options, two_legs)


def response(content: str, options: JSON) -> Question:
    """A response of OpenAI's newer endpoint."""
    body = {"model": MODEL, "input": content, "max_output_tokens": 16, "temperature": 0}
    return Question(RESPONSES, body | options)


def message(content: str, options: JSON) -> Question:
    """A message of Anthropic's endpoint."""
    said = [{"role": "user", "content": content}]
    body = {"model": MODEL, "messages": said, "max_tokens": 16, "temperature": 0}
    return Question(MESSAGES, body | options)


def newer(salt: str) -> list[Question]:
    """Responses and messages of every kind, in several lengths."""
    kinds: list[tuple[Callable[[str, JSON], Question], JSON]]
    kinds = [(response, options) for options in RESPONSE_OPTIONS]
    kinds += [(message, options) for options in MESSAGE_OPTIONS]
    return [
        kind(text(f"{number} {words} {salt}", words), options)
        for words in LENGTHS[1::2]
        for number, (kind, options) in enumerate(kinds)
    ]


def bypassed(salt: str) -> list[Question]:
    """Requests that a decode engine has to serve alone."""
    prompts = [text(f"{salt} list {i}", 8) for i in range(3)]
    alone = text(f"{salt} alone", 20)
    return [
        completion(prompts, {}, two_legs=False),
        completion([p + "?" for p in prompts], WITH_USAGE, two_legs=False),
        completion([[7, 8, 9] * 20, [9, 8, 7] * 20], {}, two_legs=False),
        completion(f"{alone} 1", SAMPLED_TWICE, two_legs=False),
        completion(f"{alone} 2", {"prompt_logprobs": 1}, two_legs=False),
        completion(f"{alone} 3", {"echo": True, "logprobs": 1}, two_legs=False),
        chat(f"{alone} 4", SAMPLED_TWICE, two_legs=False),
        chat(f"{alone} 5", {**SAMPLED_TWICE, **WITH_USAGE}, two_legs=False),
    ]


def two_legged(salt: str) -> Iterator[Question]:
    """An endless mix of requests that are served by two legs."""
    yield completion(list(range(100, 180)), {})
    yield completion([text(f"{salt} one in a list", 20)], {})
    kinds: list[tuple[Callable[[str, JSON], Question], JSON]]
    kinds = [(completion, options) for options in COMPLETION_OPTIONS]
    kinds += [(chat, options) for options in CHAT_OPTIONS]
    lengths = itertools.cycle(LENGTHS)
    for number, (kind, options) in enumerate(itertools.cycle(kinds)):
        yield kind(text(f"{salt} {number}", next(lengths)), options)


def cold(salt: str, count: int) -> list[Question]:
    """Completions and chats, streamed and not, whose prompts share no block.

    Args:
        salt: makes the prompts new to engines that answered other salts.
        count: how many.

    """
    asked = []
    for number in range(count):
        content = text(f"{number} {salt}", LENGTHS[number % len(LENGTHS)])
        stream = WITH_USAGE if number % 4 >= 2 else {}
        alone = {"messages": [{"role": "user", "content": content}]}
        asked.append(
            chat(content, alone | stream) if number % 2 else completion(content, stream)
        )
    return asked


def questions(salt: str) -> list[Question]:
    """Sixty requests, the ones without a hand-over spread among the others.

    Args:
        salt: makes the prompts new to engines that answered other salts.

    """
    alone = bypassed(salt)
    mixed = list(itertools.islice(two_legged(salt), REQUESTS - len(alone)))
    for position, question in enumerate(alone):
        mixed.insert(7 * position, question)
    return mixed


# --- Answers --------------------------------------------------------------------------


def ask(address: tuple[str, int], question: Question) -> JSON:
    """Asks one question; see `facts`."""
    return facts(request(address, "POST", question.path, question.body))


def ask_all(address: tuple[str, int], asked: list[Question]) -> list[JSON]:
    """Asks all questions at the same time; the answers in their order."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda question: ask(address, question), asked))


def judge(
    answers: list[JSON], plain: tuple[str, int], asked: list[Question]
) -> list[JSON]:
    """Fails unless answers are those of a plain engine, which are returned.

    Args:
        answers: to the questions, in their order.
        plain: the address of that engine.
        asked: the questions.

    """
    expected = ask_all(plain, asked)
    for question, ours, theirs in zip(asked, answers, expected, strict=True):
        assert ours == theirs, question
    return expected


def facts(response: Response) -> JSON:
    """What two engines must agree on: not ids, times, or where a stream is cut.

    Returns:
        `status`, `type`, and of a success `choices` (index to its text, tool calls,
        tokens and reasons) and `usage` (three token counts, None if not told). Of a
        response or a message `events`.

    """
    assert response.end is End.COMPLETE, response
    common = {"status": response.status, "type": response.header("content-type")}
    if response.status != 200:
        return common | {"body": response.json()}
    pieces = list(_pieces(response))
    if not pieces or "choices" not in pieces[0]:
        return common | {"events": _events(pieces)}
    return common | {"choices": _choices(pieces), "usage": _usage(pieces)}


def _pieces(response: Response) -> Iterator[JSON]:
    """The events of a stream, or the one object of an answer in one piece."""
    if response.header("content-type") == "application/json":
        yield response.json()
        return
    for event in response.events():
        name, _, data = event.rpartition("data: ")
        if data == "[DONE]":
            return
        yield json.loads(data)
    # Only events with names tell their end by themselves.
    assert name.startswith("event: "), event


# What a newer endpoint has of its own in each answer, or of its prefix cache.
OWN = {"id", "item_id", "call_id", "created_at", "sequence_number"}
OWN |= {"input_tokens_details"}


def _events(pieces: Iterable[JSON]) -> list[Any]:
    """The objects without what is an engine's own; texts in pieces are joined."""
    events: list[Any] = []
    for piece in map(_without_own, pieces):
        delta = piece.get("delta")
        if isinstance(delta, dict):
            delta = delta.get("text", delta.get("partial_json"))
        if delta is None:
            events.append(piece)
        elif events and isinstance(events[-1], list) and events[-1][0] == piece["type"]:
            events[-1][1] += delta
        else:
            events.append([piece["type"], delta])
    return events


def _without_own(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_own(v) for name, v in value.items() if name not in OWN}
    return [_without_own(each) for each in value] if isinstance(value, list) else value


def _choices(pieces: Iterable[JSON]) -> dict[int, JSON]:
    choices: defaultdict[int, JSON] = defaultdict(
        lambda: {"text": "", "calls": defaultdict(str), "tokens": [], "reasons": []}
    )
    for choice in itertools.chain.from_iterable(piece["choices"] for piece in pieces):
        merged = choices[choice["index"]]
        message = choice.get("message") or choice.get("delta") or {}
        merged["text"] += message.get("content") or choice.get("text") or ""
        merged["tokens"] += _tokens(choice.get("logprobs") or {})
        for position, call in enumerate(message.get("tool_calls") or []):
            told = call["function"]
            merged["calls"][call.get("index", position)] += (told.get("name") or "") + (
                told.get("arguments") or ""
            )
        if choice["finish_reason"]:
            reasons = choice["finish_reason"], choice.get("stop_reason")
            merged["reasons"].append(reasons)
    return dict(choices)


def _tokens(logprobs: JSON) -> list[str]:
    chat_tokens = [each["token"] for each in logprobs.get("content") or []]
    return chat_tokens or logprobs.get("tokens") or []


def _usage(pieces: Iterable[JSON]) -> JSON | None:
    for usage in (piece.get("usage") for piece in pieces):
        if usage:
            counts = "prompt_tokens", "completion_tokens", "total_tokens"
            return {name: usage[name] for name in counts}
    return None
