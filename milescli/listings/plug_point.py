"""One thing that a user can bring: how it is called, written and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from milescli.core.isolated import Isolated
from milescli.core.registry import Registry
from milescli.data.tasks import ROWS, TASK_PREFIX
from milescli.recipe.schema import Rollout
from milescli.rollout.contract import EXAMPLES, check_agent, check_reward
from milescli.rollout.environments import ENVIRONMENTS
from milescli.rollout.episode.agents import AGENTS
from milescli.rollout.episode.episode import load_agent
from milescli.rollout.episode.generations import GENERATIONS
from milescli.rollout.rewards import REWARDS, in_processes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlugPoint:
    """One thing that a user can bring."""

    key: str
    """Of the recipe."""
    registry: Registry
    gives: str
    """What a call returns."""
    about: str
    contract: str
    """Import path of the test that it must pass."""
    body: str
    """Of a working one."""
    imports: str = ""
    """What the body needs."""
    base: str = ""
    """What a class derives from; empty for a function."""
    is_async: bool = False
    parameters: str = ""
    """Of a written one, where each takes what it likes."""

    @property
    def kind(self) -> str:
        """As the user calls it."""
        return self.registry.kind

    def command_part(self, path: str) -> str:
        """What follows `--set` where a run is to use it."""
        also = "rollout.agent=environment --set " if self.registry is ENVIRONMENTS else ""
        return f"{also}{self.setting(path)}"

    def setting(self, path: str) -> str:
        """As `--set` takes it."""
        if self.registry.in_list:
            return f"{self.key}=[{path}]"
        return f"{self.key}={TASK_PREFIX if self.registry is ROWS else ''}{path}"

    @property
    def arguments(self) -> str:
        """Between the parentheses of a function."""
        if not self.registry.signature:
            return self.parameters
        named = "" if self.kind == "agent" else "*, "
        return f"{named}{', '.join(self.registry.signature)}"

    @property
    def signature(self) -> str:
        """`(*, prompt, response, label) -> float`"""
        return f"({self.arguments}) -> {self.gives}"

    def check(self, path: str) -> None:
        """Raises a MilesError where what `path` names does not bear its contract. It may do
        anything: it is called as in a run, in a process of its own."""
        plugin = self.registry.resolve(path, key=self.key)
        if self.registry is REWARDS:
            reward: Any = in_processes(path, Rollout()) or plugin
            check_reward(reward, examples=getattr(plugin, "examples", EXAMPLES))
        elif self.registry is AGENTS:
            self.contract_test(load_agent(Rollout(agent=path)))
        elif self.registry is GENERATIONS:
            check_agent(load_agent(Rollout(generation=path)))
        else:
            what = f"the {self.kind} `{path}`"
            there = Isolated("milescli.listings.plugins:checked_there", what=what, plugin=plugin)
            there(self.kind, path)

    @property
    def contract_test(self) -> Callable[[Any], object]:
        """What raises where a plug-in does not bear its contract."""
        module, _, name = self.contract.partition(":")
        return cast("Callable[[Any], object]", getattr(import_module(module), name))
