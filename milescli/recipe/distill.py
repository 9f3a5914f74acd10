"""`train.distill`: teachers, what each of them teaches, and what is learned beside them. Part of
the schema, with its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from milescli.recipe.requests import Requests, check_url
from milescli.recipe.section import NonNegativeFloat, Positive, PositiveFloat, Rule, Section

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe

_EXAMPLE = "--set 'train.distill.teachers=[{path: FOLDER}]'"
_SERVED = "--set 'train.distill.teachers=[{url: \"http://HOST:PORT\"}]'"
NO_REWARD = "none"
"""The name of the reward that scores nothing."""


class Teacher(Section):
    """A model that is learned from. It may be of another family or size than the policy, and has
    the same tokenizer. Either `path` or `url`."""

    path: str | None = None
    """A Hugging Face folder or hub name, or a run's directory: the weights of its newest
    checkpoint. The trainer's ranks hold it."""
    url: str | None = None
    """An SGLang server that has it, http://HOST:PORT: it is asked by HTTP, while the policy
    samples."""
    sources: list[str] | None = None
    """Names of entries of `data.mix` whose prompts it teaches; null: of the one teacher, all."""

    @property
    def called(self) -> str:
        """Return the name for people."""
        return self.path or self.url or "without path and url"


class Distill(Section):
    """What is learned from teachers: each token that the policy samples is compared with what a
    teacher would say there, beside the reward or instead of it; with `train.objective:
    distillation`, each token of the rows of `data.train`."""

    teachers: list[Teacher] = Field(default=[])
    """[{path: big}], or [{url: 'http://HOST:PORT'}]; several, each with the `sources` of `data.mix`
    that it teaches: a prompt has one teacher. Empty: nothing is distilled."""
    kl: Literal["sampled", "reverse", "forward"] = "sampled"
    """How far policy and teacher are apart. sampled: log pi - log teacher of the sampled token
    costs it that much of its advantage, as `train.credit` says; reverse, forward: KL(policy ||
    teacher), KL(teacher || policy) over the teacher's `top_k` likeliest tokens and all others as
    one, with its gradient, as a term of the loss."""
    top_k: Positive = 32
    """reverse, forward: tokens of the teacher at each position."""
    server: Requests = Requests()
    """Of teachers by `url`: how they are asked."""
    coef: PositiveFloat = 1.0
    """Weight of that distance."""
    cache: bool = True
    """distillation: what teachers say of the rows is computed once, before the first step, and kept
    in the run directory, 8 x `top_k` bytes a token; then they are dismissed. false: they stay, and
    say it at each step."""
    reward_weight: NonNegativeFloat = 0.0
    """Weight of the advantages that rewards give; 0: the teacher alone, and `rollout.reward` may be
    none."""

    @property
    def is_served(self) -> bool:
        """Return True if teachers are queried over HTTP; else the trainer's ranks hold them."""
        return any(teacher.url is not None for teacher in self.teachers)


