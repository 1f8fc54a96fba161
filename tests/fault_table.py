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


class Kind(enum.Enum):
    """How a connector's legs hang together; the words are the manual's."""

    # P's answer says where the KV is, and any D can have it.
    HAND_OVER = "a hand-over"
    # Both legs name each other, so a second try is a whole new pair.
    SIDE_BY_SIDE = "a pair, side by side"
    IN_TURN = "a pair, one after the other"


CONNECTORS = {
    "auto": Kind.HAND_OVER,
    "nixl-push": Kind.SIDE_BY_SIDE,
    "mooncake": Kind.SIDE_BY_SIDE,
    "MoRIIO WRITE": Kind.SIDE_BY_SIDE,
    "MoRIIO READ": Kind.IN_TURN,
}

# How many POSTs may reach a role: of two legs that run side by side, the one that is
# closed because the other fails may not have got there.
Posts = tuple[int, ...]


class Outcome(NamedTuple):
    """What the client gets, and how many POSTs reach each role."""

    sees: Sees
    prefills: Posts
    decodes: Posts


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
        closed: the roles whose engines see their connections closed.
        hand_over: what becomes of it, in the manual's words.

    """

    phase: str
    prefills: int
    decodes: int
    closed: tuple[str, ...]
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

SERVED = Outcome(Sees.SERVED, (1,), (1,))
NOBODY = Outcome(Sees.UNAVAILABLE, (0,), (0,))


class Try(NamedTuple):
    """What a request comes to when a role fails, whatever the connector.

    Attributes:
        sees: what the client gets.
        reached: POSTs that reach the role.
        tries: hand-overs or pairs that are begun.

    """

    sees: Sees
    reached: int
    tries: int

    def outcome(self, kind: Kind, role: str) -> Outcome:
        """The same with the POSTs to the other role."""
        needs_both = self.sees in (Sees.SERVED, Sees.CUT)
        if kind is Kind.SIDE_BY_SIDE:
            other = tuple(range(int(needs_both), self.tries + 1))
        else:
            other = (int(needs_both) if role == "prefill" else self.tries,)
        counts = {role: (self.reached,)}
        return Outcome(
            self.sees, counts.get("prefill", other), counts.get("decode", other)
        )


ANSWERED = Try(Sees.SERVED, 1, 1)
# Another instance did better.
REPLACED = Try(Sees.SERVED, 2, 2)


def absent(kind: Kind, role: str) -> Row:
    """All that a role has is down; the other role is not bothered."""
    return Row(DOWN, role, NOBODY, SERVED, NOBODY, "down")


def row(
    kind: Kind,
    role: str,
    fault: str,
    tries: tuple[Try, Try, Try],
    counted: str | None = None,
    state: str = "up",
) -> Row:
    """A row from what the settings come to."""
    alone, one, both = (each.outcome(kind, role) for each in tries)
    return Row(fault, role, alone, one, both, state, counted)


def refused_by(kind: Kind, role: str, fault: str, sees: Sees, counted: str) -> Row:
    """Nothing is delivered; the instance leaves the rotation."""
    # A hand-over that was not delivered is still good for another D.
    same = kind is Kind.HAND_OVER and role == "decode"
    second = 1 if same else 2
    tries = Try(sees, 0, 1), Try(Sees.SERVED, 1, second), Try(sees, 0, second)
    return row(kind, role, fault, tries, counted, "down")


def refusal(kind: Kind, role: str, status: int) -> Row:
    """A 4xx: the request is at fault, not the instance."""
    same = Try(Sees.VERBATIM, 1, 1)
    return row(kind, role, f"answers {status}", (same, same, same))


def failure(kind: Kind, role: str, status: int) -> Row:
    """A 5xx."""
    tries = Try(Sees.VERBATIM, 1, 1), REPLACED, Try(Sees.VERBATIM, 2, 2)
    return row(kind, role, f"answers {status}", tries, "5xx")


def no_answer(kind: Kind, role: str, fault: str) -> Row:
    """The connection ends before there is anything for the client."""
    tries = Try(Sees.BAD_GATEWAY, 1, 1), REPLACED, Try(Sees.BAD_GATEWAY, 2, 2)
    return row(kind, role, fault, tries, "reset")


def broken_answer(kind: Kind, fault: str) -> Row:
    """D's connection ends when the client has had its first byte."""
    same = Try(Sees.CUT, 1, 1)
    return row(kind, "decode", fault, (same, same, same), "reset")


def silence(kind: Kind, role: str) -> Row:
    """An engine that may still be at work: nobody else is asked."""
    same = Try(Sees.TIMED_OUT, 1, 1)
    return row(kind, role, SILENT, (same, same, same), "timeout")


def closed_before(kind: Kind, role: str) -> Row:
    """The end of a kept connection was noticed in time."""
    return row(kind, role, CLOSED_BEFORE, (ANSWERED, ANSWERED, ANSWERED))


def closed_under(kind: Kind, role: str) -> Row:
    """The kept connection ends just when it is used: the request may have arrived.

    The engine's POSTs are those that reached it.
    """
    again = Try(Sees.SERVED, 1, 2)
    tries = Try(Sees.BAD_GATEWAY, 0, 1), again, again
    return row(kind, role, CLOSED_UNDER, tries, "reset")


