"""`miles env play`: one episode at the terminal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from milescli.agents.environment import Game
from milescli.commands.show.listings import settings_of
from milescli.console.output import Output
from milescli.core.errors import DataError, EndpointError
from milescli.core.types import Prompt
from milescli.data.images import text_of
from milescli.listings.environments import rows_of
from milescli.recipe.agents import EnvironmentSettings
from milescli.rollout.endpoint import Endpoint, base_url
from milescli.rollout.environments import Step, require_environment
from milescli.rollout.evaluation.endpoint_episodes import served_model

TIMEOUT_S = 120.0
CONVERSATION, TURN = 2048, 256
"""Most tokens of a model that no run made, where --set says nothing else."""
_NOBODY_ELSE = {"rollout.roles": "{}", "rollout.tools": "[]", "rollout.mcp": "{}"}
"""Settings that remove what a run had besides its environment; playing does not need it."""
Player = Callable[[Sequence[dict[str, Any]]], str]
"""Messages so far -> the next action."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Holds the options of `miles env play`."""

    name: str
    settings: str
    data: str | None
    row: int
    model: str | None
    max_turns: int
    sets: Sequence[str] = ()


@dataclass(slots=True)
class _Screen:
    """Shows an episode turn by turn."""

    output: Output
    player: str = ""
    """Name shown before each action; empty if a person plays, whose words are already on the
    screen."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    has_ended: bool = False

    def on_turn(self, action: str, step: Step) -> None:
        """Show one finished turn."""
        shown = text_of(step.observation)
        self.turns.append({"said": action, "shown": shown, "reward": step.reward})
        self.has_ended = step.ended
        if self.player:
            self.output.text(f"{self.player}: {action}")
        if shown:
            self.output.text(shown)

    def end(self, wish: Wish) -> None:
        """Show the summary of the episode."""
        total, count = sum(turn["reward"] for turn in self.turns), len(self.turns)
        summary = {"name": wish.name, "turns": self.turns, "reward": total, "ended": self.has_ended}
        self.output.json("episode", summary)
        how = "ended" if self.has_ended else f"was left after {count} turns"
        self.output.text(f"the episode {how}: {count} turns, reward {total:g}")


def play_one(wish: Wish, *, output: Output) -> None:
    """Play an episode, and show each turn when it is done. Raises MilesError."""
    settings = EnvironmentSettings(name=wish.name, settings=settings_of(wish.settings))
    require_environment(settings)
    rows = rows_of(wish.data)
    if wish.row > len(rows):
        raise DataError(
            f"there is no row {wish.row}",
            why=f"{wish.data or 'the list of seeds'} was read up to row {len(rows)}",
            fix=f"--row {len(rows)}",
        )
    prompt, is_served = rows[wish.row - 1], wish.model is not None and not _is_url(wish.model)
    if wish.sets and not is_served:
        raise typer.BadParameter("--set changes the engines of a model: add --model RUN")
    if is_served:
        _watch(wish, settings, prompt, output=output)
        return
    with asyncio.Runner() as runner:
        game = Game(settings, prompt)
        try:
            runner.run(game.begin())
            _play(game, wish, runner, output=output)
        except (EOFError, KeyboardInterrupt):
            output.note("\nthe game was left")
        finally:
            runner.run(game.close())


def _play(game: Game, wish: Wish, runner: asyncio.Runner, *, output: Output) -> None:
    say, player = _player(wish, runner)
    output.text(text_of(game.messages[-1]["content"]))
    screen = _Screen(output, player)
    while not screen.has_ended and len(screen.turns) < wish.max_turns:
        action = say(game.messages)
        screen.on_turn(action, runner.run(game.act(action)))
    screen.end(wish)


def _watch(wish: Wish, settings: EnvironmentSettings, prompt: Prompt, *, output: Output) -> None:
    """Start engines for a run's checkpoint, a folder or a name on the hub, and let them play."""
    from milescli.commands import measure
    from milescli.commands.find_run import find_measured
    from milescli.runtime.evaluation.evaluate import WatchedEpisode
    from milescli.runtime.evaluation.sets import EvalOptions

    assert wish.model is not None, wish
    run = find_measured(wish.model).run
    screen = _Screen(output, Path(wish.model).name if run is None else run.name)
    watched = WatchedEpisode(
        settings=settings,
        prompt=prompt,
        max_turns=wish.max_turns,
        on_start=output.text,
        on_turn=screen.on_turn,
    )
    sets = {
        "rollout.agent": "environment",
        "rollout.environment.name": wish.name,
        "rollout.environment.settings": json.dumps(settings.settings),
        "rollout.max_turns": str(wish.max_turns),
        "eval.num_prompts": "1",
        **_NOBODY_ELSE,
    }
    if run is None:
        sets |= {"rollout.max_response_tokens": str(CONVERSATION)}
        sets |= {"rollout.max_turn_tokens": str(TURN)}
    sets |= {key: value for key, _, value in (text.partition("=") for text in wish.sets)}
    request = EvalOptions(
        data=["task:seeds"], sets=[f"{key}={value}" for key, value in sets.items()]
    )
    options = measure.Options(use_engines=watched.use_engines)
    measure.measured(wish.model, request, options, output=output)
    screen.end(wish)


def _is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _player(wish: Wish, runner: asyncio.Runner) -> tuple[Player, str]:
    """Return the player and its name: a person, or a model behind an endpoint."""
    if wish.model is None:
        return lambda messages: input("> "), ""
    endpoint = Endpoint(
        caller="the player",
        section="--model",
        error=EndpointError,
        url=base_url(wish.model),
        timeout_s=TIMEOUT_S,
        retries=2,
    )
    model = runner.run(served_model(endpoint, None))

    def say(messages: Sequence[dict[str, Any]]) -> str:
        return runner.run(endpoint.chat_reply({"model": model, "messages": list(messages)}))

    return say, model
