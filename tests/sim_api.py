# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the simulated engine reads and says: request bodies, answers, refusals.

Pure functions and values; the texts, shapes and the order of checks are those of
vLLM 0.33 (vllm/entrypoints/openai, vllm/entrypoints/anthropic). How an answer's text
follows from its prompt stands in the docstring of sim_engine.py.
"""

import array
import hashlib
import itertools
import json
import time
from typing import Any, ClassVar, NamedTuple

import msgspec

JSON = dict[str, Any]

# Tokens of an answer: of a completion without max_tokens (OpenAI's default), and of
# a chat without one, where a model would find its own end.
DEFAULT_TOKENS = 16
MAX_LOGPROBS = 20

# --- Prompts and answers --------------------------------------------------------------

TOKEN_BYTES = 4
# Spreads the keys of the choices of one prompt (the golden ratio of 2**32).
CHOICE_STEP = 0x9E3779B1
# The id of the first output token; ids count up from it.
FIRST_OUTPUT_ID = 100
EOS_MARK = b"<eos@"

sorted_json = msgspec.json.Encoder(order="sorted")


class Refused(Exception):
    """A request that vLLM answers with an error.

    Args:
        message: vLLM's text.
        status: HTTP status.
        kind: the error's `type`.
        param: the error's `param`.
        parsed: False if vLLM refuses while it parses the body, where it does not
            tell P to drop the hand-over.
        late: whether a streaming client gets 200 and the error as an event.

    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "BadRequestError",
        param: str | None = None,
        parsed: bool = True,
        late: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.parsed = parsed
        self.late = late
        self.error = {"message": message, "type": kind, "param": param, "code": status}


def missing(name: str) -> "Refused":
    """A refusal for a required member."""
    return invalid(f"{{'type': 'missing', 'loc': ('body', {name!r})}}")


def invalid(message: str, param: str | None = None) -> Refused:
    """A refusal by the body's schema."""
    text = f"1 validation error:\n  {message}"
    return Refused(text, kind="Bad Request", param=param, parsed=False)


class Prompt(NamedTuple):
    """One prompt: its text (empty for token ids), tokens, key and end of sequence."""

    text: str
    data: bytes
    key: int
    eos: int | None

    @property
    def tokens(self) -> int:
        return len(self.data) // TOKEN_BYTES


def canonical(value: Any) -> bytes:
    """JSON that is equal for equal values, whatever their spelling was."""
    try:
        return sorted_json.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(value, sort_keys=True).encode()


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % TOKEN_BYTES) if data else bytes(TOKEN_BYTES)


def token_ids(data: bytes) -> list[int]:
    ids = array.array("I", data)
    ids.byteswap()
    return ids.tolist()


def bytes_of(ids: list[int]) -> bytes:
    """The inverse of `token_ids`.

    Raises:
        Refused: not a list of token ids.

    """
    try:
        packed = array.array("I", ids)
    except (TypeError, OverflowError):
        raise invalid("token ids must be integers from 0 to 2**32 - 1") from None
    packed.byteswap()
    return packed.tobytes()


def make_prompt(data: bytes, shape: bytes, text: str = "") -> Prompt:
    digest = hashlib.blake2b(data, digest_size=4)
    digest.update(shape)
    eos = None
    at = data.find(EOS_MARK)
    if at >= 0:
        eos = int(data[at + len(EOS_MARK) :].partition(b">")[0])
    return Prompt(text, data, int.from_bytes(digest.digest()), eos)


def text_prompt(text: str, shape: bytes) -> Prompt:
    return make_prompt(padded(text.encode("utf-8", "surrogatepass")), shape, text)


# --- Request bodies -------------------------------------------------------------------

# Members that change what a model is shown, besides the prompt or messages; the last
# ones of `Body`, in its order.
SHAPING = (
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "mm_processor_kwargs",
    "reasoning_effort",
    "cache_salt",
    "system",
    "instructions",
)


