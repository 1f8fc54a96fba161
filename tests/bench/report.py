# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the benchmark found: summed up, as tables, as a picture."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

JSON = dict[str, Any]
Round = dict[str, Any]

# Tokens of a stream of the load that tells what a token costs.
TOKENS = 64
CLIENTS = (1, 64, 512)
BURSTS = (512, 2048)
OURS = "disagg_proxy.py"

# --- Medians --------------------------------------------------------------------------


def median(rounds: list[Round], value: Callable[[Round], float | None]) -> float | None:
    """The median of what the rounds have of a value."""
    found = []
    for each in rounds:
        try:
            number = value(each)
        except (KeyError, ZeroDivisionError):
            continue  # There is no such figure, or no right answer to divide by.
        if number is not None:
            found.append(number)
    return statistics.median(found) if found else None


def cost(load: str) -> Callable[[Round], float]:
    """Microseconds of the proxy's processor time for each answer of a load."""
    return lambda found: found[load]["cpu"] / found[load]["right"] * 1e6


def token_cost(found: Round) -> float:
    """What a token adds to a request without a stream."""
    return (cost("token")(found) - cost("request")(found)) / TOKENS


def percentile(load: str, kind: str, name: str) -> Callable[[Round], float | None]:
    """A percentile of a load, in milliseconds."""
    return lambda found: found[load][kind].get(name)


def judged(rounds: list[Round]) -> JSON:
    """How many answers came, and how many were not what they had to be."""
    found = [load for each in rounds for load in each.values() if is_load(load)]
    # A proxy that cannot hold so many streams has failed that, and nothing else.
    loads = [load for load in found if load.get("bytes each", 0) is not None]
    return {
        "answers": sum(load["asked"] for load in loads),
        "wrong": kinds_of(loads),
        "not held": kinds_of([load for load in found if load not in loads]),
        "reencoded": sum(load["reencoded"] for load in loads),
    }


def kinds_of(loads: list[JSON]) -> dict[str, int]:
    """How many answers were wrong, by what was wrong with them."""
    kinds: dict[str, int] = {}
    for load in loads:
        for kind, count in load["wrong"].items():
            kinds[kind] = kinds.get(kind, 0) + count
    return kinds


def is_load(value: object) -> bool:
    return isinstance(value, dict) and "asked" in value


def row(rounds: list[Round]) -> JSON:
    """The figures of one peer; None for those it has not."""
    figures: JSON = {
        "request": median(rounds, cost("request")),
        "token": median(rounds, token_cost),
        "100 KB": median(rounds, cost("100 KB")),
        "1 MB": median(rounds, cost("1 MB")),
        "at rest": median(rounds, lambda found: found["at rest"]),
        "stream": median(rounds, lambda found: found["open"]["bytes each"]),
    }
    for clients in CLIENTS:
        for kind in ("latency", "ttft"):
            for name in ("p50", "p99"):
                value = percentile(f"at {clients}", kind, name)
                figures[f"{kind} {clients} {name}"] = median(rounds, value)
    for size in BURSTS:
        load = f"burst of {size}"
        for name in ("p50", "p99"):
            figures[f"{load} {name}"] = median(
                rounds, percentile(load, "latency", name)
            )
        lost = [sum(found[load]["wrong"].values()) for found in rounds if load in found]
        figures[f"{load} lost"] = sum(lost)
    return figures | judged(rounds)


def summary(result: JSON) -> JSON:
    """The result with the medians in place of the rounds.

    Latencies are what a proxy adds to those of the engines themselves; those of
    bursts are whole.
    """
    found = result["found"]
    rows = {name: row(rounds) for name, rounds in found.items()}
    direct = rows.pop("no proxy")
    for figures in rows.values():
        for name in figures:
            if name.startswith(("latency", "ttft")) and figures[name] is not None:
                figures[name] -= direct[name]
    failed = {
        name: problems
        for name, rounds in found.items()
        if (problems := [each["failed"] for each in rounds if "failed" in each])
    }
    about = {name: value for name, value in result.items() if name != "found"}
    streams = [
        each["open"]["streams"]
        for rounds in found.values()
        for each in rounds
        if "open" in each
    ]
    return {
        **about,
        "failed": failed,
        "streams": max(streams, default=0),
        "rows": rows,
        "engines themselves": direct,
    }


