"""For all rooms: torch computes on one thread in the process of the tests. Their tensors are small,
and threads that wait for one another spin on cores that the engines beside them need."""

from __future__ import annotations

import sys

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """Now torch is loaded, where any test needs it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
