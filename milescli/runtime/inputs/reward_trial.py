"""Calls each reward of the user's once before anything starts, on the first prompt and a response
that is made up, so that a mistake in it does not wait for the first step. Rewards that ship are not
called: they are tested, and may cost money. Called by `checks`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator

from milescli.core.errors import MilesError, RewardError
from milescli.core.plug_points import AGENTS
from milescli.core.types import Prompt
from milescli.core.user_code import source_location
from milescli.recipe.schema import Rollout
from milescli.rollout.episode.roles import RoleTurn, told_whole
from milescli.rollout.rewards import scorers_of_users
from milescli.rollout.rewards.scoring import Response, Scorer, may_pass
from milescli.workers.worker import CallFailed

MADE_UP = "Let me think.\n\nThe answer is \\boxed{42}.\n#### 42"
"""The response."""


def try_rewards(rollout: Rollout, prompt: Prompt, *, but: Collection[str] = ()) -> Iterator[str]:
    """Call each reward, `but` those that were tried. Yield what the user should know: that a
    service did not answer, or that an agent of the user's may give it other responses. Each call is
    bounded by `rollout.reward_timeout_s`. Raises RewardError for a reward that raises, does not
    return a finite number (or one for each response), or does not return in time."""
    whole = {
        name
        for role in rollout.roles.values()
        for name in role.reward_weights
        if role.scores != "turn"
    }
    said = [RoleTurn(role=name, message={"content": MADE_UP}) for name in rollout.roles]
    with scorers_of_users(rollout) as scorers:
        for name, scorer in scorers.items():
            if name in but:
                continue
            if scorer.takes_images and not prompt.images:
                yield f"the reward `{name}` was not tried: the first prompt has no image to give it"
                continue
            text = told_whole(said) if name in whole else MADE_UP
            try:
                asyncio.run(_call(scorer, prompt, text))
            except RewardError as error:
                cause = error.__cause__
                if isinstance(cause, CallFailed) and may_pass(cause):
                    yield (
                        f"the reward `{name}` could not be tried, because its server did not "
                        f"respond: {_last_line(cause)}"
                    )
                elif rollout.agent in AGENTS.builtin:
                    raise _refusal(name, error) from error
                else:
                    yield (
                        f"the reward `{name}` failed on a made-up response, {MADE_UP!r}: "
                        f"{_last_line(cause)}; does `{rollout.agent}` give it other responses?"
                    )


async def _call(scorer: Scorer, prompt: Prompt, text: str) -> None:
    response = Response(text=text, num_tokens=1)
    if scorer.scores_groups:
        await scorer.scored_group(prompt, [response, response])
    else:
        await scorer.scored(prompt, response)


def _refusal(name: str, error: MilesError) -> RewardError:
    """Return the same error as of a trial: a run would stop at its first response."""
    kept = [fix for fix in error.fixes if fix.startswith("--set rollout.reward_timeout_s")]
    return RewardError(
        f"the reward `{name}` failed before the run, on a made-up response",
        why=error.why,
        fix=kept or [f"fix the reward{source_location(name)}", f"miles plugins check {name}"],
    )


def _last_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