class Body(msgspec.Struct):
    """The members this engine looks at; any other is accepted and ignored."""

    model: str | None = None
    prompt: str | list[Any] | None = None
    messages: list[JSON] | None = None
    input: str | list[Any] | None = None
    stream: bool | None = None
    stream_options: JSON | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    stop: str | list[str] | None = None
    stop_sequences: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    use_beam_search: bool | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None
    kv_transfer_params: JSON | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    tools: list[JSON] | None = None
    tool_choice: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    documents: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    add_special_tokens: Any = None
    mm_processor_kwargs: Any = None
    reasoning_effort: Any = None
    cache_salt: str | None = None
    system: Any = None
    instructions: Any = None

    def shape(self, base_model: str) -> bytes:
        """What belongs to the prompt besides its bytes; usually nothing."""
        values = msgspec.structs.astuple(self)[-len(SHAPING) :]
        found = {k: v for k, v in zip(SHAPING, values, strict=True) if v is not None}
        if self.model not in (None, base_model):
            found["model"] = self.model
        return canonical(found) if found else b""

    def forces_tool(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, dict)


body_decoder = msgspec.json.Decoder(Body)


def parse_body(raw: bytes) -> Body:
    """Decodes a request body.

    Raises:
        Refused: no JSON, no object, or a member of a wrong type.

    """
    try:
        return body_decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise invalid(f"{{'type': 'type_error', 'msg': {str(error)!r}}}") from None
    except msgspec.DecodeError:
        return parse_leniently(raw)


def parse_leniently(raw: bytes) -> Body:
    """Decodes what Python's parser takes and msgspec does not: lone surrogates."""
    try:
        return msgspec.convert(json.loads(raw), Body)
    except msgspec.ValidationError as error:
        raise invalid(f"{{'type': 'type_error', 'msg': {str(error)!r}}}") from None
    except (ValueError, RecursionError) as error:
        raise invalid(
            "{'type': 'json_invalid', 'loc': ('body', 0), 'msg': 'JSON decode error',"
            f" 'input': {{}}, 'ctx': {{'error': {str(error)[:80]!r}}}}}"
        ) from None


def check_schema(body: Body) -> None:
    """Refuses what vLLM's request models refuse, before it has seen the engine."""
    if body.stream_options and not body.stream:
        raise Refused(
            "Stream options can only be defined when `stream=True`. "
            "(parameter=stream_options)",
            kind="Bad Request",
            param="stream_options",
            parsed=False,
        )
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("`prompt_logprobs` are not available when `stream=True`.")
    if body.messages is not None and body.top_logprobs and not body.logprobs:
        raise invalid("when using `top_logprobs`, `logprobs` must be set to true.")
    if body.tools == []:
        raise invalid("`tools` must not be an empty list.")
    if body.forces_tool() and not body.tools:
        raise invalid("When using `tool_choice`, `tools` must be set.")
    salt = body.cache_salt
    if salt is not None and (len(salt) > 128 or any(c in salt for c in "@/\\\0")):
        raise invalid("`cache_salt` is too long or has a forbidden character.")


def check_sampling(body: Body, limit: int) -> None:
    """Refuses sampling parameters.

    Args:
        body: the request.
        limit: the effective max_tokens.

    Raises:
        Refused: as the serving layer would.

    """
    n = 1 if body.n is None else body.n
    if n < 1:
        raise Refused(f"n must be at least 1, got {n}.")
    if n > 1 and body.temperature == 0:
        raise Refused(f"n must be 1 when using greedy sampling, got {n}.")
    if limit < 1 and not (body.echo and body.max_tokens == 0):
        raise Refused(
            f"max_tokens must be at least 1, got {limit}. "
            f"(parameter=max_tokens, value={limit})"
        )
    if (body.min_tokens or 0) > limit:
        raise Refused(
            f"min_tokens must be less than or equal to max_tokens={limit}, "
            f"got {body.min_tokens}."
        )
    wanted = max(body.top_logprobs or 0, int(body.logprobs or 0))
    if wanted > MAX_LOGPROBS:
        raise Refused(
            f"Requested sample logprobs of {wanted}, which is greater than max "
            f"allowed: {MAX_LOGPROBS}",
            late=True,
        )
    if body.use_beam_search and body.stream:
        raise Refused("Streaming is not currently supported with beam search")


# --- Choices of an answer -------------------------------------------------------------

GARBAGE = "KVGARBAGE"


