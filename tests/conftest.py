"""For all rooms: torch computes on one thread in the process of the tests. Their tensors are small, and threads that wait for one
another spin on cores that the engines beside them need. Where pytest-xdist spreads them over processes, a room stays in one of them, as its
tests share engines and worlds; the longest rooms come first.
"""

from __future__ import annotations

import sys

import pytest

ROOMS_WITH_ENGINES = ("end_to_end", "sglang", "megatron", "cluster", "doctor", "ray")
"""The longest first."""


def _room(item: pytest.Item) -> str:
    parts = item.path.relative_to(item.config.rootpath).parts[1:-1]
    return next((room for room in ROOMS_WITH_ENGINES if room in parts), parts[0] if parts else "top")


def pytest_itemcollected(item: pytest.Item) -> None:
    """One group a room. When the whole collection is there, xdist has asked for groups already."""
    if hasattr(item.config, "workerinput"):
        item.add_marker(pytest.mark.xdist_group(_room(item)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest rooms first; in one process alone, the order of the files stays."""
    if hasattr(config, "workerinput"):
        order = {room: number for number, room in enumerate(ROOMS_WITH_ENGINES)}
        items.sort(key=lambda item: order.get(_room(item), len(order)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Now torch is loaded, where any test needs it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