def rows(kind: Kind) -> Iterator[Row]:
    """Yields what each failure comes to with such a connector."""
    for role in ("prefill", "decode"):
        yield absent(kind, role)
        yield refused_by(kind, role, REFUSES, Sees.BAD_GATEWAY, "refused")
        yield refused_by(kind, role, SWALLOWS, Sees.TIMED_OUT, "connect_timeout")
        yield from (refusal(kind, role, status) for status in (400, 429))
        yield from (failure(kind, role, status) for status in (500, 503))
        for fault in (RESET_EARLY, RESET_LATE, DIES_IN_HEAD):
            yield no_answer(kind, role, fault)
        for fault in (DIES_AFTER_HEAD, DIES_IN_BODY, NO_LAST_CHUNK):
            # Of a pair, the head is kept back: it may come before the KV.
            kept = fault == DIES_AFTER_HEAD and kind is not Kind.HAND_OVER
            if role == "prefill" or kept:
                yield no_answer(kind, role, fault)
            else:
                yield broken_answer(kind, fault)
        yield silence(kind, role)
        yield closed_before(kind, role)
        yield closed_under(kind, role)


def leaves(kind: Kind) -> Iterator[Leave]:
    """Yields what comes of a client that leaves."""
    beside = kind is Kind.SIDE_BY_SIDE
    yield Leave(UPLOADING, 0, 0, (), "there is none")
    if beside:
        yield Leave(PREFILLING, 1, 1, ("prefill", "decode"), "none is made")
    else:
        yield Leave(PREFILLING, 1, 0, ("prefill",), "D is never asked")
    yield Leave(CONNECTING, 1, 0, (), UNUSED[kind])
    yield Leave(BEFORE_HEAD, 1, 1, ("decode",), "D has it")
    yield Leave(IN_ANSWER, 1, 1, ("decode",), "D has it")


# What becomes of a hand-over that nobody will use.
UNUSED = {
    Kind.HAND_OVER: "released through any D",
    Kind.SIDE_BY_SIDE: "P is not told; its own limit frees it",
    Kind.IN_TURN: "P is not told; its own limit frees it",
}

# --- Cells: each is a test ------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A row in one setting.

    Attributes:
        connector: of `CONNECTORS`.
        row: what fails, and how.
        setting: "alone", "one" or "both": an attribute of the row.
        stream: whether the client asks for a stream.

    """

    connector: str
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
        words = self.connector, f"{self.row.role} {self.row.fault}", self.setting
        return ", ".join([*words, STREAMS[CONNECTORS[self.connector]][self.stream]])


# Answers a client can ask for; of pairs only the harder one, as the rules are the same.
STREAMED = {True: "stream"}
STREAMS = {
    Kind.HAND_OVER: {False: "whole", **STREAMED},
    Kind.SIDE_BY_SIDE: STREAMED,
    Kind.IN_TURN: STREAMED,
}


def cells() -> Iterator[Cell]:
    """Every row in every setting."""
    for connector, kind in CONNECTORS.items():
        for row in rows(kind):
            for setting in ("alone", "one", "both"):
                for stream in STREAMS[kind]:
                    yield Cell(connector, row, setting, stream)


# --- The manual's tables --------------------------------------------------------------


def table(heads: list[str], lines: Iterable[list[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def words(outcome: Outcome) -> str:
    """What a client gets, and how many POSTs it took."""
    counts = {"P": outcome.prefills, "D": outcome.decodes}
    posts = ", ".join(
        f"{role} {count[0]}" + (f" to {count[-1]}" if len(count) > 1 else "")
        for role, count in counts.items()
        if any(count)
    )
    return f"{outcome.sees.value} ({posts or 'nobody asked'})"


def listed(faults: list[str]) -> str:
    """Several faults as one: what they have in common is said once."""
    starts = [fault.split(" ", 1)[0] for fault in faults]
    said = [
        fault.split(" ", 1)[1] if at and starts[at - 1] == start else fault
        for at, (fault, start) in enumerate(zip(faults, starts))
    ]
    return ", ".join(said)


def failures(shown: Iterable[Row]) -> Iterator[list[str]]:
    """Yields a line for all faults that come to the same."""
    for role, of_role in groupby(shown, lambda row: row.role):
        for (outcomes, state), same in groupby(
            of_role, lambda row: (row[2:5], row.state)
        ):
            who = f"{role[0].upper()} {listed([row.fault for row in same])}"
            yield [who, *(words(each) for each in outcomes), state]


def departures(shown: Iterable[Leave]) -> Iterator[list[str]]:
    """Yields a line for each phase in which a client can leave."""
    for leave in shown:
        owners = " and ".join(f"{role[0].upper()}'s" for role in leave.closed)
        yield [leave.phase, f"closed: {owners}" if owners else "", leave.hand_over]


FAILURES = ["what fails", "one P, one D", "one of two fails", "both fail", "then"]
DEPARTURES = ["the client leaves", "engine connections", "the hand-over"]


def markdown(kind: Kind, besides: Kind | None = None) -> str:
    """Both tables of a kind; without the lines that are the same for another kind."""
    known_rows = set(rows(besides)) if besides else set()
    known_leaves = set(leaves(besides)) if besides else set()
    fails = failures(row for row in rows(kind) if row not in known_rows)
    left = departures(leave for leave in leaves(kind) if leave not in known_leaves)
    return f"{table(FAILURES, fails)}\n{table(DEPARTURES, left)}"


def tables() -> dict[str, str]:
    """The parts of the manual, by name."""
    return {
        "failures": markdown(Kind.HAND_OVER),
        "failures of pairs": markdown(Kind.SIDE_BY_SIDE, Kind.HAND_OVER),
        "failures of pairs in turn": markdown(Kind.IN_TURN, Kind.HAND_OVER),
    }
