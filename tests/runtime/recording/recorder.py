"""Stands for a trainer or a fleet, and notes what it is told."""

from __future__ import annotations

from milescli.core.events import PublishStats
from milescli.core.types import EngineAddress


class Recorder:
    """Stands for a trainer or a fleet: notes what it is told."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told
        self.engines: list[EngineAddress] = [EngineAddress(url="http://127.0.0.1:1")]

    def __getattr__(self, order: str):
        async def obey(*arguments: object) -> object:
            self.told.append(f"{self.name}.{order}")
            return {"pause": PublishStats(), "publish": 0}.get(order)

        return obey
