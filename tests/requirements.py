# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prints the requirements of pyproject.toml, one line each.

The scripts are run from the checkout, never installed: only what they import
has to be. `requirements.py` prints the runtime packages, `requirements.py
GROUP` those of an optional group.
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(group: str | None) -> list[str]:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    if group is None:
        return list(project["dependencies"])
    return list(project["optional-dependencies"][group])


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1] if sys.argv[1:] else None)))