class Sequence:
    """One choice of an answer: what it will say, decided when it is admitted.

    Attributes:
        length: output tokens, a final end of sequence included.
        events: chunks it is streamed in; at least one, for the finish reason.
        loaded: whether its prompt's KV came from elsewhere.
        garbage: whether that KV was not its prompt's.

    """

    __slots__ = (
        "events",
        "finish_reason",
        "garbage",
        "index",
        "key",
        "length",
        "loaded",
        "prompt",
        "stop_reason",
        "texts",
    )

    def __init__(self, prompt: Prompt, index: int, child: int, body: Body, limit: int):
        self.prompt = prompt
        self.index = index
        self.key = (prompt.key + child * CHOICE_STEP) & 0xFFFFFFFF
        self.loaded = self.garbage = False
        self.length = limit
        self.finish_reason = "length"
        self.stop_reason: str | int | None = None
        # Set where an answer does not simply run into its limit.
        self.texts: list[str] | None = None
        stops = body.stop or body.stop_sequences
        if stops or body.stop_token_ids or prompt.eos is not None:
            self.shorten(body, [stops] if isinstance(stops, str) else stops or [])
        self.events = max(1, self.length)

    def text(self, i: int) -> str:
        if self.garbage:
            return f" {GARBAGE}.{i}"
        if self.texts is not None:
            return self.texts[i]
        return f" {self.key:08x}.{i}" if self.length else ""

    def whole_text(self) -> str:
        return "".join([self.text(i) for i in range(self.length)])

    def end(self, i: int, reason: str, by: str | int | None) -> None:
        """Lets the answer stop with token i instead of at its limit."""
        self.length = i + 1
        self.finish_reason, self.stop_reason = reason, by

    def shorten(self, body: Body, stops: list[str]) -> None:
        """Finds what ends the answer first; none of it counts below min_tokens."""
        first = max((body.min_tokens or 0) - 1, 0)
        texts = [self.text(i) for i in range(self.length)]
        eos = self.prompt.eos
        if eos is not None and not body.ignore_eos and max(eos, first) < len(texts):
            self.end(max(eos, first), "stop", None)
        for token in body.stop_token_ids or []:
            if first <= token - FIRST_OUTPUT_ID < self.length:
                self.end(token - FIRST_OUTPUT_ID, "stop", token)
        ends_in_token = self.finish_reason == "stop"
        texts = texts[: self.length]
        if ends_in_token:
            texts[-1] = ""
        self.texts = texts
        for stop in stops:
            self.stop_at(stop, first)

    def stop_at(self, stop: str, first: int) -> None:
        """Applies one stop string: the text ends before it."""
        assert self.texts is not None
        so_far = ""
        for i, text in enumerate(self.texts):
            at = (so_far + text).find(stop)
            if at >= 0 and i >= first:
                self.end(i, "stop", stop)
                cut = [*self.texts[:i], text]
                self.texts = trimmed(cut, at)
                return
            so_far += text


def trimmed(texts: list[str], size: int) -> list[str]:
    """The same pieces, with only the first `size` characters left."""
    kept = []
    for text in texts:
        kept.append(text[:size])
        size -= len(kept[-1])
    return kept


# --- What the answers look like -------------------------------------------------------

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.encode


class Answer:
    """What the answer to one request is written from.

    Attributes:
        sequences: its choices, in the order of their indexes.
        kv: the `kv_transfer_params` of the answer, known when it ends.
        prefix: a stream's events up to the content of `choices`.

    """

    def __init__(
        self, api: "Api", body: Body, sequences: list[Sequence], id: str, model: str
    ) -> None:
        self.api = api
        self.body = body
        self.sequences = sequences
        self.id = api.id_prefix + id
        self.model = body.model or model
        self.created = int(time.time())
        self.kv: JSON | None = None
        options = body.stream_options or {}
        self.usage_at_end = bool(options.get("include_usage"))
        self.usage_always = bool(options.get("continuous_usage_stats"))
        self.prefix = api.prefix(self) if body.stream else b""


def usage_of(answer: Answer, tokens: int | None = None) -> JSON:
    """Usage after `tokens` tokens of each sequence; None: at the end."""
    prompts = {id(each.prompt): each.prompt for each in answer.sequences}
    prompt_tokens = sum(prompt.tokens for prompt in prompts.values())
    lengths = [each.length for each in answer.sequences]
    completion = sum(lengths if tokens is None else [min(tokens, n) for n in lengths])
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
    }


def renamed_usage(answer: Answer, tokens: int | None = None) -> JSON:
    """Usage under the names of the two newer APIs."""
    usage = usage_of(answer, tokens)
    return {
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
    }


def output_ids(sequence: Sequence) -> list[int]:
    return list(range(FIRST_OUTPUT_ID, FIRST_OUTPUT_ID + sequence.length))


