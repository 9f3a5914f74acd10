"""Decides which processes query the engines, score the samples and hold them until they are trained
on: the driver, or several separate ones. Pure; called by `make`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from milescli.core.errors import FitError
from milescli.core.plug_points import (
    ADVANTAGES,
    AGENTS,
    AGGREGATIONS,
    CURRICULA,
    FILTERS,
    GENERATIONS,
    SAMPLE_FILTERS,
    SELECTIONS,
    SHAPINGS,
    TOOLS,
)
from milescli.core.units import MIB
from milescli.plan.types import EngineLayout, Log
from milescli.platform.machine import Machine
from milescli.recipe.agents import PACKAGE_AGENTS
from milescli.recipe.schema import Recipe
from milescli.recipe.train import TURN_ESTIMATORS

ENGINES_PER_COLLECTOR = 256
"""Engines that one process queries: a sample takes 0.3 to 0.7 ms of its core, so 16,384 samples in
a step of a minute take about a fifth of the core of each of four processes."""
COLLECTOR_BYTES = 450 * MIB
"""Main memory of a collecting process, without its samples: Python, the tokenizer, the reward, and
for agents that chat SGLang's parsers with torch."""
HELPER_BYTES = 100 * MIB
"""Main memory of a process that runs environments, an agent or a server for a collecting process:
30 MiB of Python, and the imports of a package of environments."""
DRIVERS_PACKAGES = ("openenv",)
"""Environments of packages that `miles env install` installs on the driver's node."""


def choose_collectors(recipe: Recipe, engines: EngineLayout, log: Log) -> int:
    """Return the number of collecting processes; 0: the driver collects. With several adapters,
    each adapter has that many. Raises FitError if the recipe asks for some and the run cannot have
    them."""
    wanted = recipe.machine.collectors
    num = -(-engines.num // ENGINES_PER_COLLECTOR) if wanted is None else wanted
    if not engines.num or (wanted is None and num == 1) or num == 0:
        return 0
    refuse_pinned(recipe)
    if (why := why_in_driver(recipe)) is not None:
        log.note("machine.collectors", 0, f"{num} would serve {engines.num} engines, but {why}")
        return 0
    reason = (
        f"one for each {ENGINES_PER_COLLECTOR} of {engines.num} engines"
        if wanted is None
        else "pinned by `machine.collectors`"
    )
    if several := len(recipe.adapters):
        num = several * -(-num // several)
        reason += f", and as many for each of {several} adapters"
    log.note("machine.collectors", num, reason)
    return num


def refuse_pinned(recipe: Recipe) -> None:
    """Raise FitError if the recipe asks for collecting processes, and they cannot collect for
    it."""
    wanted = recipe.machine.collectors
    if wanted and (why := why_in_driver(recipe)) is not None:
        raise FitError(
            "this run collects its samples in the driver",
            why=f"machine.collectors is {wanted}, but {why}",
            fix="--set machine.collectors=null",
        )


def why_in_driver(recipe: Recipe) -> str | None:
    """Return the reason why only the driver can collect for this recipe; None if other processes
    can."""
    rollout, train = recipe.rollout, recipe.train
    hooks = [
        name
        for name in ("all_samples", "before_step", "after_step")
        if getattr(recipe.run.hooks, name) is not None
    ]
    own = {
        "rollout.filter": rollout.filter in FILTERS.builtin,
        "rollout.sample_filter": rollout.sample_filter in SAMPLE_FILTERS.builtin,
        "rollout.shaping": rollout.shaping in SHAPINGS.builtin,
        "rollout.selection": rollout.selection in SELECTIONS.builtin,
        "data.curriculum": recipe.data.curriculum in CURRICULA.builtin,
        "train.advantage": train.advantage in ADVANTAGES.builtin,
        "train.aggregation": train.aggregation in AGGREGATIONS.builtin,
    }
    reasons = {
        f"the objective `{train.objective}` makes its sequences there": train.objective != "policy",
        f"`train.advantage={train.advantage}` with `train.normalize_std=batch` compares the tokens "
        "of all groups": train.advantage in TURN_ESTIMATORS and train.normalize_std == "batch",
        f"`run.hooks.{'`, `'.join(hooks)}` is given the samples": bool(hooks),
        **{f"`{key}` is your own and is given the samples": not ours for key, ours in own.items()},
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def collector_nodes(recipe: Recipe, count: int, nodes: Sequence[int]) -> list[int]:
    """Return [count] the node of each collecting process: the nodes of the run in turn; or always
    the driver's, the first, if episodes need programs that only this node is known to have."""
    rollout = recipe.rollout
    starts_servers = any(server.command for server in rollout.mcp.values())
    in_package = rollout.plays_environment and rollout.environment.name in DRIVERS_PACKAGES
    if starts_servers or in_package or rollout.agent in PACKAGE_AGENTS:
        return [nodes[0]] * count
    return [nodes[number % len(nodes)] for number in range(count)]


def num_helpers(recipe: Recipe, num_collectors: int, *, num_cores: int) -> int:
    """Return the number of processes that the collectors of one node start: for environments, the
    user's agent, MCP servers, packages of environments."""
    rollout = recipe.rollout
    if not num_collectors:
        return 0
    own_agent = not all(
        (
            rollout.agent in AGENTS.builtin,
            rollout.generation in GENERATIONS.builtin,
            all(name in TOOLS.builtin for name in rollout.tools),
        )
    )
    servers = sum(bool(server.command) for server in rollout.mcp.values())
    each = own_agent + (rollout.agent in PACKAGE_AGENTS) + servers
    played = rollout.environment.processes or max(1, num_cores // 2)
    environments = max(num_collectors, played) if rollout.plays_environment else 0
    return num_collectors * each + environments


def collecting_bytes(
    recipe: Recipe, machine: Machine, count: int, *, nodes: Sequence[int]
) -> dict[int, int]:
    """Return node -> bytes of main memory of the collecting processes and of those that they start,
    without their samples. `nodes`: those of the run."""
    return {
        node: own * COLLECTOR_BYTES
        + HELPER_BYTES * num_helpers(recipe, own, num_cores=machine.nodes[node].cpu_cores)
        for node, own in Counter(collector_nodes(recipe, count, nodes)).items()
    }
