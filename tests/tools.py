"""Linters that docker/requirements-dev.txt brings, beside the interpreter that runs the tests."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest


def tool(name: str) -> str:
    """Its path; skips the test where it is not installed."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    return path or pytest.skip(
        f"{name} is not installed: pip install -r docker/requirements-dev.txt"
    )
