"""Which trainer rank feeds which engine rank."""

from __future__ import annotations

from milescli.plan.types import Slot
from milescli.runtime.build import sharing_ranks


def slots(*places: tuple[int, int | None, int | None, int | None]) -> list[Slot]:
    """(node, trainer rank, engine, engine rank) each"""
    return [
        Slot(node=node, device=index, trainer_rank=rank, engine=engine, engine_rank=shard)
        for index, (node, rank, engine, shard) in enumerate(places)
    ]


def test_on_devices_each_engine_rank_shares_its_own():
    turned = slots((0, 3, 0, 1), (0, 2, 0, 0), (1, 1, 1, 1), (1, 0, 1, 0))
    assert [sharing_ranks(turned, engine, on_cpu=False) for engine in (0, 1)] == [[2, 3], [0, 1]]


def test_beside_the_trainer_no_device_is_shared():
    assert sharing_ranks(slots((0, 0, None, None), (0, None, 0, 0)), 0, on_cpu=False) == []


def test_on_a_cpu_the_first_rank_of_a_node_feeds_every_engine_rank_there():
    one_node = slots((0, 0, 0, 0), (0, 1, 0, 1), (0, None, 1, 0))
    assert [sharing_ranks(one_node, engine, on_cpu=True) for engine in (0, 1)] == [[0, 0], [0]]
    across = slots((0, 0, None, None), (0, 1, 0, 0), (1, 2, 0, 1), (1, 3, 1, 0))
    assert [sharing_ranks(across, engine, on_cpu=True) for engine in (0, 1)] == [[0, 2], [2]]


def test_on_a_cpu_a_node_without_a_trainer_shares_nothing():
    assert sharing_ranks(slots((0, 0, None, None), (1, None, 0, 0)), 0, on_cpu=True) == []
