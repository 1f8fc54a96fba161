# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fixtures: clusters shared by the tests of one module, and the soak marker."""

from collections.abc import Iterator

import pytest
from rig import Cluster
from tls import Tls


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker of tests that take minutes."""
    config.addinivalue_line(
        "markers", "soak: takes minutes or hundreds of repetitions (pytest -m soak)"
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves soak tests out unless `-m` speaks of markers."""
    if config.option.markexpr:
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    items[:] = [item for item in items if item not in soak]
    config.hook.pytest_deselected(items=soak)


@pytest.fixture(scope="module")
def _shared_pair() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def pair(_shared_pair: Cluster) -> Iterator[Cluster]:
    """1P1D and a proxy, shared by the module, with fresh records and scripts."""
    yield _shared_pair
    _shared_pair.settle()


@pytest.fixture(scope="module")
def _shared_quad() -> Iterator[Cluster]:
    with Cluster(prefill=2, decode=2) as cluster:
        yield cluster


@pytest.fixture
def quad(_shared_quad: Cluster) -> Iterator[Cluster]:
    """2P2D and a proxy, shared by the module, with fresh records and scripts."""
    yield _shared_quad
    _shared_quad.settle()


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A certificate, valid for as long as the tests run."""
    return Tls(tmp_path_factory.mktemp("tls"))
