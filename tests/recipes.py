# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The launch recipes of README.md, so that a test runs what a reader copies.

A recipe is the shell block behind `<!-- recipe: NAME -->`: the command of the engines
that prefill and of those that decode (one, if they are the same), the proxy's, and
what else the connector needs. Engine commands are run once for each machine, with its
address as `$HOST`.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rig import ROOT

_README = ROOT / "README.md"
_MARK = "<!-- recipe: "


class Launch(NamedTuple):
    """One command of a recipe."""

    env: dict[str, str]
    # Program or script first, without `vllm serve MODEL` or the interpreter.
    arguments: list[str]

    def option(self, name: str) -> str:
        """The value of an option that is given once."""
        (at,) = (i for i, word in enumerate(self.arguments) if word == name)
        return self.arguments[at + 1]

    def kv_transfer(self) -> dict[str, Any]:
        """What an engine is told about its connector."""
        config: dict[str, Any] = json.loads(self.option("--kv-transfer-config"))
        return config


class Recipe:
    """The commands of one recipe.

    Args:
        name: as in the mark.
        changes: what stands in the recipe to what a test has instead, such as ports.

    """

    def __init__(self, name: str, changes: Mapping[str, str] | None = None) -> None:
        self.name = name
        block = _README.read_text().partition(f"{_MARK}{name} -->\n```bash\n")[2]
        text = block.partition("```")[0]
        for old, new in (changes or {}).items():
            text = text.replace(old, new)
        lines = list(commands(text))
        self._engines = [each for each in lines if "vllm serve" in each]
        self._proxies = [each for each in lines if "_proxy.py" in each]
        # What has to be done first, as shell commands.
        self.before = [
            each for each in lines if each not in self._engines + self._proxies
        ]

    @property
    def proxy(self) -> Launch:
        """The proxy's script and its arguments."""
        (line,) = self._proxies
        interpreter, *arguments = shlex.split(line)
        assert interpreter == ".venv/bin/python"
        return Launch({}, arguments)

    def engine(self, role: str, host: str) -> Launch:
        """The command of a prefill or decode engine on a machine."""
        line = self._engines[0 if role == "prefill" else -1].replace("$HOST", host)
        words = shlex.split(line)
        at = words.index("vllm")
        assert words[at : at + 2] == ["vllm", "serve"]
        env = dict(word.split("=", 1) for word in words[:at])
        return Launch(env, words[at + 3 :])


def commands(text: str) -> Iterator[str]:
    """The commands of a shell text, a line each."""
    command = ""
    for line in text.replace("\\\n", " ").splitlines():
        command += line
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # A quotation goes on in the next line.
            continue
        if words:
            yield command
        command = ""


def names() -> list[str]:
    """All recipes."""
    rest = _README.read_text().split(_MARK)[1:]
    return [each.partition(" ")[0] for each in rest]