# --- Tables ---------------------------------------------------------------------------

Cells = Sequence[str]


def number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value / scale:,.{digits}f}"


def pair(figures: JSON, name: str) -> str:
    """Median and 99th percentile of a latency."""
    return " / ".join(number(figures[f"{name} {each}"], 2) for each in ("p50", "p99"))


def costs(summed: JSON) -> list[Cells]:
    """Processor time, memory, and whether the answers were right."""
    head = ["request", "token", "100 KB", "1 MB", "MiB at rest", "KiB per stream"]
    table: list[Cells] = [["", *head, "wrong"]]
    for name, figures in summed["rows"].items():
        wrong = sum(figures["wrong"].values())
        table.append(
            (
                name,
                number(figures["request"], 1),
                number(figures["token"], 1),
                number(figures["100 KB"], 0),
                number(figures["1 MB"], 0),
                number(figures["at rest"], 0, 2**20),
                number(figures["stream"], 1, 2**10),
                f"{wrong} of {figures['answers']:,}",
            )
        )
    return table


def latencies(summed: JSON) -> list[Cells]:
    """What a proxy adds."""
    head = [f"{kind}, {n}" for kind in ("answer", "TTFT") for n in CLIENTS]
    table: list[Cells] = [("", *head)]
    for name, figures in summed["rows"].items():
        kinds = [f"{kind} {n}" for kind in ("latency", "ttft") for n in CLIENTS]
        table.append((name, *(pair(figures, kind) for kind in kinds)))
    return table


def bursts(summed: JSON) -> list[Cells]:
    """How a proxy takes many clients at once."""
    head = [f"{n}: {what}" for n in BURSTS for what in ("p50", "p99", "lost")]
    table: list[Cells] = [("", *head)]
    rows = {"no proxy": summed["engines themselves"], **summed["rows"]}
    for name, figures in rows.items():
        cells = [name]
        for size in BURSTS:
            load = f"burst of {size}"
            cells += [number(figures[f"{load} {each}"], 0) for each in ("p50", "p99")]
            cells.append(str(figures[f"{load} lost"]))
        table.append(cells)
    return table


def ratios(summed: JSON) -> list[Cells]:
    """Our figures divided by those of the others."""
    names = ["request", "token", "100 KB", "1 MB", "latency 1 p50"]
    names += [f"burst of {size} p99" for size in BURSTS]
    table: list[Cells] = [(f"{OURS} /", *names)]
    own = summed["rows"].get(OURS, {})
    for name, figures in summed["rows"].items():
        if name != OURS and own:
            cells = [
                number(own[each], 2, figures[each])
                if own[each] and figures[each]
                else "-"
                for each in names
            ]
            table.append((name, *cells))
    return table