def teachers_by_source(settings: Distill) -> dict[str | None, int]:
    """Map each entry of `data.mix` to the number of its teacher; empty if one teaches all."""
    return {
        source: number
        for number, teacher in enumerate(settings.teachers)
        for source in teacher.sources or []
    }


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for teachers, what each teaches, and what else is learned."""
    rollout, teachers, weight = recipe.rollout, recipe.teachers, recipe.train.distill.reward_weight
    yield Rule(
        recipe.train.objective == "distillation" and not teachers,
        "`train.objective=distillation` has no teacher",
        why="`train.distill.teachers` is empty",
        fix=[_EXAMPLE, "--set train.objective=supervised   # to imitate the rows"],
    )
    is_scored = rollout.is_scored_by_agent or NO_REWARD not in rollout.reward_weights
    yield Rule(
        not is_scored and not recipe.learns_from_rows and (not teachers or weight),
        "there is no reward to learn from",
        why=f"`rollout.reward` is {rollout.reward_name}, and "
        + (
            f"`train.distill.reward_weight` {weight:g} asks for one"
            if teachers
            else "the run has no teacher either"
        ),
        fix=[
            "--set rollout.reward=math",
            "--set train.distill.reward_weight=0" if teachers else _EXAMPLE,
        ],
    )
    if not teachers:
        return
    yield from _place_rules(recipe)
    objective, kl = recipe.train.objective, recipe.train.distill.kl
    yield Rule(
        objective in ("supervised", "preference", "reward_model"),
        f"`train.objective={objective}` has no use for a teacher",
        why=f"`train.distill.teachers` has {teachers[0].called}, and its loss compares with none",
        fix=["--set 'train.distill.teachers=[]'", "--set train.objective=distillation"],
    )
    yield Rule(
        objective == "distillation" and kl == "sampled",
        "`train.distill.kl=sampled` is of tokens that the policy samples",
        why=f"`train.objective` is distillation: the tokens are those of {recipe.data.train}, "
        "which somebody else wrote",
        fix=["--set train.distill.kl=forward", "--set train.distill.kl=reverse"],
    )
    if len(teachers) > 1 or teachers[0].sources is not None:
        names = [source.called for source in recipe.data.mix or []]
        yield from _source_rules(teachers, names)


def _place_rules(recipe: Recipe) -> Iterator[Rule]:
    """Each teacher is here or served, and all are alike; a served one can say what is asked."""
    distill, temperature = recipe.train.distill, recipe.rollout.temperature
    for teacher in recipe.teachers:
        yield Rule(
            (teacher.path is None) == (teacher.url is None),
            f"a teacher of `train.distill.teachers` is {teacher.called}",
            why="it has either a `path`, and the trainer's ranks hold it, or a `url`",
            fix=[_EXAMPLE, _SERVED],
        )
    if not distill.is_served:
        return
    for teacher in recipe.teachers:
        yield Rule(
            teacher.url is None,
            "teachers are all here, or all served",
            why=f"{teacher.called} is a path, and another of them has a `url`",
            fix="python -m sglang.launch_server --model-path FOLDER   # serves it too",
        )
        check_url(
            teacher.url or "",
            key="train.distill.teachers[].url",
            section="train.distill.server",
            example="http://HOST:PORT",
        )
    yield Rule(
        recipe.train.objective == "distillation" and not distill.cache,
        "served teachers are not asked at each step",
        why="`train.distill.cache` is false, and the rows are the same in each epoch",
        fix="--set train.distill.cache=true",
    )
    yield Rule(
        not recipe.learns_from_rows and temperature != 1.0,
        "a served teacher would be asked at another temperature than the policy",
        why=f"`rollout.temperature` is {temperature:g}, and SGLang says what a model thinks of a "
        "prompt at 1",
        fix=["--set rollout.temperature=1", _EXAMPLE],
    )


def _source_rules(teachers: list[Teacher], names: list[str]) -> Iterator[Rule]:
    """Each source of the mix, by its name, has one teacher, and each teacher a source."""
    taught: dict[str, str] = {}
    for teacher in teachers:
        yield Rule(
            not teacher.sources,
            f"what does the teacher {teacher.called} teach?",
            why=f"the recipe has {len(teachers)} teachers, and this one names no `sources`",
            fix="give each teacher the names of entries of data.mix: "
            f"{{..., sources: [{names[0] if names else 'math'}]}}",
        )
        for name in teacher.sources or []:
            yield Rule(
                name not in names,
                f"the teacher {teacher.called} teaches `{name}`, which is no source of prompts",
                why=f"`data.mix` has {', '.join(names) or 'no entries'}",
                fix="name an entry of data.mix, or give one that `name`",
            )
            yield Rule(
                name in taught,
                f"`{name}` has two teachers",
                why=f"{taught.get(name)} and {teacher.called}; a prompt is learned from one",
                fix=f"take `{name}` off the `sources` of one of them",
            )
            taught[name] = teacher.called
    missing = [name for name in names if name not in taught]
    yield Rule(
        missing,
        f"nobody teaches `{''.join(missing[:1])}`",
        why=f"`train.distill.teachers` teach {', '.join(taught)}; data.mix has "
        f"{', '.join(missing)} too",
        fix=f"add `{''.join(missing[:1])}` to the `sources` of a teacher",
    )


REWARD_MODEL = "reward_model"
"""The name of the reward that a model gives, and of the objective that makes one."""


def untaught(recipe: Recipe) -> Recipe:
    """Return the recipe without its teachers."""
    return recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"distill": Distill()})}
    )


def unscored(recipe: Recipe) -> Recipe:
    """Return the recipe without any reward."""
    return _with_rewards(recipe, lambda reward: NO_REWARD)


def policy_alone(recipe: Recipe) -> Recipe:
    """Return the same data as the policy reads it: without teachers, critic and reward model; other
    rewards and their requirements on labels stay."""
    objective = recipe.train.objective
    changes = {
        "credit": "sample",
        "objective": "preference" if objective == REWARD_MODEL else objective,
    }
    recipe = _with_rewards(untaught(recipe), _unasked)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})


def _with_rewards(recipe: Recipe, changed: Callable[[object], object]) -> Recipe:
    """`changed`: a reward, or rewards with weights -> the same."""
    data, rollout = recipe.data, recipe.rollout
    mix = [
        source.model_copy(update={"reward": source.reward and changed(source.reward)})
        for source in data.mix or []
    ]
    roles = {
        name: role.model_copy(update={"reward": role.reward and changed(role.reward)})
        for name, role in rollout.roles.items()
    }
    changes = {"reward": changed(rollout.reward), "roles": roles}
    return recipe.model_copy(
        update={
            "rollout": rollout.model_copy(update=changes),
            "data": data.model_copy(update={"mix": mix or None}),
        }
    )


def _unasked(reward: object) -> object:
    """Without the part that a reward model gives."""
    if isinstance(reward, dict):
        others = {name: weight for name, weight in reward.items() if name != REWARD_MODEL}
        return others or NO_REWARD
    return NO_REWARD if reward == REWARD_MODEL else reward
