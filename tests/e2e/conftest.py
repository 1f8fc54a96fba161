# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fixtures: the model, the process that forks engines, a plain engine to compare."""

import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from e2e.engines import HERE, LOG_TAIL, Engine, EngineServer, Fleet


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    folder = tmp_path_factory.mktemp("model")
    subprocess.run(
        [sys.executable, str(HERE / "tiny_model.py"), str(folder)],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="session")
def server(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    """Forks engines; their logs stay in a temporary folder."""
    server = EngineServer(model, tmp_path_factory.mktemp("logs"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def plain(server: EngineServer) -> Iterator[Engine]:
    """One engine without disaggregation; not ready yet, as fleets start beside it."""
    engine = server.start("plain")
    yield engine
    engine.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows the last lines of every log below a failed test."""
    report = yield
    fleet = item.funcargs.get("fleet") if isinstance(item, pytest.Function) else None
    if report.failed and isinstance(fleet, Fleet):
        for engine in [fleet.plain, *fleet.engines]:
            report.sections.append((str(engine.log), engine.log_tail()))
        log = "\n".join(fleet.proxy.log[-LOG_TAIL:])
        report.sections.append(("disagg_proxy.py", log))
    return report
