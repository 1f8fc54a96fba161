# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Six numbers that say whether a script is still easy to read.

    python tests/six_numbers.py SCRIPT...

Prints them beside their limits; the exit status is 1 when one is beyond. The sixth,
lines of tests for each line of the scripts, has none. A function's length counts
from `def` to its last line, docstring included.
"""

import ast
import io
import math
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def function_lengths(source: str) -> list[int]:
    """Lines of each function and method, in ascending order."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)
    ]
    return sorted((node.end_lineno or 0) - node.lineno + 1 for node in nodes)


def percentile(ascending: list[int], share: float) -> int:
    """The value that `share` of the values do not exceed."""
    return ascending[math.ceil(share * len(ascending)) - 1]


def ignored_types(source: str) -> int:
    """Comments that silence the type checker."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return sum("type: ignore" in comment for comment in comments)


def type_errors(script: Path) -> int:
    """Errors of mypy in strict mode.

    Raises:
        SystemExit: mypy itself failed.

    """
    command = [sys.executable, "-m", "mypy", "--strict", str(script)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode not in (0, 1):
        raise SystemExit(run.stdout + run.stderr)
    return run.stdout.count(": error:")


def lines(paths: list[Path]) -> int:
    """Lines of all the files."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def tests_to_source() -> float:
    """Lines of the test modules for each line of the scripts."""
    tests = lines(sorted(TESTS.rglob("test_*.py")))
    return tests / lines(sorted(TESTS.parent.glob("*.py")))


def numbers_of(script: Path) -> Iterator[tuple[str, float, float]]:
    """Yields name, value and upper limit of the numbers of one script."""
    source = script.read_text()
    lengths = function_lengths(source)
    yield "median function, lines", statistics.median(lengths), 12
    yield "90th percentile", percentile(lengths, 0.9), 35
    yield "longest", lengths[-1], 60
    yield "`type: ignore` comments", ignored_types(source), 0
    yield "errors of mypy --strict", type_errors(script), 0


def main() -> None:
    """Prints the numbers of each script, and the one of all tests and scripts."""
    beyond = False
    for script in map(Path, sys.argv[1:]):
        print(f"{script.name}: {lines([script])} lines")
        for name, value, limit in numbers_of(script):
            print(f"  {name:<24} {value:>4g}   at most {limit}")
            beyond = beyond or value > limit
    print(f"test lines for each line of all scripts: {tests_to_source():.2f}")
    raise SystemExit(beyond)


if __name__ == "__main__":
    main()