def named_event(name: str, **members: Any) -> bytes:
    """A server-sent event of the two newer APIs, which name their events."""
    data = encode({"type": name, **members})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class Api:
    """One generating route: how its requests are read and its answers written."""

    path: ClassVar[bytes]
    id_prefix: ClassVar[str]
    # Whether X-Request-Id and the body's request_id name the request.
    takes_request_id: ClassVar[bool] = True

    def prompts(self, body: Body, shape: bytes) -> list[Prompt]:
        """The prompts of a request; one but for lists of prompts.

        Raises:
            Refused: there is none, or it is malformed.

        """
        raise NotImplementedError

    def limit(self, body: Body) -> int | None:
        """The most tokens the client asks for; None: it does not say."""
        return body.max_tokens

    def error(self, refused: Refused) -> bytes:
        return encode({"error": refused.error})

    def error_event(self, refused: Refused) -> bytes:
        """The end of a stream that fails."""
        return b"data: %b\n\n%b" % (self.error(refused), DONE)

    def prefix(self, answer: Answer) -> bytes:
        """What begins each event of a stream."""
        return b""

    def opening(self, answer: Answer) -> bytes:
        """Events before the first token."""
        return b""

    def token(self, answer: Answer, sequence: Sequence, i: int) -> bytes:
        """The event of one token."""
        raise NotImplementedError

    def closing(self, answer: Answer) -> bytes:
        """Events after the last token."""
        raise NotImplementedError

    def whole(self, answer: Answer) -> bytes:
        """The body of an answer that is not streamed."""
        raise NotImplementedError


