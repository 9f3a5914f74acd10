"""For all rooms: what their tests start, and which of them `make test` leaves out, as markers;
properties that are held to no time and try
the same examples each time; and one thread for torch in the process of the tests. Their tensors are
small, and threads that wait for one another spin on cores that the engines beside them need."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.chosen import left_out

# how long an example takes says what runs beside it; and the same code has the same outcome, until
# somebody looks for other examples: pytest --hypothesis-profile explore
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("beside", settings.get_profile("explore"), derandomize=True)
settings.load_profile("beside")

# a shell that runs a set beside others lets it ignore Ctrl-C, and so would every process of a test
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

STARTS = {
    "backends/ray": "ray",
    "backends/megatron": "trainer",
    "end_to_end": "engine",
}
"""Folder -> the marker of all its tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them before anything is chosen by a marker."""
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parent
        for prefix, marker in STARTS.items():
            if folder.is_relative_to(prefix):
                item.add_marker(marker)
    for item in left_out(items):
        item.add_marker("thorough")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Now torch is loaded, where any test needs it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
