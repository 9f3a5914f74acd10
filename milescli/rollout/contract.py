"""What plug-ins of rollout must satisfy, as tests that their authors can run: `check_reward(fn)`,
`check_agent(fn)`, ... Not used by a run."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from tempfile import TemporaryDirectory
from typing import cast

from milescli.core.examples import example_groups
from milescli.core.types import Group, Prompt, Sample, StopReason, VersionSpan, WeightVersion
from milescli.core.user_code import name_of, path_of
from milescli.data.scratch_tokenizer import MIN_VOCAB_SIZE, make_scratch_tokenizer
from milescli.data.tasks import require_rows
from milescli.data.tokenizer import load_tokenizer
from milescli.recipe.data import Data
from milescli.recipe.schema import Evaluation, Rollout
from milescli.rollout.base import (
    Agent,
    BoundedReward,
    Completion,
    GenerateRequest,
    Outcome,
    RewardFn,
    RolloutEngine,
    Session,
)
from milescli.rollout.collect.selectors import (
    Curriculum,
    GroupFilter,
    PromptResult,
    SampleFilter,
    Selection,
    Shaping,
    choose_prompts,
    is_kept,
    mark_learned_samples,
    record_rewards,
    select_groups,
    shape_rewards,
)
from milescli.rollout.episode.episode import Episodes
from milescli.rollout.episode.generations import Generating, Generation
from milescli.rollout.episode.session import ChatForm
from milescli.rollout.evaluation.functions import EvaluationFn, run_evaluation
from milescli.rollout.evaluation.metrics import Metrics, compute_metrics
from milescli.rollout.rewards.scoring import Scorer
from milescli.rollout.tool_schema import schema_of

Example = tuple[str, str, str | None]
"""prompt, response, label"""

EXAMPLES: tuple[Example, ...] = (
    ("What is 2 + 2?", "2 + 2 = 4\n#### 4", "4"),
    ("What is 2 + 2?", "five", "4"),
    ("What is 2 + 2?", "", "4"),
    ("What is 2 + 2?", "\x00 \u2603 \U0001f600 }{ \\boxed{ #### ", "4"),
    ("What is 2 + 2?", "4 " * 20_000, "4"),
)
"""A right response, a wrong one, an empty one, nonsense, and one that is far too long."""


def check_reward(
    reward: RewardFn | BoundedReward,
    *,
    examples: Sequence[Example] = EXAMPLES,
    timeout_s: float = 30.0,
    num_threads: int = 8,
) -> list[float]:
    """Score every example, all of them at once and from several threads, or as one group; return
    the rewards in order. Raises RewardError if a call raises, takes longer than `timeout_s`, or
    returns anything but a finite number."""
    name = name_of(reward)

    async def score_all() -> list[float]:
        scorer = Scorer(reward, name=name, timeout_s=timeout_s, num_threads=num_threads)
        prompts = [
            Prompt(index=i, token_ids=[], text=text, label=label)
            for i, (text, _, label) in enumerate(examples)
        ]
        if scorer.scores_groups:
            texts = [response for _, response, _ in examples]
            return await scorer.score_group(prompts[0], texts)
        calls = [
            scorer.score(prompt, response)
            for prompt, (_, response, _) in zip(prompts, examples, strict=True)
        ]
        repeated = calls + [scorer.score(prompts[0], examples[0][1]) for _ in range(num_threads)]
        return (await asyncio.gather(*repeated))[: len(examples)]

    return asyncio.run(score_all())


def check_filter(keep: GroupFilter) -> list[bool]:
    """Call the filter on groups of all kinds and return its answers. Raises RecipeError."""
    settings = Rollout(filter=path_of(keep))
    return [is_kept(keep, group, settings=settings) for group in example_groups()]


def check_sample_filter(keep: SampleFilter) -> list[bool]:
    """Call the filter on samples of all kinds and return its answers. Raises RecipeError."""
    settings = Rollout(sample_filter=path_of(keep))
    groups = [mark_learned_samples(keep, group, settings=settings) for group in example_groups()]
    return [sample.is_learned for group in groups for sample in group.samples]


def check_metrics(metrics: Metrics) -> dict[str, float]:
    """Return the metrics of three prompts with four samples each. Raises RecipeError."""
    settings = Evaluation(metrics=path_of(metrics), samples_per_prompt=4)
    return compute_metrics(metrics, example_groups(), settings=settings)


def check_evaluation(evaluate: EvaluationFn) -> list[list[Sample]]:
    """Return the samples that the function takes of three prompts. Raises RecipeError."""
    groups = example_groups()

    async def play(place: int, index: int = 0) -> Sample:
        await asyncio.sleep(0)
        samples = groups[place].samples
        return samples[index % len(samples)]

    settings = Evaluation(function=path_of(evaluate), samples_per_prompt=2)
    prompts = [group.prompt for group in groups]
    return asyncio.run(run_evaluation(evaluate, prompts, play, settings=settings))


def check_shaping(shaping: Shaping) -> list[list[float]]:
    """Return the shaped rewards of groups of all kinds: a finite number for each sample. Raises
    RecipeError."""
    settings = Rollout(shaping=path_of(shaping), max_response_tokens=12)
    return [shape_rewards(shaping, group, settings=settings).rewards for group in example_groups()]


def check_selection(choose: Selection) -> list[Group]:
    """Return the two of three groups that the selection takes. Raises RecipeError."""
    settings = Rollout(selection=path_of(choose), over_sampling=1.5)
    return select_groups(choose, example_groups(), count=2, settings=settings)


def check_curriculum(choose: Curriculum) -> list[int]:
    """Return which two of three prompts the curriculum takes; one of them was never tried. Raises
    RecipeError."""
    groups, history = example_groups(), dict[int, PromptResult]()
    record_rewards(history, groups[:2])
    prompts = [group.prompt for group in groups]
    settings = Data(curriculum=path_of(choose))
    return choose_prompts(choose, prompts, history, count=2, settings=settings)


def check_generation(generation: Generation) -> list[Sample]:
    """Let the built-in agent use the generation function, with a policy that samples random bytes.
    Raises AgentError."""

    async def agent(prompt: Prompt, session: Session) -> Outcome:
        settings = Rollout(generation=path_of(generation))
        turn = await Generating(session, generation, settings).generate(prompt.token_ids)
        return Outcome(text=turn.text)

    return check_agent(agent)


def check_task(task: Callable[..., Iterable[Mapping[str, object]]]) -> list[Mapping[str, object]]:
    """Return the first hundred rows of the task. Raises an error if they are not prompts, or if the
    same seed gives other rows."""
    rows = require_rows(list(islice(task(seed=0), 100)), path_of(task))
    if rows != list(islice(task(seed=0), 100)):
        raise ValueError("it yields different rows for the same seed")
    return rows


def check_agent(agent: Agent, *, num_samples: int = 8, timeout_s: float = 30.0) -> list[Sample]:
    """Let the agent play with a policy that samples random bytes; all samples at once. Raises
    AgentError or RewardError if an episode cannot be trained on or scored, TimeoutError if the
    episodes have not ended after `timeout_s`."""

    text = "What is 2 + 2?"
    chat_form = _chat_form(text)

    async def play() -> list[Sample]:
        episodes = Episodes(
            agent=agent,
            agent_name=path_of(agent),
            engine=cast("RolloutEngine", _RandomPolicy()),
            scorer=Scorer(_no_reward, name="none", timeout_s=timeout_s),
            decode=_decode,
            settings=GenerateRequest(prompt_ids=(), max_new_tokens=64),
            max_tokens=4096,
            vocab_size=256,
            chat_form=chat_form,
        )
        prompt = Prompt(index=0, token_ids=list(text.encode()), text=text, label="4")
        calls = [
            episodes.play(prompt, sample_index=index, seed=index) for index in range(num_samples)
        ]
        async with asyncio.timeout(timeout_s):
            return await asyncio.gather(*calls)

    return asyncio.run(play())


def check_tool(tool: object) -> Mapping[str, object]:
    """Return the schema that a model is given. Raises RecipeError if a parameter has no type,
    ValueError if the tool has no description."""
    name = path_of(tool).rpartition(":")[2]
    schema = schema_of(tool, name=name)
    if not schema["function"]["description"]:
        raise ValueError("it has no docstring to tell the model what it does")
    return schema


class _RandomPolicy:
    """Samples a few bytes, whose number and content the seed fixes."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return random tokens; never fails."""
        await asyncio.sleep(0)
        rng = random.Random(f"{request.seed}/{len(request.prompt_ids)}")
        length = rng.randint(1, min(request.max_new_tokens, 24))
        return Completion(
            response_ids=[rng.randint(32, 126) for _ in range(length)],
            logprobs=array("f", [-1.0] * length),
            stop_reason=StopReason.STOP,
            version_spans=[VersionSpan(start=0, end=length, version=WeightVersion(0))],
        )


def _chat_form(text: str) -> ChatForm:
    """Make the chat form of a tokenizer whose tokens are bytes."""
    with TemporaryDirectory() as folder:
        make_scratch_tokenizer([text], MIN_VOCAB_SIZE, folder)
        return ChatForm(tokenizer=load_tokenizer(folder))


def _decode(ids: Iterable[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def _no_reward(*, prompt: str, response: str, label: str | None) -> float:
    return 0.0
