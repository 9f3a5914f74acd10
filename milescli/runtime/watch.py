"""One episode of an environment, played by a model that engines are started for, to watch: nothing
is measured, kept or learned. For `miles env play --model RUN`; `evaluate` and `evaluate_model`
start the engines and await it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from milescli.agents.play import Game
from milescli.agents.replying import next_reply
from milescli.core.types import Prompt
from milescli.recipe.agents import EnvironmentSettings
from milescli.rollout.base import Outcome, Session
from milescli.rollout.environments import Step
from milescli.runtime.eval_records import SetResult
from milescli.runtime.evaluate import episodes_of

if TYPE_CHECKING:
    from milescli.console.output import Output
    from milescli.runtime.engines import Engines
    from milescli.runtime.eval_sets import LoadedSet
    from milescli.runtime.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The agent of the episode, and what is done with engines that serve it."""

    settings: EnvironmentSettings
    prompt: Prompt
    """What the episode begins with."""
    max_turns: int
    begun: Callable[[str], None]
    """Told what the model is shown first."""
    acted: Callable[[str, Step], None]
    """Told each turn: what the model said, and what came of it."""

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """As an Agent. Raises AgentError where the environment fails."""
        game, step = Game(self.settings, prompt), Step()
        said, total = list[str](), 0.0
        try:
            await game.begin()
            self.begun(game.messages[-1]["content"])
            while not step.ended and len(said) < self.max_turns:
                if (reply := await next_reply(session, game.messages)) is None:
                    break
                said.append(reply.message["content"])
                step = await game.act(said[-1])
                total += step.reward
                self.acted(said[-1], step)
        finally:
            await game.close()
        return Outcome(text="\n".join(said), reward=total, is_cut=not step.ended)

    async def ask(
        self,
        spec: RunSpec,
        asked: Sequence[LoadedSet],
        engines: Engines,
        *,
        name: str,
        step: int,
        output: Output,
    ) -> list[SetResult]:
        """See `evaluate.Ask`: play it once. Raises AgentError, or what the engines raise."""
        recipe = asked[0].set.recipe
        episodes = episodes_of(spec, recipe, engines, output=output)
        output.note(f"{name}, step {step}, plays {self.settings.name}")
        episodes = replace(episodes, agent=self, agent_name="environment", retries=0)
        await episodes.play(self.prompt, sample_index=0, seed=recipe.run.seed)
        return []
