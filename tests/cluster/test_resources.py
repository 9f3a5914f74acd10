"""Ports that are promised to servers that do not listen yet."""

from __future__ import annotations

import asyncio

import pytest

from milescli.cluster.nodes import RunNodes
from milescli.cluster.resources import NodeResources
from milescli.doctor.tiny_trainer import tiny_plan
from milescli.platform.machine import parse_machine


def test_no_port_is_promised_twice_although_nobody_listens_on_it_yet(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([[20_001], [20_001], [20_002], [20_001, 20_003], [20_004]])
    monkeypatch.setattr("milescli.cluster.resources.free_ports", lambda count, *, host: next(free))
    resources = NodeResources(
        plan=tiny_plan("cpu"),
        nodes=RunNodes(machine=parse_machine("cpu")),
        cluster=None,  # type: ignore[arg-type]
        token="t",
        api_key="k",
        temp_dir=tmp_path,
    )

    async def ask() -> list[list[int]]:
        return [
            await resources.free_ports(1, node=0),
            await resources.free_ports(1, node=0),
            await resources.free_ports(2, node=0),
        ]

    assert asyncio.run(ask()) == [[20_001], [20_002], [20_003, 20_004]]
