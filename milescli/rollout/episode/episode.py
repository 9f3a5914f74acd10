"""Plays one attempt at one prompt: the agent plays its episode, the reward scores it, and a Sample
is returned. Used by the collector and by the evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from milescli.core.errors import AgentError, MilesError
from milescli.core.plug_points import AGENTS, GENERATIONS
from milescli.core.types import Prompt, Sample, StopReason, Trajectory
from milescli.core.user_code import plugin_fix, user_traceback
from milescli.recipe.schema import Recipe, Rollout
from milescli.rollout.base import Agent, GenerateRequest, Outcome, RolloutEngine
from milescli.rollout.episode.agent_process import AgentProcess
from milescli.rollout.episode.agents import create_agent, is_built_in
from milescli.rollout.episode.session import ChatForm, Decode, RecordingSession, turn_seed
from milescli.rollout.rewards.role_rewards import (
    score_roles_alone,
    score_roles_together,
    with_role_rewards,
)
from milescli.rollout.rewards.scoring import Response, Score, Scoring, finite_reward
from milescli.workers.worker import CallFailed

_OF_AGENTS = {
    "reward_memory_gib",
    "tools",
    "mcp",
    "search",
    "environment",
    "max_turns",
    "tool_timeout_s",
    "tool_output_characters",
    "roles",
    "rounds",
    "final_role",
    "user",
    "verifiers",
    "harbor",
}
"""Keys of `rollout` that an agent's process receives."""
_PROCESSES: weakref.WeakValueDictionary[tuple[str, str | None, str], AgentProcess] = (
    weakref.WeakValueDictionary()
)
"""Agent processes, which training and evaluation share."""


def load_agent(rollout: Rollout) -> Agent:
    """Load the agent that `rollout.agent` names, with `rollout.generation` making its responses; if
    either is the user's, both run in a process of their own. Raises RecipeError if one cannot be
    loaded."""
    AGENTS.resolve(rollout.agent)
    GENERATIONS.resolve(rollout.generation)
    is_plain = rollout.generation in GENERATIONS.builtin
    path = AGENTS.path_of(rollout.agent)
    if is_built_in(rollout) and is_plain:
        return create_agent(path, rollout)
    generation = None
    if not is_plain:
        generation = GENERATIONS.path_of(rollout.generation)
    key = (path, generation, rollout.model_dump_json(include=_OF_AGENTS))
    process = _PROCESSES.get(key) or AgentProcess(path, generation, rollout)
    _PROCESSES[key] = process
    return process


class EpisodePlayer(Protocol):
    """Samples and scores responses to prompts."""

    @property
    def agent_name(self) -> str:
        """Return the agent's name in the recipe, for errors."""

    async def play(
        self, prompt: Prompt, *, sample_index: int, seed: int, greedy: bool = False
    ) -> Sample:
        """Play one attempt at the prompt."""

    async def score_samples(self, prompt: Prompt, samples: list[Sample]) -> list[Sample]:
        """Score all attempts at a prompt with the rewards that need all of them, and return
        them."""


