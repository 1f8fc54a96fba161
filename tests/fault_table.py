# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a failure comes to: the rows of the fault matrix, as data.

`test_faults.py` makes every row happen, and `markdown()` is the table in the manual,
so what is promised and what is tested are one thing. The rules behind the rows:

* Nothing has reached an engine that refused: another one gets the same.
* Prefill can be done again anywhere; a hand-over is delivered once only, so a decode
  instance that failed is replaced together with the hand-over it had.
* A 4xx is an answer. A 5xx is one too when nobody else is left to ask.
* Once the client has a byte, the answer can only be cut.
"""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

# --- What can be said of one request --------------------------------------------------


class Sees(enum.Enum):
    """What the client gets; the words are the manual's."""

    SERVED = "200"
    # Status and body of the engine that failed.
    VERBATIM = "its answer, unchanged"
    # Error objects of the proxy's own.
    BAD_GATEWAY = "502"
    UNAVAILABLE = "503 with `Retry-After`"
    TIMED_OUT = "504"
    # What the engine sent, and no ending.
    CUT = "cut where it stopped"


class Outcome(NamedTuple):
    """What the client gets, and how many POSTs reached each role."""

    sees: Sees
    prefills: int
    decodes: int


class Row(NamedTuple):
    """One way to fail, and what it comes to, streamed or not.

    Attributes:
        fault: what an instance does.
        role: whose instance does it.
        alone: with one instance in each role.
        one: with two in each role, one of which fails.
        both: with two in each role, both of which fail.
        state: of an instance that failed, in /status.
        counted: how /status counts it: a key of `failures`.

    """

    fault: str
    role: str
    alone: Outcome
    one: Outcome
    both: Outcome
    state: str = "up"
    counted: str | None = None


class Leave(NamedTuple):
    """A client that goes away, and what the engines see of it.

    Attributes:
        phase: when it goes.
        prefills: POSTs to prefill engines.
        decodes: POSTs to decode engines.
        closed: the role whose engine sees its connection closed, if any does.
        hand_over: what becomes of it, in the manual's words.

    """

    phase: str
    prefills: int
    decodes: int
    closed: str | None
    hand_over: str


# --- The rows -------------------------------------------------------------------------

# What an instance does; 4xx and 5xx besides.
DOWN = "is down"
REFUSES = "refuses the connection"
SWALLOWS = "does not take the connection in time"
RESET_EARLY = "resets before it has read the request"
RESET_LATE = "resets when it has read the request"
DIES_IN_HEAD = "dies within the head"
DIES_AFTER_HEAD = "dies right after the head"
DIES_IN_BODY = "dies within the body"
NO_LAST_CHUNK = "closes without the last chunk"
SILENT = "is silent for `--first-byte-timeout`"
CLOSED_BEFORE = "closed the kept connection"
CLOSED_UNDER = "closes the kept connection as it is used"

# When a client leaves.
UPLOADING = "while it sends its request"
PREFILLING = "while P works"
CONNECTING = "while D is being connected to"
BEFORE_HEAD = "before D's first byte"
IN_ANSWER = "within D's answer"

SERVED = Outcome(Sees.SERVED, 1, 1)
# A second prefill, and where D was at fault a second decode.
SECOND_PREFILL = Outcome(Sees.SERVED, 2, 1)
SECOND_DECODE = Outcome(Sees.SERVED, 2, 2)
CUT = Outcome(Sees.CUT, 1, 1)


def refused_by(role: str, fault: str, sees: Sees, counted: str) -> Row:
    """Nothing is delivered; the instance leaves the rotation."""
    none = Outcome(sees, int(role == "decode"), 0)
    return Row(fault, role, none, SERVED, none, "down", counted)


def no_answer_of_prefill(fault: str) -> Row:
    """P's connection ends before its answer does."""
    alone = Outcome(Sees.BAD_GATEWAY, 1, 0)
    both = Outcome(Sees.BAD_GATEWAY, 2, 0)
    return Row(fault, "prefill", alone, SECOND_PREFILL, both, counted="reset")


def no_answer_of_decode(fault: str) -> Row:
    """D's connection ends before the first byte for the client."""
    alone = Outcome(Sees.BAD_GATEWAY, 1, 1)
    both = Outcome(Sees.BAD_GATEWAY, 2, 2)
    return Row(fault, "decode", alone, SECOND_DECODE, both, counted="reset")


def broken_answer_of_decode(fault: str) -> Row:
    """D's connection ends when the client has had its first byte."""
    return Row(fault, "decode", CUT, CUT, CUT, counted="reset")


def refusal(role: str, status: int) -> Row:
    """A 4xx: the request is at fault, not the instance."""
    same = Outcome(Sees.VERBATIM, 1, int(role == "decode"))
    return Row(f"answers {status}", role, same, same, same)


def failure_of_prefill(status: int) -> Row:
    """P answers 5xx."""
    alone, both = Outcome(Sees.VERBATIM, 1, 0), Outcome(Sees.VERBATIM, 2, 0)
    fault = f"answers {status}"
    return Row(fault, "prefill", alone, SECOND_PREFILL, both, counted="5xx")


def failure_of_decode(status: int) -> Row:
    """D answers 5xx."""
    alone, both = Outcome(Sees.VERBATIM, 1, 1), Outcome(Sees.VERBATIM, 2, 2)
    fault = f"answers {status}"
    return Row(fault, "decode", alone, SECOND_DECODE, both, counted="5xx")


def silence(role: str) -> Row:
    """An engine that may still be at work: nobody else is asked."""
    same = Outcome(Sees.TIMED_OUT, 1, int(role == "decode"))
    return Row(SILENT, role, same, same, same, counted="timeout")


