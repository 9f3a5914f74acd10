"""`miles env play`: one episode at the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from milescli.agents.play import Player, played
from milescli.commands.show_environments import settings_of
from milescli.console.output import Output
from milescli.core.concurrency import in_thread
from milescli.core.errors import DataError, EndpointError
from milescli.core.types import Prompt
from milescli.listings.environments import rows_of
from milescli.recipe.environments import EnvironmentSettings
from milescli.rollout.endpoint import Endpoint, base_url
from milescli.rollout.endpoint_episodes import served_model
from milescli.rollout.environments import require_environment

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Wish:
    """Options of the verb."""

    name: str
    settings: str
    data: str | None
    row: int
    model: str | None
    max_turns: int


def play_one(wish: Wish, *, output: Output) -> None:
    """Show each turn as it is done. Raises MilesError."""
    settings = EnvironmentSettings(name=wish.name, settings=settings_of(wish.settings))
    require_environment(settings)
    rows = rows_of(wish.data)
    if wish.row > len(rows):
        raise DataError(
            f"there is no row {wish.row}",
            why=f"{wish.data or 'the list of seeds'} is read up to row {len(rows)}",
            fix=f"--row {len(rows)}",
        )
    try:
        asyncio.run(_play(settings, rows[wish.row - 1], wish, output=output))
    except (EOFError, KeyboardInterrupt):
        output.note("\nthe game was left")


async def _play(
    settings: EnvironmentSettings, prompt: Prompt, wish: Wish, *, output: Output
) -> None:
    player, told = await _player(wish)
    turns, total, ended = list[dict[str, Any]](), 0.0, False
    async for turn in played(settings, prompt, player, max_turns=wish.max_turns):
        if turn.step is None:
            output.text(turn.shown)
            continue
        total, ended = total + turn.step.reward, turn.step.ended
        turns.append({"said": turn.said, "shown": turn.shown, "reward": turn.step.reward})
        if told:
            output.text(f"{told}: {turn.said}")
        if turn.shown:
            output.text(turn.shown)
    how = "ended" if ended else f"was left after {wish.max_turns} turns"
    output.json("episode", {"name": wish.name, "turns": turns, "reward": total, "ended": ended})
    output.text(f"the episode {how}: {len(turns)} turns, reward {total:g}")


async def _player(wish: Wish) -> tuple[Player, str]:
    """Who plays, and how it is called; the person's own words are on the screen already."""
    if wish.model is None:
        return _person, ""
    if not wish.model.startswith(("http://", "https://")):
        raise typer.BadParameter(
            f"--model is an endpoint, http://HOST:PORT/v1, not {wish.model}; `miles eval` measures "
            "a folder or a run"
        )
    endpoint = Endpoint(
        asker="the player",
        section="--model",
        error=EndpointError,
        url=base_url(wish.model),
        timeout_s=TIMEOUT_S,
        retries=2,
    )
    model = await served_model(endpoint, None)

    async def say(messages: Sequence[dict[str, Any]]) -> str:
        return await endpoint.said({"model": model, "messages": list(messages)})

    return say, model


async def _person(messages: Sequence[dict[str, Any]]) -> str:
    return await in_thread(lambda: input("> "))
