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
class PlayOptions:
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

    def end(self, options: PlayOptions) -> None:
        """Show the summary of the episode."""
        total, count = sum(turn["reward"] for turn in self.turns), len(self.turns)
        summary = {
            "name": options.name,
            "turns": self.turns,
            "reward": total,
            "ended": self.has_ended,
        }
        self.output.json("episode", summary)
        how = "ended" if self.has_ended else f"was left after {count} turns"
        self.output.text(f"the episode {how}: {count} turns, reward {total:g}")


def play_one(options: PlayOptions, *, output: Output) -> None:
    """Play an episode, and show each turn when it is done. Raises MilesError."""
    settings = EnvironmentSettings(name=options.name, settings=settings_of(options.settings))
    require_environment(settings)
    rows = rows_of(options.data)
    if options.row > len(rows):
        raise DataError(
            f"there is no row {options.row}",
            why=f"{options.data or 'the list of seeds'} was read up to row {len(rows)}",
            fix=f"--row {len(rows)}",
        )
    prompt, is_served = (
        rows[options.row - 1],
        options.model is not None and not _is_url(options.model),
    )
    if options.sets and not is_served:
        raise typer.BadParameter("--set changes the engines of a model: add --model RUN")
    if is_served:
        _watch(options, settings, prompt, output=output)
        return
    with asyncio.Runner() as runner:
        game = Game(settings, prompt)
        try:
            runner.run(game.begin())
            _play(game, options, runner, output=output)
        except (EOFError, KeyboardInterrupt):
            output.note("\nthe game was left")
        finally:
            runner.run(game.close())


def _play(game: Game, options: PlayOptions, runner: asyncio.Runner, *, output: Output) -> None:
    next_action, player = _player(options, runner)
    output.text(text_of(game.messages[-1]["content"]))
    screen = _Screen(output, player)
    while not screen.has_ended and len(screen.turns) < options.max_turns:
        action = next_action(game.messages)
        screen.on_turn(action, runner.run(game.act(action)))
    screen.end(options)


def _watch(
    play_options: PlayOptions, settings: EnvironmentSettings, prompt: Prompt, *, output: Output
) -> None:
    """Start engines for a run's checkpoint, a folder or a name on the hub, and let them play."""
    from milescli.commands import measure
    from milescli.commands.find_run import find_eval_target
    from milescli.runtime.evaluation.evaluate import WatchedEpisode
    from milescli.runtime.evaluation.sets import EvalOptions

    assert play_options.model is not None, play_options
    run = find_eval_target(play_options.model).run
    screen = _Screen(output, Path(play_options.model).name if run is None else run.name)
    watched = WatchedEpisode(
        settings=settings,
        prompt=prompt,
        max_turns=play_options.max_turns,
        on_start=output.text,
        on_turn=screen.on_turn,
    )
    sets = {
        "rollout.agent": "environment",
        "rollout.environment.name": play_options.name,
        "rollout.environment.settings": json.dumps(settings.settings),
        "rollout.max_turns": str(play_options.max_turns),
        "eval.num_prompts": "1",
        **_NOBODY_ELSE,
    }
    if run is None:
        sets |= {"rollout.max_response_tokens": str(CONVERSATION)}
        sets |= {"rollout.max_turn_tokens": str(TURN)}
    sets |= {key: value for key, _, value in (text.partition("=") for text in play_options.sets)}
    request = EvalOptions(
        data=["task:seeds"], sets=[f"{key}={value}" for key, value in sets.items()]
    )
    options = measure.MeasureOptions(use_engines=watched.use_engines)
    measure.measure_subject(play_options.model, request, options, output=output)
    screen.end(play_options)


def _is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _player(options: PlayOptions, runner: asyncio.Runner) -> tuple[Player, str]:
    """Return the player and its name: a person, or a model behind an endpoint."""
    if options.model is None:
        return lambda messages: input("> "), ""
    endpoint = Endpoint(
        caller="the player",
        section="--model",
        error=EndpointError,
        url=base_url(options.model),
        timeout_s=TIMEOUT_S,
        retries=2,
    )
    model = runner.run(served_model(endpoint, None))

    def ask_model(messages: Sequence[dict[str, Any]]) -> str:
        return runner.run(endpoint.chat_reply({"model": model, "messages": list(messages)}))

    return ask_model, model
