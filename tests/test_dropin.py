# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`make dropin` on a stand-in for a vLLM source tree: its folders, rules and test.

The stand-in's rules are those of vLLM 0.33.0 as far as they look at examples.
"""

import subprocess
import sys
from pathlib import Path

import dropin
import pytest
from moriio_rig import Proxy
from rig import COMPLETIONS, ROOT, Cluster

RULES = """\
[tool.ruff]
line-length = 88
[tool.ruff.lint]
select = ["D", "E", "F", "UP", "B", "ISC", "SIM", "I", "G", "INP"]
ignore = [
    "D100", "D101", "D102", "D103", "D104", "D105", "D106", "D107", "D203", "D205",
    "D209", "D213", "D301", "D400", "D401", "D404", "D415", "E731", "F403", "F405",
    "B007", "B905", "UP032", "UP042",
]
[tool.ruff.lint.per-file-ignores]
"!vllm/**" = ["INP"]
"""
# A check that says which files it was given, and refuses one import.
CHECK = """\
import sys

for path in sys.argv[1:]:
    print("checked", path)
sys.exit(any("\\nimport re\\n" in open(path).read() for path in sys.argv[1:]))
"""
ROUTING_TEST = """\
import importlib.util
from collections import Counter
from pathlib import Path

PROXY = "examples/disaggregated/disaggregated_serving/moriio_toy_proxy_server.py"


def test_shares():
    path = Path(__file__).parents[4] / PROXY
    spec = importlib.util.spec_from_file_location("proxy_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    two = [{"dp_size": 8, "tp_size": 1}] * 2
    hits = Counter(module.flat_interleaved_dp_route(n, two) for n in range(1, 33))
    assert set(hits.values()) == {2} and len(hits) == 16


def test_heartbeat():
    import vllm.not_needed_here
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The stand-in; it has files of other names in the folder, as vLLM has."""
    top = tmp_path / "vllm tree"
    for folder in (dropin.FOLDER, dropin.CHECKS, dropin.ROUTING_TEST.parent):
        (top / folder).mkdir(parents=True)
    (top / "pyproject.toml").write_text(RULES)
    (top / dropin.CHECKS / "check_forbidden_imports.py").write_text(CHECK)
    (top / dropin.ROUTING_TEST).write_text(ROUTING_TEST)
    (top / dropin.ROUTED).write_text("raise SystemExit('not this one')\n")
    return top


def drop(tree: Path) -> subprocess.CompletedProcess[str]:
    """Runs what the target runs."""
    command = [sys.executable, str(ROOT / "tests/dropin.py"), str(tree)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_target_runs_the_script_on_the_tree_it_is_given(tree: Path) -> None:
    command = ["make", "--dry-run", "dropin", f"VLLM={tree}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert f'tests/dropin.py "{tree}"' in shown.stdout
    without = subprocess.run(command[:3], cwd=ROOT, capture_output=True, text=True)
    assert without.returncode != 0
    assert "VLLM=" in without.stderr


def test_the_copies_pass_the_trees_rules_and_its_routing_test(tree: Path) -> None:
    done = drop(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("checked examples/") == len(dropin.PYTHON_FILES)
    assert "1 passed, 1 deselected" in done.stdout
    assert "not run: this tree has no tools/pre_commit/check_spdx_header.py" in (
        done.stdout
    )
    for name in (*dropin.PYTHON_FILES, *dropin.SHELL_FILES):
        copy, original = tree / dropin.FOLDER / name, ROOT / name
        assert copy.read_bytes() == original.read_bytes()
        assert copy.stat().st_mode == original.stat().st_mode
    assert (tree / dropin.ROUTED).read_text() == "raise SystemExit('not this one')\n"


def test_both_proxies_run_from_the_tree(tree: Path) -> None:
    list(dropin.copied(tree))
    folder = tree / dropin.FOLDER
    with Cluster(script=folder / "disagg_proxy.py") as cluster:
        assert cluster.post(COMPLETIONS, {"prompt": "a"}).status == 200
        assert [len(engine.requests) for engine in cluster.engines] == [1, 1]
    with Proxy(script=folder / "moriio_proxy.py") as proxy:
        assert proxy.request("GET", "/health").body == b"ok"


BREAKS = {
    "a rule of ruff": ("pyproject.toml", "line-length = 88", "line-length = 40"),
    "a check": (
        str(dropin.CHECKS / "check_forbidden_imports.py"),
        "import re\\n",
        "import asyncio\\n",
    ),
    "the routing test": (str(dropin.ROUTING_TEST), "== {2}", "== {3}"),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_what_the_tree_refuses_fails(tree: Path, broken: str) -> None:
    name, now, then = BREAKS[broken]
    text = (tree / name).read_text()
    assert now in text
    (tree / name).write_text(text.replace(now, then))
    done = drop(tree)
    assert done.returncode != 0
    assert "failed: " in done.stderr


def test_what_is_no_vllm_tree_is_refused(tmp_path: Path) -> None:
    done = drop(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is no vLLM source tree" in done.stderr
