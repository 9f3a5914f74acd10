"""Small clusters of two nodes: one that the tests of this folder share, and one for a test that
spoils it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.cluster.small_cluster import SmallCluster, small_cluster, why_impossible


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    """Two nodes; the second has another value of one variable, by which it can be recognised. Ray
    counts GPUs that nobody touches. Tests may read it and use it; whoever changes a node takes
    `own_cluster`."""
    _skip_where_impossible()
    with small_cluster(
        tmp_path_factory.mktemp("cluster"), gpus=4, node_environment={1: {"MILES_TEST_ODD": "yes"}}
    ) as small:
        yield small


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[SmallCluster]:
    """Two nodes for one test, which may spoil them."""
    _skip_where_impossible()
    with small_cluster(tmp_path) as small:
        yield small


def _skip_where_impossible() -> None:
    if reason := why_impossible():
        pytest.skip(f"no cluster in small: {reason}")
