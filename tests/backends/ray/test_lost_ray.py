"""Leaving Ray after it was ended together with us: SIGTERM to the whole process group, as `timeout`
and some schedulers send it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(400)
def test_a_session_whose_ray_is_gone_is_left_in_order() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.ray.lost_ray"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=360,
        start_new_session=True,
    )
    assert done.returncode == 0 and "left" in done.stdout, done.stderr
