# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Puts the scripts into a vLLM source tree and has it judge them: `make dropin`.

What judges is the tree's own: its configuration of ruff, shellcheck and typos, its
checks of headers and imports (the hooks of its `.pre-commit-config.yaml` that look at
examples), and its test of how the MoRIIO proxy routes, which loads the proxy by path.
That test knows the proxy by upstream's file name, so it runs in a folder apart, where
ours has that name; the tree keeps its own files.
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_FILES = ("disagg_proxy.py", "moriio_proxy.py", "kv_events_subscriber.py")
SHELL_FILES = ("kv_events.sh",)
FOLDER = Path("examples/disaggregated/disaggregated_serving")
# vLLM's scripts that take file names and look at all Python files.
CHECKS = Path("tools/pre_commit")
PYTHON_CHECKS = (
    "check_spdx_header.py",
    "check_forbidden_imports.py",
    "check_boolean_context_manager.py",
    "check_torch_cuda.py",
)
SHELL_RULES = CHECKS / ".shellcheckrc"
ROUTING_TEST = Path("tests/v1/kv_connector/unit/test_moriio_proxy_routing.py")
# What that test loads.
ROUTED = FOLDER / "moriio_toy_proxy_server.py"
# Tests in that file that are about vLLM's own heartbeat, and need vLLM.
NOT_ROUTING = "not heartbeat"


def copied(tree: Path) -> Iterator[Path]:
    """Copies the scripts; yields where they are, from the top of the tree.

    Raises:
        SystemExit: it is not a vLLM source tree.

    """
    if not (tree / FOLDER).is_dir():
        raise SystemExit(f"{tree} is no vLLM source tree: it has no {FOLDER}")
    for name in (*PYTHON_FILES, *SHELL_FILES):
        shutil.copy2(ROOT / name, tree / FOLDER / name)
        yield FOLDER / name


def lints(tree: Path, files: list[Path]) -> Iterator[list[str]]:
    """Yields the commands of the tree's lint hooks."""
    scripts = Path(sysconfig.get_path("scripts"))
    python = [str(each) for each in files if each.suffix == ".py"]
    shell = [str(each) for each in files if each.suffix == ".sh"]
    yield [str(scripts / "ruff"), "check", "--no-cache", *python]
    yield [str(scripts / "ruff"), "format", "--check", "--no-cache", *python]
    yield [str(scripts / "typos"), "--force-exclude", *python, *shell]
    for name in PYTHON_CHECKS:
        if (tree / CHECKS / name).is_file():
            yield [sys.executable, str(CHECKS / name), *python]
        else:
            print(f"not run: this tree has no {CHECKS / name}")
    rules = [f"--rcfile={SHELL_RULES}"] if (tree / SHELL_RULES).is_file() else []
    yield [str(scripts / "shellcheck"), "-s", "bash", *rules, *shell]


def run(command: list[str], folder: Path) -> None:
    """Runs a command; SystemExit if it fails."""
    shown = [Path(command[0]).name, *command[1:]]
    print("$", *shown, flush=True)
    if subprocess.run(command, cwd=folder, check=False).returncode != 0:
        raise SystemExit(f"failed: {' '.join(shown)}")


def route(tree: Path) -> None:
    """Runs the tree's routing test against our proxy."""
    if not (tree / ROUTING_TEST).is_file():
        print(f"not run: this tree has no {ROUTING_TEST}")
        return
    with tempfile.TemporaryDirectory() as name:
        apart = Path(name)
        for path in (ROUTING_TEST, ROUTED):
            (apart / path).parent.mkdir(parents=True)
        shutil.copy2(tree / ROUTING_TEST, apart / ROUTING_TEST)
        shutil.copy2(tree / FOLDER / "moriio_proxy.py", apart / ROUTED)
        shutil.copy2(tree / FOLDER / "disagg_proxy.py", apart / FOLDER)
        options = ["-q", "-p", "no:cacheprovider", "--rootdir=.", "-k", NOT_ROUTING]
        run([sys.executable, "-m", "pytest", *options, str(ROUTING_TEST)], apart)


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts the scripts into a vLLM tree.")
    parser.add_argument("tree", type=Path, help="the top of a vLLM source tree")
    tree: Path = parser.parse_args().tree.resolve()
    files = list(copied(tree))
    for command in lints(tree, files):
        run(command, tree)
    route(tree)
    print(f"{len(files)} files are in {tree / FOLDER} and pass its rules.")


if __name__ == "__main__":
    main()