def aligned(table: list[Cells]) -> str:
    """A table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*table)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if first else cell.rjust(width)
            for first, cell, width in zip([True] + [False] * len(cells), cells, widths)
        )
        for cells in table
    )


def piped(table: list[Cells]) -> str:
    """A table in Markdown."""
    head, *rows = table
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


TABLES: dict[str, Callable[[JSON], list[Cells]]] = {
    "Processor time of the proxy in microseconds, its memory, answers that were "
    "wrong, cut or lost": costs,
    "Milliseconds added, median / 99th percentile, by clients": latencies,
    "Bursts: milliseconds from the first connect to the last byte, of 16 tokens, one "
    "every 20 ms": bursts,
}


def remarks(summed: JSON) -> Iterable[str]:
    """Who was not there, and what else has to be said."""
    for name, why in summed["absent"].items():
        yield f"absent: {name}: {why}"
    for name, problems in summed["failed"].items():
        yield f"failed: {name}: {problems[0]}"
    for name, figures in summed["rows"].items():
        if figures["reencoded"]:
            count = figures["reencoded"]
            yield f"{name}: {count:,} answers were the same JSON in other bytes"
        for what in ("wrong", "not held"):
            kinds = ", ".join(f"{n} {kind}" for kind, n in figures[what].items())
            if kinds:
                yield f"{name}: {what}: {kinds}"
    yield (
        f"memory of a stream: at {summed['streams']:,} that are open, if all can be: "
        "descriptors are limited"
    )
    yield f"{summed['rounds']} rounds, {summed['when']}, Python {summed['python']}"


def text(summed: JSON) -> str:
    """All of it for a terminal."""
    parts = [f"{title}\n\n{aligned(make(summed))}" for title, make in TABLES.items()]
    parts.append(f"Ratios\n\n{aligned(ratios(summed))}")
    return "\n\n".join([*parts, "\n".join(remarks(summed))])


def markdown(summed: JSON) -> str:
    """The tables for README.md."""
    parts = [f"{title}:\n\n{piped(make(summed))}" for title, make in TABLES.items()]
    return "\n\n".join([*parts, "\n".join(f"- {each}" for each in remarks(summed))])


def capacity(summed: JSON) -> str:
    """What one core does, for README.md."""
    own = summed["rows"][OURS]
    lines = [
        f"1,000 requests a second: {own['request'] / 1000:.3f} cores",
        f"1,000 requests of 100 KB a second: {own['100 KB'] / 1000:.2f} cores",
        f"100,000 streamed tokens a second: {own['token'] / 10:.2f} cores",
        f"10,000 open streams: {own['stream'] * 10_000 / 2**20:.0f} MiB",
    ]
    return "\n".join(f"- {line}" for line in lines)


# --- The picture ----------------------------------------------------------------------

WIDTH, ROW, TOP, NAMES, PANEL, GAP, BAR = 760, 24, 54, 166, 182, 24, 14
# What the longest number takes.
FIGURE = 52
# What each panel shows: title, digits after the point.
PANELS = {
    "request": ("per request", 1),
    "token": ("per streamed token", 1),
    "100 KB": ("per request of 100 KB", 0),
}
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
# A bar that would leave no room for the others is cut at so many times the longest.
CUT = 1.3


def plot(summed: JSON) -> str:
    """Processor time as bars: SVG, in the colours of the other pictures."""
    rows = {
        name: figures
        for name, figures in summed["rows"].items()
        if figures["request"] is not None
    }
    height = TOP + ROW * len(rows) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="{FONT}" font-size="13" '
        f'fill="#1f2328">',
        "<title>Processor time of the proxy for a request, a token, 100 KB</title>",
        '<text x="0" y="16" fill="#57606a">Microseconds of processor time</text>',
    ]
    for line, name in enumerate(rows):
        weight = ' font-weight="600"' if is_ours(name) else ""
        y = TOP + ROW * line + BAR - 2
        parts.append(f'<text x="0" y="{y}"{weight}>{label(summed, name)}</text>')
    for at, (key, (title, digits)) in enumerate(PANELS.items()):
        left = NAMES + at * (PANEL + GAP)
        parts.append(f'<text x="{left}" y="38" font-weight="600">{title}</text>')
        parts += bars({n: f[key] for n, f in rows.items()}, left, digits)
    return "\n".join([*parts, "</svg>", ""])


def is_ours(name: str) -> bool:
    return "_proxy.py" in name


def label(summed: JSON, name: str) -> str:
    one_leg = summed["peers"][name]["legs"] == 1
    return name + (" (one leg)" if one_leg else "")


def bars(values: dict[str, float | None], left: int, digits: int) -> Iterable[str]:
    """One panel."""
    known = sorted(value for value in values.values() if value is not None)
    longest = min(known[-1], known[-2] * CUT)
    for line, (name, value) in enumerate(values.items()):
        if value is None:
            continue
        y = TOP + ROW * line
        size = (PANEL - FIGURE) * min(value, longest) / longest
        fill = 'fill="#0969da"' if is_ours(name) else 'fill="#57606a" opacity="0.55"'
        # A bar that is cut short shows it by a gap.
        parts = (
            [(0.0, size)] if value <= longest else [(0.0, size - 16), (size - 12, size)]
        )
        for start, stop in parts:
            box = f'x="{left + start:.1f}" y="{y}" width="{stop - start:.1f}"'
            yield f'<rect {box} height="{BAR}" rx="2" {fill}/>'
        at = f'x="{left + size + 5:.1f}" y="{y + BAR - 2}"'
        yield f"<text {at}>{number(value, digits)}</text>"
