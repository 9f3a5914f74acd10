"""Settings of the environment that the agent `environment` plays in: a section of `rollout`. Part
of the schema."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from milescli.recipe.section import Positive, PositiveFloat, Section


class EnvironmentSettings(Section):
    """What the policy acts in."""

    name: str | None = None
    """frozen_lake; gymnasium, textarena, reasoning_gym (of those packages, see `settings`); or an
    import path `mypkg.games:Chess`."""
    settings: dict[str, Any] = Field(default={})
    """What it is made with, e.g. `{id: FrozenLake-v1, is_slippery: false}`."""
    step_timeout_s: PositiveFloat = 30.0
    """Of its making, of a reset and of a step. The process of one that takes longer is ended, and
    the others of that process go on in a new one."""
    processes: Positive | None = None
    """In which environments live, side by side, on each node of a run; null: half of the node's
    cores."""
    memory_gib: PositiveFloat = 8.0
    """Of each process."""