class ChoicesApi(Api):
    """What OpenAI's two older APIs share: an envelope around `choices`."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def envelope(self, answer: Answer, kind: str) -> JSON:
        return {
            "id": answer.id,
            "object": kind,
            "created": answer.created,
            "model": answer.model,
        }

    def prefix(self, answer: Answer) -> bytes:
        head = encode(self.envelope(answer, self.chunk_kind))
        return b'data: %b,"choices":[' % head[:-1]

    def closing(self, answer: Answer) -> bytes:
        if not answer.usage_at_end:
            return DONE
        usage = encode(usage_of(answer))
        return b'%b],"usage":%b}\n\n%b' % (answer.prefix, usage, DONE)

    def content(self, answer: Answer, sequence: Sequence, i: int) -> bytes:
        """The member of a streamed choice that carries token i."""
        raise NotImplementedError

    def logprobs(self, texts: list[str]) -> JSON:
        """Log-probabilities of output tokens, all alike."""
        raise NotImplementedError

    def choice(self, answer: Answer, sequence: Sequence) -> JSON:
        """The content of a choice that is not streamed."""
        raise NotImplementedError

    def token(self, answer: Answer, sequence: Sequence, i: int) -> bytes:
        body, last = answer.body, i + 1 >= sequence.events
        logprobs = b"null"
        if body.logprobs is not None and body.logprobs is not False:
            logprobs = encode(self.logprobs([sequence.text(i)]))
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b]%b}\n\n' % (
            answer.prefix,
            sequence.index,
            self.content(answer, sequence, i),
            logprobs,
            self.reasons(sequence) if last else b"null",
            b',"token_ids":[%d]}' % (FIRST_OUTPUT_ID + i)
            if body.return_token_ids
            else b"}",
            self.extras(answer, i, last),
        )

    def reasons(self, sequence: Sequence) -> bytes:
        reason, by = encode(sequence.finish_reason), encode(sequence.stop_reason)
        return b'%b,"stop_reason":%b' % (reason, by)

    def extras(self, answer: Answer, i: int, last: bool) -> bytes:
        """Members of an event beside its choices."""
        extras = b""
        if answer.usage_always:
            extras += b',"usage":%b' % encode(usage_of(answer, i + 1))
        if last and answer.kv is not None:
            extras += b',"kv_transfer_params":%b' % encode(answer.kv)
        return extras

    def whole(self, answer: Answer) -> bytes:
        full = self.envelope(answer, self.kind)
        full["choices"] = [self.full_choice(answer, each) for each in answer.sequences]
        full["service_tier"] = full["system_fingerprint"] = None
        full["usage"] = usage_of(answer)
        full["kv_transfer_params"] = answer.kv
        if answer.body.return_token_ids:
            full["prompt_token_ids"] = token_ids(answer.sequences[0].prompt.data)
        return encode(full)

    def full_choice(self, answer: Answer, sequence: Sequence) -> JSON:
        body, logprobs = answer.body, None
        if body.logprobs is not None and body.logprobs is not False:
            texts = [sequence.text(i) for i in range(sequence.length)]
            logprobs = self.logprobs(texts)
        return {
            "index": sequence.index,
            **self.choice(answer, sequence),
            "logprobs": logprobs,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": output_ids(sequence) if body.return_token_ids else None,
        }


class Completions(ChoicesApi):
    path = b"/v1/completions"
    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def prompts(self, body: Body, shape: bytes) -> list[Prompt]:
        prompt = body.prompt
        if not prompt and prompt != "":
            raise missing("prompt")
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [self.prompt(prompt, shape)]
        return [self.prompt(each, shape) for each in prompt]

    def prompt(self, prompt: str | list[int], shape: bytes) -> Prompt:
        if isinstance(prompt, str):
            return text_prompt(prompt, shape)
        return make_prompt(bytes_of(prompt), shape)

    def limit(self, body: Body) -> int | None:
        return DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens

    def content(self, answer: Answer, sequence: Sequence, i: int) -> bytes:
        text = sequence.text(i) if i < sequence.length else ""
        if answer.body.echo and i == 0:
            text = sequence.prompt.text + text
        return b'"text":%b' % encode(text)

    def logprobs(self, texts: list[str]) -> JSON:
        return {
            "text_offset": [*itertools.accumulate(map(len, texts[:-1]), initial=0)],
            "token_logprobs": [-1.0] * len(texts),
            "tokens": texts,
            "top_logprobs": [{text: -1.0} for text in texts],
        }

    def choice(self, answer: Answer, sequence: Sequence) -> JSON:
        text, prompt_logprobs = sequence.whole_text(), None
        if answer.body.echo:
            text = sequence.prompt.text + text
        if answer.body.prompt_logprobs is not None:
            ids = token_ids(sequence.prompt.data)
            prompt_logprobs = [None, *({str(i): {"logprob": -1.0}} for i in ids[1:])]
        return {"text": text, "prompt_logprobs": prompt_logprobs}


class Chat(ChoicesApi):
    path = b"/v1/chat/completions"
    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def prompts(self, body: Body, shape: bytes) -> list[Prompt]:
        if not body.messages:
            raise missing("messages")
        ids = (body.kv_transfer_params or {}).get("prompt_token_ids")
        if ids is not None and not (isinstance(ids, list) and ids):
            raise invalid("`prompt_token_ids` must be a non-empty list.")
        data = bytes_of(ids) if ids else padded(canonical(body.messages))
        return [make_prompt(data, shape)]

    def limit(self, body: Body) -> int | None:
        if body.max_completion_tokens is not None:
            return body.max_completion_tokens
        return body.max_tokens

    def opening(self, answer: Answer) -> bytes:
        return b"".join(
            b'%b{"index":%d,"delta":{"role":"assistant","content":""},'
            b'"logprobs":null,"finish_reason":null}]}\n\n'
            % (answer.prefix, sequence.index)
            for sequence in answer.sequences
        )

    def content(self, answer: Answer, sequence: Sequence, i: int) -> bytes:
        text = sequence.text(i)
        if not answer.body.forces_tool():
            return b'"delta":{"content":%b}' % encode(text)
        call: JSON = {"index": 0, "function": {"arguments": text}}
        if i == 0:
            call |= tool_call(answer, text)
        return b'"delta":%b' % encode({"tool_calls": [call]})

    def logprobs(self, texts: list[str]) -> JSON:
        entry: JSON = {"logprob": -1.0, "bytes": None, "top_logprobs": []}
        return {"content": [{"token": text} | entry for text in texts]}

    def choice(self, answer: Answer, sequence: Sequence) -> JSON:
        text: str | None = sequence.whole_text()
        calls = []
        if answer.body.forces_tool():
            calls, text = [tool_call(answer, text)], None
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message | {"tool_calls": calls, "reasoning": None}}


def tool_call(answer: Answer, text: str | None) -> JSON:
    """A forced tool call, whose arguments are the answer's text."""
    choice = answer.body.tool_choice
    tool = choice if isinstance(choice, dict) else (answer.body.tools or [{}])[0]
    name = (tool.get("function") or {}).get("name", "")
    function = {"name": name, "arguments": text}
    return {"id": f"call_{answer.id}", "type": "function", "function": function}