def closed_before(role: str) -> Row:
    """The end of a kept connection was noticed in time."""
    return Row(CLOSED_BEFORE, role, SERVED, SERVED, SERVED)


def closed_under(role: str) -> Row:
    """The kept connection ends just when it is used: the request may have arrived.

    The engine's POSTs are those that reached it.
    """
    again = SERVED if role == "prefill" else SECOND_PREFILL
    alone = Outcome(Sees.BAD_GATEWAY, int(role == "decode"), 0)
    return Row(CLOSED_UNDER, role, alone, again, again, counted="reset")


def absent(role: str) -> Row:
    """All that a role has is down; the other role is not bothered."""
    none = Outcome(Sees.UNAVAILABLE, 0, 0)
    return Row(DOWN, role, none, SERVED, none, "down")


ROWS = [
    absent("prefill"),
    refused_by("prefill", REFUSES, Sees.BAD_GATEWAY, "refused"),
    refused_by("prefill", SWALLOWS, Sees.TIMED_OUT, "connect_timeout"),
    refusal("prefill", 400),
    refusal("prefill", 429),
    failure_of_prefill(500),
    failure_of_prefill(503),
    no_answer_of_prefill(RESET_EARLY),
    no_answer_of_prefill(RESET_LATE),
    no_answer_of_prefill(DIES_IN_HEAD),
    no_answer_of_prefill(DIES_AFTER_HEAD),
    no_answer_of_prefill(DIES_IN_BODY),
    no_answer_of_prefill(NO_LAST_CHUNK),
    silence("prefill"),
    closed_before("prefill"),
    closed_under("prefill"),
    absent("decode"),
    refused_by("decode", REFUSES, Sees.BAD_GATEWAY, "refused"),
    refused_by("decode", SWALLOWS, Sees.TIMED_OUT, "connect_timeout"),
    refusal("decode", 400),
    refusal("decode", 429),
    failure_of_decode(500),
    failure_of_decode(503),
    no_answer_of_decode(RESET_EARLY),
    no_answer_of_decode(RESET_LATE),
    no_answer_of_decode(DIES_IN_HEAD),
    broken_answer_of_decode(DIES_AFTER_HEAD),
    broken_answer_of_decode(DIES_IN_BODY),
    broken_answer_of_decode(NO_LAST_CHUNK),
    silence("decode"),
    closed_before("decode"),
    closed_under("decode"),
]

LEAVES = [
    Leave(UPLOADING, 0, 0, None, "there is none"),
    Leave(PREFILLING, 1, 0, "prefill", "D is never asked"),
    Leave(CONNECTING, 1, 0, None, "released through any D"),
    Leave(BEFORE_HEAD, 1, 1, "decode", "D has it"),
    Leave(IN_ANSWER, 1, 1, "decode", "D has it"),
]

# --- Cells: each is a test ------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A row in one setting.

    Attributes:
        row: what fails, and how.
        setting: "alone", "one" or "both": an attribute of the row.
        stream: whether the client asks for a stream.

    """

    row: Row
    setting: str
    stream: bool

    @property
    def size(self) -> int:
        """Instances in each role."""
        return 1 if self.setting == "alone" else 2

    @property
    def outcome(self) -> Outcome:
        """What is expected."""
        outcome: Outcome = getattr(self.row, self.setting)
        return outcome

    def __str__(self) -> str:
        kind = "stream" if self.stream else "whole"
        return f"{self.row.role} {self.row.fault}, {self.setting}, {kind}"


def cells() -> Iterator[Cell]:
    """Every row in every setting."""
    for row in ROWS:
        for setting in ("alone", "one", "both"):
            for stream in (False, True):
                yield Cell(row, setting, stream)


# --- The manual's tables --------------------------------------------------------------


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def words(outcome: Outcome) -> str:
    """What a client gets, and how many POSTs it took."""
    counts = {"P": outcome.prefills, "D": outcome.decodes}
    posts = ", ".join(f"{role} {count}" for role, count in counts.items() if count)
    return f"{outcome.sees.value} ({posts or 'nobody asked'})"


def listed(faults: list[str]) -> str:
    """Several faults as one: what they have in common is said once."""
    starts = [fault.split(" ", 1)[0] for fault in faults]
    said = [
        fault.split(" ", 1)[1] if at and starts[at - 1] == start else fault
        for at, (fault, start) in enumerate(zip(faults, starts))
    ]
    return ", ".join(said)


def failures() -> Iterator[list[str]]:
    """Yields a line for all faults that come to the same."""
    for role, rows in groupby(ROWS, lambda row: row.role):
        for (outcomes, state), same in groupby(
            rows, lambda row: (row[2:5], row.state == "down")
        ):
            who = f"{role[0].upper()} {listed([row.fault for row in same])}"
            after = "down" if state else "up"
            yield [who, *(words(each) for each in outcomes), after]


def departures() -> Iterator[list[str]]:
    """Yields a line for each phase in which a client can leave."""
    for leave in LEAVES:
        seen = f"{leave.closed[0].upper()}'s is closed" if leave.closed else "none"
        yield [leave.phase, seen, leave.hand_over]


def markdown() -> str:
    """Both tables; in parentheses the POSTs that reach each role."""
    heads = ["what fails", "one P, one D", "one of two fails", "both fail", "then"]
    left = ["the client leaves", "engine connection", "the hand-over"]
    return f"{table(heads, failures())}\n{table(left, departures())}"


if __name__ == "__main__":
    print(markdown())
