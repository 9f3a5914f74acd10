"""Stands for a trainer or a fleet, and notes what it is told."""

from __future__ import annotations


class Recorder:
    """Stands for a trainer or a fleet: notes what it is told."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def __getattr__(self, order: str):
        async def obey(*arguments: object) -> None:
            self.told.append(f"{self.name}.{order}")

        return obey
