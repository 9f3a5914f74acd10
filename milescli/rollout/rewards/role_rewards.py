"""Scores single roles besides the episode's reward, from what each role said, and reports the
scores as metrics of the step. Called by `episode`; `core.role_views` says whose advantages they
make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from milescli.core.concurrency import all_or_first_error
from milescli.core.types import Prompt, Sample
from milescli.rollout.rewards.scoring import Response, Score, Scoring


class RoleScorer:
    """Scores roles that have rewards of their own; another scorer scores the episode."""

    def __init__(self, episodes: Scoring, roles: Mapping[str, Scoring]) -> None:
        """Set the scorer of episodes, and the scorers of `roles` by name."""
        self._episodes, self.roles = episodes, roles

    def of(self, prompt: Prompt) -> Scoring:
        """Return the scorer of this prompt's episodes."""
        return self._episodes.of(prompt)

    @property
    def scores_groups(self) -> bool:
        """Return True if the episode's reward scores groups."""
        return self._episodes.scores_groups

    async def score_response(self, prompt: Prompt, response: Response) -> Score:
        """Score one response with the episode's reward."""
        return await self._episodes.score_response(prompt, response)

    async def score_responses(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score]:
        """Score all responses to a prompt with the episode's reward."""
        return await self._episodes.score_responses(prompt, responses)


async def score_roles_alone(scorer: Scoring, prompt: Prompt, sample: Sample) -> Sample:
    """Return the sample with those rewards of its roles that do not need the other samples. Raises
    RewardError."""
    asked = {
        role: own
        for role, own in _missing_scorers(scorer, sample).items()
        if not own.of(prompt).scores_groups
    }
    if not asked:
        return sample
    scores = await all_or_first_error(
        [own.score_response(prompt, _response(sample, role)) for role, own in asked.items()]
    )
    return _with_scores(sample, dict(zip(asked, scores, strict=True)))


async def score_roles_together(
    scorer: Scoring, prompt: Prompt, samples: list[Sample]
) -> list[Sample]:
    """Score all samples of one prompt, in order, including rewards of roles that need all of them.
    Raises RewardError."""
    missing = [_missing_scorers(scorer, sample) for sample in samples]
    for role in dict.fromkeys(role for scorers in missing for role in scorers):
        places = [place for place, scorers in enumerate(missing) if role in scorers]
        responses = [_response(samples[place], role) for place in places]
        scores = await missing[places[0]][role].score_responses(prompt, responses)
        samples = list(samples)
        for place, score in zip(places, scores, strict=True):
            samples[place] = _with_scores(samples[place], {role: score})
    return samples


def _missing_scorers(scorer: Scoring, sample: Sample) -> dict[str, Scoring]:
    """Return role -> its scorer, for roles that spoke and have no reward yet."""
    if not isinstance(scorer, RoleScorer):
        return {}
    return {
        role: scorer.roles[role]
        for role in sample.role_texts
        if role in scorer.roles and role not in sample.role_rewards
    }


def _response(sample: Sample, role: str) -> Response:
    own = [line for line in sample.trajectories if line.role == role]
    return Response(
        text=sample.role_texts[role],
        num_tokens=sum(line.num_loss_tokens for line in own),
        token_ids=own[-1].token_ids if own else (),
    )


def _with_scores(sample: Sample, scores: Mapping[str, Score]) -> Sample:
    return with_role_rewards(sample, {role: score.reward for role, score in scores.items()})


def with_role_rewards(sample: Sample, rewards: Mapping[str, float]) -> Sample:
    """Return the sample with the rewards, and with metrics that report them."""
    if not rewards:
        return sample
    return replace(
        sample,
        role_rewards={**sample.role_rewards, **rewards},
        figures={
            **sample.figures,
            **{f"{role}_reward": reward for role, reward in rewards.items()},
        },
    )
