# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the READMEs say: tables in step with the code, names that exist, code that runs.

Where a table is out of step: `make docs`.
"""

import ast
import shlex
from pathlib import Path
from xml.etree import ElementTree

import docs
import pytest
from rig import COMPLETIONS, ROOT, Cluster, End, http_response

import disagg_proxy

README = (ROOT / "README.md").read_text()
DOCUMENTS = ("README.md", "tests/README.md")


@pytest.fixture(scope="module")
def tests() -> list[str]:
    """The ids of all tests."""
    return docs.collected()


def blocks(kind: str) -> list[str]:
    """The fenced blocks of the README of one kind."""
    parts = README.split(f"```{kind}\n")[1:]
    return [part.partition("```")[0] for part in parts]


# --- In step --------------------------------------------------------------------------


def test_the_tables_are_what_the_code_says(tests: list[str]) -> None:
    for path, text in docs.documents(tests):
        assert path.read_text() == text, "run `make docs`"


def test_an_id_is_found_in_names_and_in_parametrize_ids() -> None:
    names = [
        "tests/test_a.py::test_b07_x",
        "tests/test_a.py::test_b07_x[one]",
        "tests/test_a.py::test_y[b08_z-b07_w-2]",
        "tests/test_b.py::test_without[b1-bxx_]",
    ]
    assert docs.bugs(names) == (
        "| report | tests |\n"
        "| --- | --- |\n"
        "| B07 | test_a.py: `test_b07_x`, `test_y[b07_...]` |\n"
        "| B08 | test_a.py: `test_y[b08_...]` |\n"
    )


# The reports go by these numbers, with gaps.
GAPS = {7, 8, 13, 17, 25, 27, 30, 35, 42, 44, 57, 58, 73, 77, 80}
REPORTS = {f"B{number:02}" for number in range(1, 94) if number not in GAPS}


def test_every_report_has_a_test(tests: list[str]) -> None:
    named = {bug.upper() for test in tests for bug, _ in docs.bugs_of(test)}
    assert named == REPORTS


def words(text: str) -> list[str]:
    """The words of a text, without what Markdown puts around them."""
    for mark in ("<br>", *"`;,:|()"):
        text = text.replace(mark, " ")
    return text.split()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_that_is_named_exists(document: str, tests: list[str]) -> None:
    functions = {test.partition("::")[2].partition("[")[0] for test in tests}
    text = words((ROOT / document).read_text())
    named = {word.partition("[")[0] for word in text if word.startswith("test_")}
    named = {name for name in named if not name.endswith((".py", "*"))}
    assert named
    assert named <= functions


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_is_named_exists(document: str) -> None:
    text = words((ROOT / document).read_text())
    named = {word for word in text if word.endswith((".py", ".md", ".toml"))}
    upstream = {
        "disagg_proxy_demo.py",
        "disagg_proxy_pushconnector_demo.py",
        "mooncake_connector_proxy.py",
        "moriio_toy_proxy_server.py",
    }
    places = ROOT, ROOT / "tests"
    assert named
    for name in named - upstream - {"my_proxy.py"}:
        assert "*" in name or any((place / name).is_file() for place in places), name


def test_every_picture_and_every_heading_that_is_linked_is_there() -> None:
    named = [part.partition('"')[0] for part in README.split("tests/docs/")[1:]]
    assert named
    for name in named:
        ElementTree.parse(ROOT / "tests/docs" / name)
    heads = [line.lstrip("# ") for line in README.splitlines() if line[:1] == "#"]
    anchors = {head.lower().replace("'", "").replace(" ", "-") for head in heads}
    linked = {part.partition(")")[0] for part in README.split("](#")[1:]}
    assert linked
    assert linked <= anchors


def sections(source: str) -> dict[str, int]:
    """The titles of a script's sections, and the line where each begins."""
    lines = enumerate(source.splitlines(), 1)
    marked = ((line.strip("# -"), at) for at, line in lines if line[:6] == "# --- ")
    return {title.partition(":")[0]: at for title, at in marked}


def test_the_manual_names_the_sections_of_the_code() -> None:
    table = README.partition("| section | what it has |\n| --- | --- |\n")[2]
    rows = table.partition("\n\n")[0].splitlines()
    source = (ROOT / "disagg_proxy.py").read_text()
    assert [row.split(" | ")[0].lstrip("| ") for row in rows] == list(sections(source))


