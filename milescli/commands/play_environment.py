"""`miles env play`: one episode at the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from milescli.agents.play import Game
from milescli.commands.show_environments import settings_of
from milescli.console.output import Output
from milescli.core.errors import DataError, EndpointError
from milescli.listings.environments import rows_of
from milescli.recipe.environments import EnvironmentSettings
from milescli.rollout.endpoint import Endpoint, base_url
from milescli.rollout.endpoint_episodes import served_model
from milescli.rollout.environments import Step, require_environment

TIMEOUT_S = 120.0
Player = Callable[[Sequence[dict[str, Any]]], str]
"""The messages so far -> what is done."""


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
    with asyncio.Runner() as runner:
        game = Game(settings, rows[wish.row - 1])
        try:
            runner.run(game.begin())
            _play(game, wish, runner, output=output)
        except (EOFError, KeyboardInterrupt):
            output.note("\nthe game was left")
        finally:
            runner.run(game.close())


def _play(game: Game, wish: Wish, runner: asyncio.Runner, *, output: Output) -> None:
    say, told = _player(wish, runner)
    output.text(game.messages[-1]["content"])
    turns, step = list[dict[str, Any]](), Step()
    while not step.ended and len(turns) < wish.max_turns:
        said = say(game.messages)
        step = runner.run(game.act(said))
        turns.append({"said": said, "shown": step.observation, "reward": step.reward})
        if told:
            output.text(f"{told}: {said}")
        if step.observation:
            output.text(step.observation)
    total = sum(turn["reward"] for turn in turns)
    how = "ended" if step.ended else f"was left after {wish.max_turns} turns"
    output.json(
        "episode", {"name": wish.name, "turns": turns, "reward": total, "ended": step.ended}
    )
    output.text(f"the episode {how}: {len(turns)} turns, reward {total:g}")


def _player(wish: Wish, runner: asyncio.Runner) -> tuple[Player, str]:
    """Who plays, and how it is called; the person's own words are on the screen already."""
    if wish.model is None:
        return lambda messages: input("> "), ""
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
    model = runner.run(served_model(endpoint, None))

    def say(messages: Sequence[dict[str, Any]]) -> str:
        return runner.run(endpoint.said({"model": model, "messages": list(messages)}))

    return say, model
