"""Calls each of the user's rewards once before anything starts, with the first prompt and a made-up
response, so that a mistake in it is found before the first step. Built-in rewards are not called:
they are tested, and may cost money. Called by `checks`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator

from milescli.core.errors import MilesError, RewardError
from milescli.core.plug_points import AGENTS
from milescli.core.types import Prompt
from milescli.core.user_code import source_location
from milescli.recipe.schema import Rollout
from milescli.rollout.episode.roles import RoleTurn, episode_as_json
from milescli.rollout.rewards import user_scorers
from milescli.rollout.rewards.scoring import Response, Scorer, is_temporary
from milescli.workers.worker import CallFailed

TRIAL_RESPONSE = "Let me think.\n\nThe answer is \\boxed{42}.\n#### 42"
"""The made-up response."""


def try_rewards(rollout: Rollout, prompt: Prompt, *, but: Collection[str] = ()) -> Iterator[str]:
    """Call each reward, except those in `but`, which were called already. Yield warnings for the
    user: a service did not answer, or the user's agent may pass other responses. Each call is
    bounded by `rollout.reward_timeout_s`. Raises RewardError for a reward that raises, does not
    return a finite number (or one for each response), or does not return in time."""
    whole = {
        name
        for role in rollout.roles.values()
        for name in role.reward_weights
        if role.scores != "turn"
    }
    turns = [RoleTurn(role=name, message={"content": TRIAL_RESPONSE}) for name in rollout.roles]
    with user_scorers(rollout) as scorers:
        for name, scorer in scorers.items():
            if name in but:
                continue
            if scorer.takes_images and not prompt.images:
                yield f"the reward `{name}` was not tried: the first prompt has no image to give it"
                continue
            text = episode_as_json(turns) if name in whole else TRIAL_RESPONSE
            try:
                asyncio.run(_call(scorer, prompt, text))
            except RewardError as error:
                cause = error.__cause__
                if isinstance(cause, CallFailed) and is_temporary(cause):
                    yield (
                        f"the reward `{name}` could not be tried, because its server did not "
                        f"respond: {_last_line(cause)}"
                    )
                elif rollout.agent in AGENTS.builtin:
                    raise _refusal(name, error) from error
                else:
                    yield (
                        f"the reward `{name}` failed on a made-up response, {TRIAL_RESPONSE!r}: "
                        f"{_last_line(cause)}; does `{rollout.agent}` give it other responses?"
                    )


async def _call(scorer: Scorer, prompt: Prompt, text: str) -> None:
    response = Response(text=text, num_tokens=1)
    if scorer.scores_groups:
        await scorer.score_responses(prompt, [response, response])
    else:
        await scorer.score_response(prompt, response)


def _refusal(name: str, error: MilesError) -> RewardError:
    """Return the error of the trial: a run would stop at its first response."""
    fixes = [fix for fix in error.fixes if fix.startswith("--set rollout.reward_timeout_s")]
    return RewardError(
        f"the reward `{name}` failed before the run, on a made-up response",
        why=error.why,
        fix=fixes or [f"fix the reward{source_location(name)}", f"miles plugins check {name}"],
    )


def _last_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
