# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The parts of the documentation that are made from the code: `make docs`.

A part stands between two comments, `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
`test_docs.py` fails when one is not what would be written now.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path[:0] = [str(ROOT), str(TESTS), str(TESTS / "bench")]

import fault_table  # noqa: E402
import report  # noqa: E402

import disagg_proxy  # noqa: E402
import kv_events_subscriber  # noqa: E402
import moriio_proxy  # noqa: E402

# --- Parts ----------------------------------------------------------------------------


def replaced(text: str, name: str, part: str) -> str:
    """`text` with another part of that name.

    Raises:
        ValueError: there is not exactly one.

    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, after_begin = text.split(begin)
    _, after = after_begin.split(end)
    return f"{before}{begin}\n{part}\n{end}{after}"


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


# --- Flags ----------------------------------------------------------------------------


def flag_rows(parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    """Flag, default and meaning of each option of a parser but `--help`.

    Not from the text of `--help`: its layout differs between Python versions.
    """
    for action in parser._actions:
        if "--help" not in action.option_strings:
            meaning = action.help or ""
            if action.choices:
                meaning += ": " + ", ".join(f"`{each}`" for each in action.choices)
            yield [f"`{spelled(action)}`", default(action), meaning]


def spelled(action: argparse.Action) -> str:
    """An option as it is written on the command line."""
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    value = str(action.metavar or action.dest.rpartition("_")[2].upper())
    return f"{names} {value}{' ...' if action.nargs == '+' else ''}"


def default(action: argparse.Action) -> str:
    """What holds where an option is not given."""
    value = action.default
    if action.required or value == []:
        return "required"
    if value is None or value is False:
        return ""
    return f"`{value:.0f}`" if isinstance(value, float) else f"`{value}`"


def flags(
    parser: argparse.ArgumentParser, known: argparse.ArgumentParser | None = None
) -> str:
    """The table of a script's flags; without those that another one has too."""
    seen = list(flag_rows(known)) if known else []
    rows = (row for row in flag_rows(parser) if row not in seen)
    return table(["flag", "default", "meaning"], rows)


# --- Limits ---------------------------------------------------------------------------


def limit_rows(source: str) -> Iterator[list[str]]:
    """Name, value and meaning of the constants in the section of the limits.

    The meaning is the comment above a constant, or above the one before it. What the
    environment sets is no constant.
    """
    _, _, section = source.partition("# --- Limits and timeouts ")
    comment: list[str] = []
    started = False
    for line in section.partition("\n# --- ")[0].splitlines()[1:]:
        name, equals, expression = line.partition(" = ")
        if line.startswith("# "):
            comment = [*(comment if started else []), line[2:]]
        started = line.startswith("# ")
        value = getattr(disagg_proxy, name, None) if equals else None
        if isinstance(value, int | float) and "environ" not in expression:
            meaning = " ".join(comment)
            yield [f"`{name}`", measure(value, "bytes" in meaning.lower()), meaning]


def measure(value: float, in_bytes: bool) -> str:
    """A limit with its unit; seconds are floats."""
    if isinstance(value, float):
        return f"{value:g} s"
    for power, unit in ((20, "MiB"), (10, "KiB")):
        if in_bytes and value % (1 << power) == 0:
            return f"{value >> power} {unit}"
    return str(value)


def limits() -> str:
    """The table of the proxy's limits."""
    source = Path(disagg_proxy.__file__).read_text()
    return table(["constant", "value", "meaning"], limit_rows(source))


# --- Metrics --------------------------------------------------------------------------


def metric_rows() -> Iterator[list[str]]:
    """Name, type, labels and meaning of each family of metrics."""
    for family in disagg_proxy.FAMILIES:
        name = f"pd_proxy_{family.name}"
        name += "_total" if family.kind == "counter" else ""
        labels = ", ".join(f"`{each}`" for each in family.labels.split())
        yield [f"`{name}`", family.kind, labels, family.help]


def metrics() -> str:
    """The table of the proxy's metrics."""
    return table(["name", "type", "labels", "meaning"], metric_rows())


# --- Bug reports and their tests ------------------------------------------------------


def collected() -> list[str]:
    """The ids of all tests: `tests/test_x.py::test_y[z]`.

    Those with the real engine cannot be imported without it; theirs are read.

    Raises:
        CalledProcessError: a module cannot be imported.

    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    markers = ["-m", "soak or not soak", "-p", "no:cacheprovider"]
    listed = subprocess.run(
        [*command, *markers], cwd=ROOT, check=True, capture_output=True, text=True
    )
    here = [line for line in listed.stdout.splitlines() if "::" in line]
    return [*here, *with_the_real_engine()]


def with_the_real_engine() -> Iterator[str]:
    """The ids of the tests in `e2e/`."""
    for path in sorted((TESTS / "e2e").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(ROOT)}::{node.name}"


def bugs_of(test: str) -> Iterator[tuple[str, str]]:
    """Yields the ids that a test has, and what it is called in the table.

    An id stands in the name of the function (`test_b05_...`), or begins a
    parametrize id (`test_x[b05_...]`).
    """
    path, _, name = test.partition("::")
    function, _, parameters = name.partition("[")
    for word in function.split("_"):
        if is_bug(word):
            yield word, f"{path}::{function}"
    for parameter in parameters.rstrip("]").split("-"):
        word = parameter.partition("_")[0]
        if is_bug(word):
            yield word, f"{path}::{function}[{word}_...]"


def is_bug(word: str) -> bool:
    """Whether it is an id in lower case."""
    return len(word) == 3 and word[0] == "b" and word[1:].isdigit()


def bugs(tests: Iterable[str]) -> str:
    """The table id → tests."""
    named: dict[str, dict[str, None]] = defaultdict(dict)
    for test in tests:
        for bug, name in bugs_of(test):
            named[bug][name.removeprefix("tests/")] = None
    rows = ([bug.upper(), cell(list(named[bug]))] for bug in sorted(named))
    return table(["report", "tests"], rows)


def cell(names: list[str]) -> str:
    """Tests of one report, by module."""
    modules: dict[str, list[str]] = defaultdict(list)
    for name in names:
        module, _, function = name.partition("::")
        modules[module].append(f"`{function}`")
    return "<br>".join(
        f"{module}: {', '.join(functions)}" for module, functions in modules.items()
    )


# --- What the files have --------------------------------------------------------------


def file_rows() -> Iterator[list[str]]:
    """Each module below `tests/`, and the first line of its docstring."""
    for path in sorted(TESTS.rglob("*.py"), key=lambda path: (len(path.parts), path)):
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        yield [f"`{path.relative_to(TESTS)}`", said.partition("\n")[0]]


# --- Pictures -------------------------------------------------------------------------

# The colours of the pictures in `docs/`, and what they are on a dark page.
DARK = {
    "#1f2328": "#e6edf3",
    "#57606a": "#9198a1",
    "#f6f8fa": "#21262d",
    "#ddf4ff": "#0c2d6b",
    "#0969da": "#58a6ff",
    "#bc4c00": "#f0883e",
}


def darkened(picture: str) -> str:
    """A picture for dark pages."""
    for light, dark in DARK.items():
        picture = picture.replace(light, dark)
    return picture


# --- Files ----------------------------------------------------------------------------


def documents(tests: Iterable[str]) -> Iterator[tuple[Path, str]]:
    """Yields each document and the text it should have."""
    readme = ROOT / "README.md"
    proxy = disagg_proxy.argument_parser()
    text = replaced(readme.read_text(), "flags", flags(proxy))
    own = flags(moriio_proxy.argument_parser(), proxy)
    text = replaced(text, "flags of moriio_proxy.py", own)
    follow = flags(kv_events_subscriber.argument_parser())
    text = replaced(text, "flags of kv_events_subscriber.py", follow)
    for name, table_of_kind in fault_table.tables().items():
        text = replaced(text, name, table_of_kind)
    measured = json.loads((TESTS / "bench" / "measured.json").read_text())
    text = replaced(text, "performance", report.markdown(measured))
    text = replaced(text, "capacity", report.capacity(measured))
    text = replaced(text, "metrics", metrics())
    yield readme, replaced(text, "limits", limits())
    pictures = TESTS / "docs"
    request = (pictures / "request.svg").read_text()
    yield pictures / "request-dark.svg", darkened(request)
    performance = report.plot(measured)
    yield pictures / "performance.svg", performance
    yield pictures / "performance-dark.svg", darkened(performance)
    index = TESTS / "README.md"
    text = replaced(index.read_text(), "files", table(["file", "what"], file_rows()))
    yield index, replaced(text, "bugs", bugs(tests))


def main() -> None:
    """Writes the documents."""
    for path, text in documents(collected()):
        path.write_text(text)


if __name__ == "__main__":
    main()
