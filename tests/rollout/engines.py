"""An engine in memory that fails, waits and reorders on demand, which a real one cannot; all else
is tested on real ones."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable

from milescli.agents.single_turn import single_turn
from milescli.core.types import Prompt, StopReason, VersionSpan, WeightVersion
from milescli.data.file_prompts import FilePrompts
from milescli.recipe.schema import Recipe
from milescli.rollout.base import Agent, Completion, GenerateRequest
from milescli.rollout.episode.episode import Episodes
from milescli.rollout.rewards.scoring import Scorer


class ScriptedEngine:
    """Responds with the seed's last digit; `delay` says how many turns of the event loop a request
    takes."""

    def __init__(self, *, delay: Callable[[GenerateRequest], int] = lambda _: 0) -> None:
        self.version = WeightVersion(0)
        self.delay = delay
        self.requests: list[GenerateRequest] = []
        self.num_running = 0
        self.fail_on: Callable[[GenerateRequest], Exception | None] = lambda _: None

    async def generate(self, request: GenerateRequest) -> Completion:
        """Counts itself as running until it has responded or was cancelled."""
        self.requests.append(request)
        self.num_running += 1
        version = self.version
        try:
            for _ in range(self.delay(request)):
                await asyncio.sleep(0)
            if (error := self.fail_on(request)) is not None:
                raise error
        finally:
            self.num_running -= 1
        assert request.seed is not None
        return Completion(
            response_ids=[request.seed % 10],
            logprobs=array("f", [0.0]),
            stop_reason=StopReason.STOP,
            version_spans=[VersionSpan(start=0, end=1, version=version)],
        )


def decode(ids: Iterable[int]) -> str:
    """[3, 4] -> '34'"""
    return "".join(map(str, ids))


def make_source(num_prompts: int = 10) -> FilePrompts:
    """Prompts 0, 1, 2, ... in file order."""
    prompts = [
        Prompt(index=index, token_ids=[index], text=str(index), label="0")
        for index in range(num_prompts)
    ]
    return FilePrompts(prompts, seed=0, shuffle=False)


async def digit_reward(*, prompt: str, response: str, label: str | None) -> float:
    """The response itself, as a number."""
    return float(response)


def make_scorer(reward: Callable[..., object] = digit_reward) -> Scorer:
    """Bounded generously."""
    return Scorer(reward, name="test", timeout_s=120.0)  # type: ignore[arg-type]


def make_episodes(
    engine: ScriptedEngine, *, scorer: Scorer | None = None, agent: Agent = single_turn
) -> Episodes:
    """Of at most 64 tokens a trajectory."""
    return Episodes(
        agent=agent,
        agent_name="test",
        engine=engine,  # type: ignore[arg-type]
        scorer=scorer or make_scorer(),
        decode=decode,
        settings=GenerateRequest(prompt_ids=(), max_new_tokens=16),
        max_tokens=64,
        vocab_size=1000,
    )


def make_recipe(*, timeout_s: float = 60.0, **rollout: object) -> Recipe:
    """Four prompts of three samples a step, unless `options` say otherwise."""
    return Recipe.model_validate(
        {
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 3, **rollout},
            "machine": {"step_timeout_s": timeout_s},
        }
    )
