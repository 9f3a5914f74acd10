"""A Ray session of this computer, one for all tests of this folder: Ray keeps its token for as long
as a process lives."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from pathlib import Path

import pytest

from milescli.backends.ray.cluster import Cluster
from milescli.cluster.watchdog import start_watchdog
from milescli.core.run_processes import TOKEN_VARIABLE, processes_of
from tests.plans import PLAN


@pytest.fixture(scope="package")
def session(tmp_path_factory):
    """(cluster, token, log folder) of one Ray session for all tests of this folder."""
    token, log_dir = secrets.token_hex(8), tmp_path_factory.mktemp("logs")
    temp_dir = Path(tempfile.mkdtemp(prefix="miles-test-", dir="/tmp"))
    before = dict(os.environ)
    os.environ[TOKEN_VARIABLE] = token
    watchdog = start_watchdog(token=token, scratch_dirs=[temp_dir])
    cluster = Cluster(
        address=None,
        temp_dir=temp_dir,
        environment={"PYTHONPATH": os.getcwd(), TOKEN_VARIABLE: token},
    )
    cluster.start(PLAN)
    cluster.log_dir = log_dir
    asyncio.run(cluster.place(PLAN, timeout_s=60))
    yield cluster, token, log_dir
    cluster.stop()
    watchdog.release()
    os.environ.clear()
    os.environ.update(before)
    assert not list(processes_of(token)), "processes of the session outlived it"
    assert not temp_dir.exists()
