"""One small cluster of two nodes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster_in_small import SmallCluster, small_cluster, why_impossible


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    """Two nodes; the second has another value of one variable, by which it can be told apart. Ray is told of GPUs that nobody touches."""
    if reason := why_impossible():
        pytest.skip(f"no cluster in small: {reason}")
    with small_cluster(tmp_path_factory.mktemp("cluster"), gpus=4, node_environment={1: {"MILES_TEST_ODD": "yes"}}) as small:
        yield small