class Responses(Api):
    path = b"/v1/responses"
    id_prefix = "resp_"
    takes_request_id = False

    def prompts(self, body: Body, shape: bytes) -> list[Prompt]:
        if not body.input:
            raise missing("input")
        return [make_prompt(padded(canonical(body.input)), shape)]

    def limit(self, body: Body) -> int | None:
        return body.max_output_tokens

    def envelope(self, answer: Answer, status: str, output: list[JSON]) -> JSON:
        return {
            "id": answer.id,
            "object": "response",
            "created_at": answer.created,
            "model": answer.model,
            "status": status,
            "output": output,
            "kv_transfer_params": answer.kv,
            "usage": renamed_usage(answer) if output else None,
        }

    def message(self, answer: Answer, status: str, content: list[JSON]) -> JSON:
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def text_part(self, text: str) -> JSON:
        return {"type": "output_text", "text": text, "annotations": []}

    def complete(self, answer: Answer) -> JSON:
        part = self.text_part(answer.sequences[0].whole_text())
        message = self.message(answer, "completed", [part])
        return self.envelope(answer, "completed", [message])

    def place(self, answer: Answer) -> JSON:
        return {"item_id": f"msg_{answer.id}", "output_index": 0, "content_index": 0}

    def opening(self, answer: Answer) -> bytes:
        started = self.envelope(answer, "in_progress", [])
        item, part = self.message(answer, "in_progress", []), self.text_part("")
        place = self.place(answer)
        events = named_event("response.created", response=started)
        events += named_event("response.output_item.added", output_index=0, item=item)
        return events + named_event("response.content_part.added", **place, part=part)

    def token(self, answer: Answer, sequence: Sequence, i: int) -> bytes:
        place, delta = self.place(answer), sequence.text(i)
        return named_event("response.output_text.delta", **place, delta=delta)

    def closing(self, answer: Answer) -> bytes:
        return named_event("response.completed", response=self.complete(answer))

    def whole(self, answer: Answer) -> bytes:
        return encode(self.complete(answer))


class Messages(Api):
    path = b"/v1/messages"
    id_prefix = "chatcmpl-"

    def prompts(self, body: Body, shape: bytes) -> list[Prompt]:
        for name in ("messages", "max_tokens"):
            if not getattr(body, name):
                raise missing(name)
        body.ignore_eos = None  # Not a member of this endpoint.
        return [make_prompt(padded(canonical(body.messages)), shape)]

    def error(self, refused: Refused) -> bytes:
        error = {name: refused.error[name] for name in ("type", "message")}
        return encode({"type": "error", "error": error})

    def error_event(self, refused: Refused) -> bytes:
        return b"event: error\ndata: %b\n\n" % self.error(refused)

    def envelope(self, answer: Answer, content: list[JSON], reason: Any) -> JSON:
        return {
            "id": answer.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": answer.model,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": renamed_usage(answer, None if content else 0),
            "kv_transfer_params": answer.kv,
        }

    def reason(self, answer: Answer) -> str:
        by_length = answer.sequences[0].finish_reason == "length"
        return "max_tokens" if by_length else "end_turn"

    def opening(self, answer: Answer) -> bytes:
        start = named_event("message_start", message=self.envelope(answer, [], None))
        block = {"type": "text", "text": ""}
        return start + named_event("content_block_start", index=0, content_block=block)

    def token(self, answer: Answer, sequence: Sequence, i: int) -> bytes:
        delta = {"type": "text_delta", "text": sequence.text(i)}
        return named_event("content_block_delta", index=0, delta=delta)

    def closing(self, answer: Answer) -> bytes:
        delta = {"stop_reason": self.reason(answer), "stop_sequence": None}
        usage = {"output_tokens": answer.sequences[0].length}
        end = named_event("content_block_stop", index=0)
        end += named_event("message_delta", delta=delta, usage=usage)
        return end + named_event("message_stop")

    def whole(self, answer: Answer) -> bytes:
        block = {"type": "text", "text": answer.sequences[0].whole_text()}
        return encode(self.envelope(answer, [block], self.reason(answer)))


APIS: dict[bytes, Api] = {
    api.path: api for api in (Completions(), Chat(), Responses(), Messages())
}
