# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs a proxy script with some of its limits scaled down.

    python tests/scaled_proxy.py disagg_proxy.py KEEP_ALIVE_TIMEOUT=0.5 -- ARGUMENTS

The limits are module constants that the script reads when it needs them. So the
script is imported, each constant is set wherever a module of the project holds it,
and the script's `main` runs with ARGUMENTS: the same code, only less patient.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(script: Path) -> ModuleType:
    """Imports a script by its path, under its own name."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec and spec.loader, script
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    return module


def scale(directory: Path, name: str, value: str) -> None:
    """Sets a constant in every imported module that lies in `directory`.

    Raises:
        SystemExit: no module has the constant.

    """
    number = float(value) if "." in value else int(value)
    holders = [
        module
        for module in sys.modules.values()
        if Path(getattr(module, "__file__", None) or "/").parent == directory
        and hasattr(module, name)
    ]
    if not holders:
        raise SystemExit(f"no such limit: {name}")
    for holder in holders:
        setattr(holder, name, number)


def main() -> None:
    """Splits the command line at `--`, scales, runs."""
    at = sys.argv.index("--")
    script, *limits = sys.argv[1:at]
    path = Path(script).resolve()
    module = load(path)
    for limit in limits:
        name, _, value = limit.partition("=")
        scale(path.parent, name, value)
    sys.argv = [script, *sys.argv[at + 1 :]]
    module.main()


if __name__ == "__main__":
    main()