class TeacherClient(Protocol):
    """Queries teachers while the policy samples."""

    async def with_predictions(
        self, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> list[Trajectory]:
        """Return the trajectories with the predictions of the prompt's teacher. Raises MilesError
        if the teacher fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Implements EpisodePlayer with an agent and an engine: all that an episode needs besides its
    prompt and its seed."""

    agent: Agent
    agent_name: str
    """The agent's name in the recipe, for errors."""
    engine: RolloutEngine
    scorer: Scoring
    decode: Decode
    settings: GenerateRequest
    """Sampling settings; prompt and seed are filled in."""
    max_tokens: int
    """Largest number of tokens of one trajectory."""
    vocab_size: int
    """Size of the model's vocabulary."""
    teachers: TeacherClient | None = None
    """None: there are no teachers, or the trainer's ranks hold them."""
    chat_form: ChatForm | None = None
    """None: no agent chats."""
    policies: Mapping[str, RolloutEngine] = field(default_factory=dict)
    """Engines by role, for roles that have their own model."""
    untrained_roles: frozenset[str] = frozenset()
    """Roles whose turns are not trained on."""
    retries: int = 0
    """How often an episode whose agent fails is repeated, with another seed."""
    tell: Callable[[str], None] | None = None
    """Receives a message about each repeated episode."""

    async def play(
        self, prompt: Prompt, *, sample_index: int, seed: int, greedy: bool = False
    ) -> Sample:
        """Play one attempt, and score it at once if its reward does not need the other attempts.
        `greedy`: take the likeliest token each time. Raises AgentError if the agent fails each
        time, RewardError, or what the engine raises."""
        for attempt in range(self.retries + 1):
            try:
                sample = await self._play_once(
                    prompt, sample_index=sample_index, seed=retry_seed(seed, attempt), greedy=greedy
                )
            except AgentError as error:
                if attempt == self.retries:
                    raise _with_attempts(error, times=attempt + 1) from error
                if self.tell is not None:
                    self.tell(f"repeating an episode: {error.what}; {error.why}")
            else:
                return replace(sample, num_failed=attempt) if attempt else sample
        raise AssertionError(f"no episode was played: retries {self.retries}")

    def session(
        self, prompt: Prompt, *, seed: int, settings: GenerateRequest, cuts_stop: bool = False
    ) -> RecordingSession:
        """Return a new session. `settings`: how it samples; `cuts_stop`: see RecordingSession."""
        return RecordingSession(
            self.engine,
            prompt=prompt,
            seed=seed,
            settings=settings,
            max_tokens=self.max_tokens,
            decode=self.decode,
            vocab_size=self.vocab_size,
            chat_form=self.chat_form,
            others=self.policies,
            cuts_stop=cuts_stop,
        )

    async def _play_once(
        self, prompt: Prompt, *, sample_index: int, seed: int, greedy: bool
    ) -> Sample:
        settings = replace(self.settings, temperature=0.0) if greedy else self.settings
        session = self.session(prompt, seed=seed, settings=settings)
        server = self.chat_form.session_server if self.chat_form is not None else None
        if server is not None:
            session.address = server.open(session)
        try:
            outcome = await self._outcome(prompt, session)
        finally:
            if server is not None and session.address is not None:
                server.close(session.address)
        trajectories = session.trajectories(
            outcome.turn_rewards, outcome.turn_roles, untrained=self.untrained_roles
        )
        if self.teachers is not None and not greedy:  # nothing is learned of the greedy one
            trajectories = await self.teachers.with_predictions(prompt, trajectories)
        sample = Sample(
            sample_index=sample_index,
            seed=seed,
            trajectories=trajectories,
            text=outcome.text,
            stop_reason=StopReason.LENGTH if outcome.is_cut else session.turns[-1].stop_reason,
            reward=reward_of(outcome),
            role_texts=outcome.role_texts,
            figures={**session.figures, **outcome.figures},
            guesses=session.guesses,
        )
        sample = with_role_rewards(sample, outcome.role_rewards)
        sample = await score_roles_alone(self.scorer, prompt, sample)
        return await score_alone(self.scorer, prompt, sample)

    async def score_samples(self, prompt: Prompt, samples: list[Sample]) -> list[Sample]:
        """Return all samples of one prompt, in order, with the rewards that need all of them.
        Raises RewardError."""
        samples = await score_roles_together(self.scorer, prompt, samples)
        return await score_together(self.scorer, prompt, samples)

    async def _outcome(self, prompt: Prompt, session: RecordingSession) -> Outcome:
        try:
            outcome = await self.agent(prompt, session)
        except MilesError:
            raise
        except Exception as error:  # whatever the user's agent raises
            if error is session.engine_failure:
                raise
            if session.engine_failure is not None:  # a client had it as a status of HTTP
                raise session.engine_failure from error
            reason = str(error) if isinstance(error, CallFailed) else user_traceback(error)
            raise self._refusal(prompt, reason) from error
        if not isinstance(outcome, Outcome):
            raise self._refusal(prompt, f"it returned {outcome!r} instead of an Outcome")
        if not session.turns:
            raise self._refusal(prompt, "it returned without one call of session.generate")
        try:
            return _checked(outcome, num_turns=len(session.turns))
        except (TypeError, ValueError) as error:
            raise self._refusal(prompt, str(error)) from error

    def _refusal(self, prompt: Prompt, why: str) -> AgentError:
        return AgentError(
            f"the agent `{self.agent_name}` failed on prompt {prompt.index}",
            why=why,
            fix=plugin_fix(self.agent_name),
        )


def retry_seed(seed: int, attempt: int) -> int:
    """Return a seed of 31 bits for this attempt; attempt 0 has the sample's own seed."""
    return turn_seed(seed, -attempt)


def _with_attempts(error: AgentError, *, times: int) -> AgentError:
    if times == 1:
        return error
    why = f"it failed {times} times, the last so: {error.why}"
    return type(error)(error.what, why=why, fix=error.fixes)


_KINDS = {
    "text": str,
    "turn_rewards": Collection,
    "turn_roles": Collection,
    "role_texts": Mapping,
    "role_rewards": Mapping,
    "figures": Mapping,
}
"""Field of an Outcome -> what its value must be."""


def _checked(outcome: Outcome, *, num_turns: int) -> Outcome:
    """Return the outcome of an agent with its numbers as floats. Raises TypeError or ValueError,
    with the name of the field, for a value that it may not have."""
    for name, kind in _KINDS.items():
        if not isinstance(value := getattr(outcome, name), kind):
            raise TypeError(f"the {name} of its Outcome is {value!r:.80}")
    for role, text in outcome.role_texts.items():
        if not isinstance(text, str):
            raise TypeError(f"the text of {role} in its Outcome is {text!r}")
    rewards = [finite_reward(reward) for reward in outcome.turn_rewards]
    for what, values in (("rewards", rewards), ("roles", outcome.turn_roles)):
        if len(values) not in (0, num_turns):
            raise ValueError(
                f"it returned {what} of {len(values)} turns, but there were {num_turns}"
            )
    known = replace(
        outcome,
        reward=None if outcome.reward is None else finite_reward(outcome.reward),
        turn_rewards=rewards,
        role_rewards={
            role: finite_reward(reward, what=f"the reward of {role}")
            for role, reward in outcome.role_rewards.items()
        },
        figures={
            name: finite_reward(figure, what=f"the figure {name}")
            for name, figure in outcome.figures.items()
        },
    )
    finite_reward(reward_of(known) or 0.0)  # a sum may overflow
    return known


def reward_of(outcome: Outcome) -> float | None:
    """Return the reward that the agent determined; None: the recipe's reward scores the sample."""
    if outcome.reward is None and outcome.turn_rewards:
        return sum(outcome.turn_rewards)
    return outcome.reward


async def score_alone(scorer: Scoring, prompt: Prompt, sample: Sample) -> Sample:
    """Return the sample with its reward, unless it has one or its reward needs the whole group.
    Raises RewardError."""
    own = scorer.of(prompt)
    if sample.reward is not None or own.scores_groups:
        return sample
    return _with_score(sample, await own.score_response(prompt, _response(sample)))


async def score_together(scorer: Scoring, prompt: Prompt, samples: list[Sample]) -> list[Sample]:
    """Return all samples of one prompt, in order, each with its reward. Raises RewardError."""
    lacking = [place for place, sample in enumerate(samples) if sample.reward is None]
    if not lacking:
        return samples
    responses = [_response(samples[place]) for place in lacking]
    scores = await scorer.of(prompt).score_responses(prompt, responses)
    scored = list(samples)
    for place, score in zip(lacking, scores, strict=True):
        scored[place] = _with_score(samples[place], score)
    return scored


def _response(sample: Sample) -> Response:
    return Response(
        text=sample.text,
        num_tokens=sample.num_loss_tokens,
        token_ids=sample.trajectories[-1].token_ids if sample.trajectories else (),
    )


def _with_score(sample: Sample, score: Score) -> Sample:
    return replace(sample, reward=score.reward, reward_parts=score.parts)


def training_episodes(
    recipe: Recipe,
    *,
    engine: RolloutEngine,
    scorer: Scoring,
    decode: Decode,
    vocab_size: int,
    chat_form: ChatForm | None = None,
    teachers: TeacherClient | None = None,
    policies: Mapping[str, RolloutEngine] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Episodes:
    """Make episodes that are sampled as the recipe's `rollout` says. `tell`: receives a message
    about each repeated episode."""
    rollout = recipe.rollout
    settings = GenerateRequest(
        prompt_ids=(),
        max_new_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        want_routed_experts=recipe.train.routing_replay,
    )
    episodes = _episodes(
        recipe, settings, engine=engine, scorer=scorer, decode=decode, vocab_size=vocab_size
    )
    return replace(
        episodes, teachers=teachers, chat_form=chat_form, policies=policies or {}, tell=tell
    )


def evaluation_episodes(
    recipe: Recipe,
    *,
    engine: RolloutEngine,
    scorer: Scoring,
    decode: Decode,
    vocab_size: int,
    chat_form: ChatForm | None = None,
    policies: Mapping[str, RolloutEngine] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Episodes:
    """Make episodes of the same agent, sampled as the recipe's `eval` says."""
    settings = GenerateRequest(
        prompt_ids=(),
        max_new_tokens=recipe.eval.max_response_tokens or recipe.rollout.max_response_tokens,
        temperature=recipe.eval.temperature,
        top_p=recipe.eval.top_p,
        stop=recipe.rollout.stop,
    )
    episodes = _episodes(
        recipe, settings, engine=engine, scorer=scorer, decode=decode, vocab_size=vocab_size
    )
    return replace(episodes, chat_form=chat_form, policies=policies or {}, tell=tell)


def _episodes(
    recipe: Recipe,
    settings: GenerateRequest,
    *,
    engine: RolloutEngine,
    scorer: Scoring,
    decode: Decode,
    vocab_size: int,
) -> Episodes:
    """Make episodes. `settings.max_new_tokens`: bound of a whole conversation; a turn may have a
    lower one."""
    longest = settings.max_new_tokens
    of_a_turn = min(recipe.rollout.max_turn_tokens or longest, longest)
    return Episodes(
        agent=load_agent(recipe.rollout),
        agent_name=recipe.rollout.agent,
        engine=engine,
        scorer=scorer,
        decode=decode,
        settings=replace(settings, max_new_tokens=of_a_turn),
        max_tokens=recipe.data.max_prompt_tokens + longest,
        vocab_size=vocab_size,
        untrained_roles=frozenset(
            name for name, role in recipe.rollout.roles.items() if not role.is_trained
        ),
        retries=recipe.rollout.episode_retries,
    )