@pytest.mark.parametrize(
    "script", ["disagg_proxy.py", "moriio_proxy.py", "kv_events_subscriber.py"]
)
def test_a_section_uses_only_what_stands_above_it(script: str) -> None:
    source = (ROOT / script).read_text()
    ends = [*sections(source).values(), len(source.splitlines())]
    tree = ast.parse(source)
    made: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            made.setdefault(node.name, node.lineno)
        for each in ast.walk(node) if isinstance(node, ast.Assign) else []:
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                made.setdefault(each.id, each.lineno)
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    assert len(ends) > 2
    assert made
    for use in loads:
        end = next(end for end in ends if end >= use.lineno)
        assert made.get(use.id, 0) <= end, f"{use.id} in line {use.lineno}"


def test_every_section_of_the_manual_names_a_test_or_a_command() -> None:
    text, *rest = README.split("```")
    for block, after in zip(rest[::2], rest[1::2]):
        # Where a block begins with a comment, there is no heading.
        text += f"\n    {block[:1]}{after}"
    for part in text.split("\n#")[1:]:
        head, _, said = part.partition("\n")
        shown = "test_" in said or "\n    " in said or "`make " in said
        assert shown or not said.strip(), head


# --- Commands -------------------------------------------------------------------------


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text().splitlines()
    targets = {line.partition(":")[0] for line in makefile if line[:1].isalpha()}
    for document in DOCUMENTS:
        text = (ROOT / document).read_text().replace("`make ", "\n    make ")
        lines = [words(line) for line in text.splitlines()]
        called = {line[1] for line in lines if line[:1] == ["make"]}
        assert called
        assert called <= targets


def test_every_proxy_command_is_accepted() -> None:
    lines = README.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line) for line in lines if "disagg_proxy.py --" in line]
    assert commands
    for python, script, *arguments in commands:
        assert (python, script) == (".venv/bin/python", "disagg_proxy.py")
        args = disagg_proxy.argument_parser().parse_args(arguments)
        disagg_proxy.ProxyServer(args)


# --- Code -----------------------------------------------------------------------------


def written(directory: Path, name: str) -> Path:
    """The Python block of the README that has a name in it, as a script."""
    [block] = [block for block in blocks("python") if name in block]
    path = directory / "my_proxy.py"
    path.write_text(block)
    return path


ENV = {"PYTHONPATH": str(ROOT)}


def test_the_policy_in_the_readme_runs(tmp_path: Path) -> None:
    script = written(tmp_path, "FirstThatIsUp")
    with Cluster(2, 2, script=script, env=ENV) as cluster:
        for _ in range(4):
            assert cluster.post(COMPLETIONS, {"prompt": "a"}).status == 200
        counts = [len(engine.requests) for engine in cluster.engines]
        assert counts == [4, 0, 4, 0]


def test_the_callable_in_the_readme_runs(tmp_path: Path) -> None:
    script = written(tmp_path, "create_completion=echo")
    with Cluster(script=script, env=ENV) as cluster:
        response = cluster.post(COMPLETIONS, {"prompt": "two words"})
        assert (response.status, response.end) == (200, End.COMPLETE)
        assert response.body == b"data: two\n\ndata: words\n\n"
        assert not any(engine.requests for engine in cluster.engines)


STORE = ["--kv-connector", "store"]


def stored(given: object) -> bytes:
    """The answer of a prefill engine that gives this."""
    return http_response(200, {"choices": [], "kv_transfer_params": given})


def test_the_connector_in_the_readme_runs(tmp_path: Path) -> None:
    script = written(tmp_path, "StoreConnector")
    assert len(script.read_text().splitlines()) <= 30
    with Cluster(script=script, env=ENV, args=STORE) as cluster:
        [p], [d] = cluster.p, cluster.d
        body = {"prompt": "a", "max_tokens": 9, "kv_transfer_params": {"key": "mine"}}
        p.answer(stored({"key": "k1", "more": 1}))
        assert cluster.post(COMPLETIONS, body).status == 200
        assert p.next_request().json() == {
            "prompt": "a",
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": {"store": "write"},
        }
        assert d.next_request().json() == {
            "prompt": "a",
            "max_tokens": 9,
            "kv_transfer_params": {"store": "read", "key": "k1"},
        }
        p.answer(stored(None))
        assert cluster.post(COMPLETIONS, body).status == 200
        assert d.next_request().json() == {"prompt": "a", "max_tokens": 9}


@pytest.mark.parametrize("given", [{}, {"key": 1}, [], "k1"], ids=str)
def test_the_connector_in_the_readme_refuses_what_decode_must_not_have(
    tmp_path: Path, given: object
) -> None:
    script = written(tmp_path, "StoreConnector")
    with Cluster(script=script, env=ENV, args=STORE) as cluster:
        [p], [d] = cluster.p, cluster.d
        p.answer(stored(given))
        response = cluster.post(COMPLETIONS, {"prompt": "a"})
        assert (response.status, response.error()["code"]) == (502, 502)
        assert d.requests == []
