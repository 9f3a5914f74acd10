"""Defines `train.distill`: teachers, what each of them teaches, and what else is learned. Part of
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
"""Name of the reward that scores nothing."""


class Teacher(Section):
    """A model to learn from. It may have another family or size than the policy, but must use the
    same tokenizer. Set either `path` or `url`."""

    path: str | None = None
    """A Hugging Face folder, a hub name, or the directory of a run (the weights of its newest
    checkpoint). The trainer's ranks load the model."""
    url: str | None = None
    """Address of an SGLang server for the model, http://HOST:PORT; the run queries it while the
    policy samples."""
    hint: str | None = None
    """url: what the teacher reads behind the user's last message, and the policy does not; {label}
    and {demonstration} are those of the prompt's row. Null: it reads what the policy reads."""
    sources: list[str] | None = None
    """Names of the entries of `data.mix` whose prompts it teaches; null: all prompts, if there is
    only one teacher."""

    @property
    def called(self) -> str:
        """Return the name for people."""
        return self.path or self.url or "without path and url"


class Distill(Section):
    """What to learn from teacher models. A teacher scores each token that the policy samples, in
    addition to the reward or instead of it; with `train.objective: distillation`, it scores each
    token of the rows of `data.train`."""

    teachers: list[Teacher] = Field(default=[])
    """[{path: big}] or [{url: 'http://HOST:PORT'}]; with several teachers, each has the `sources`
    of `data.mix` that it teaches: a prompt has exactly one teacher. Empty: no distillation."""
    kl: Literal["sampled", "reverse", "forward"] = "sampled"
    """Distance between policy and teacher. sampled: log pi - log teacher of the sampled token
    reduces its advantage, as `train.credit` describes; reverse, forward: KL(policy || teacher) or
    KL(teacher || policy), with its gradient, as a term of the loss; it covers the teacher's `top_k`
    likeliest tokens and treats all others as one."""
    top_k: Positive = 32
    """reverse, forward: number of the teacher's tokens at each position."""
    server: Requests = Requests()
    """How to query teachers that have a `url`."""
    coef: PositiveFloat = 1.0
    """Weight of the distance."""
    cache: bool = True
    """distillation: true computes the teachers' scores of the rows once, before the first step,
    stores them in the run directory (8 x `top_k` bytes per token) and unloads the teachers; false
    keeps the teachers and scores each step's rows."""
    reward_weight: NonNegativeFloat = 0.0
    """Weight of the advantages from rewards; 0: learn from the teacher alone (`rollout.reward` may
    then be none)."""

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
        "`train.objective=distillation` needs a teacher",
        why="`train.distill.teachers` is empty",
        fix=[_EXAMPLE, "--set train.objective=supervised   # to imitate the rows"],
    )
    is_scored = rollout.is_scored_by_agent or NO_REWARD not in rollout.reward_weights
    yield Rule(
        not is_scored and not recipe.learns_from_rows and (not teachers or weight),
        "the policy has no reward to learn from",
        why=f"`rollout.reward` is {rollout.reward_name}, and "
        + (
            f"`train.distill.reward_weight` {weight:g} needs one"
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
        f"`train.objective={objective}` does not use a teacher",
        why=f"`train.distill.teachers` has {teachers[0].called}, but the loss of this objective "
        "does not use them",
        fix=["--set 'train.distill.teachers=[]'", "--set train.objective=distillation"],
    )
    yield Rule(
        objective == "distillation" and kl == "sampled",
        "`train.distill.kl=sampled` needs tokens that the policy samples",
        why=f"`train.objective` is distillation, so the tokens come from {recipe.data.train}, "
        "not from the policy",
        fix=["--set train.distill.kl=forward", "--set train.distill.kl=reverse"],
    )
    if len(teachers) > 1 or teachers[0].sources is not None:
        names = [source.called for source in recipe.data.mix or []]
        yield from _source_rules(teachers, names)


def _place_rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules that each teacher has either a path or a URL, that all have the same, and
    that a server can answer what is asked."""
    distill, temperature = recipe.train.distill, recipe.rollout.temperature
    for teacher in recipe.teachers:
        yield Rule(
            (teacher.path is None) == (teacher.url is None),
            f"a teacher of `train.distill.teachers` is {teacher.called}",
            why="a teacher has either a `path` (the trainer's ranks load it) or a `url`",
            fix=[_EXAMPLE, _SERVED],
        )
    if not distill.is_served:
        hinted = next((one for one in recipe.teachers if one.hint is not None), None)
        yield Rule(
            hinted is not None,
            "a local teacher cannot have a `hint`",
            why=f"{hinted and hinted.called} scores the sequences that the trainer learns from",
            fix=[_SERVED, "python -m sglang.launch_server --model-path FOLDER   # serves it"],
        )
        return
    for teacher in recipe.teachers:
        yield Rule(
            teacher.url is None,
            "teachers must be either all local or all served",
            why=f"{teacher.called} is a path, and another teacher has a `url`",
            fix="python -m sglang.launch_server --model-path FOLDER   # serves this one too",
        )
        yield from _hint_rules(recipe, teacher)
        check_url(
            teacher.url or "",
            key="train.distill.teachers[].url",
            section="train.distill.server",
            example="http://HOST:PORT",
        )
    yield Rule(
        recipe.train.objective == "distillation" and not distill.cache,
        "served teachers cannot be queried at each step",
        why="`train.distill.cache` is false, but the rows are the same in each epoch",
        fix="--set train.distill.cache=true",
    )
    yield Rule(
        not recipe.learns_from_rows and temperature != 1.0,
        "the served teacher and the policy would use different temperatures",
        why=f"`rollout.temperature` is {temperature:g}, but SGLang scores prompts at temperature 1",
        fix=["--set rollout.temperature=1", _EXAMPLE],
    )


def _hint_rules(recipe: Recipe, teacher: Teacher) -> Iterator[Rule]:
    """Yield the rules for a hint, which replaces the end of a prompt: it needs prompts with one
    response each."""
    if teacher.hint is None:
        return
    yield Rule(
        recipe.learns_from_rows,
        "a teacher that scores rows cannot have a `hint`",
        why="`train.objective=distillation` learns from the rows, which hold their responses",
        fix="--set train.objective=policy   # the policy samples, and the teacher knows the answer",
    )
    yield Rule(
        recipe.rollout.agent != "single_turn",
        "a teacher with a `hint` needs `rollout.agent=single_turn`",
        why=f"`rollout.agent` is {recipe.rollout.agent}, whose prompts may change between turns",
        fix="--set rollout.agent=single_turn",
    )


def hints_at(recipe: Recipe, field: str, *, source: str | None = None) -> bool:
    """Return True if the hint of a teacher of these prompts contains this field of their rows."""
    return any(
        f"{{{field}}}" in (teacher.hint or "")
        for teacher in recipe.teachers
        if source is None or source in (teacher.sources or [source])
    )


def _source_rules(teachers: list[Teacher], names: list[str]) -> Iterator[Rule]:
    """Yield the rules that each source of the mix has one teacher, and each teacher has a
    source."""
    taught: dict[str, str] = {}
    for teacher in teachers:
        yield Rule(
            not teacher.sources,
            f"the sources of the teacher {teacher.called} are missing",
            why=f"the recipe has {len(teachers)} teachers, and this one does not name its "
            "`sources`",
            fix="list entries of data.mix for each teacher: {..., sources: "
            f"[{names[0] if names else 'math'}]}}",
        )
        for name in teacher.sources or []:
            yield Rule(
                name not in names,
                f"the source `{name}` of the teacher {teacher.called} does not exist",
                why=f"`data.mix` has {', '.join(names) or 'no entries'}",
                fix="name an entry of data.mix, or give an entry that `name`",
            )
            yield Rule(
                name in taught,
                f"`{name}` has two teachers",
                why=f"{taught.get(name)} and {teacher.called}, but each prompt has exactly one "
                "teacher",
                fix=f"remove `{name}` from the `sources` of one of them",
            )
            taught[name] = teacher.called
    missing = [name for name in names if name not in taught]
    yield Rule(
        missing,
        f"no teacher covers `{''.join(missing[:1])}`",
        why=f"`train.distill.teachers` cover {', '.join(taught)}; data.mix also has "
        f"{', '.join(missing)}",
        fix=f"add `{''.join(missing[:1])}` to the `sources` of a teacher",
    )


REWARD_MODEL = "reward_model"
"""Name of the reward that a model computes, and of the objective that trains such a model."""


def without_teachers(recipe: Recipe) -> Recipe:
    """Return the recipe without its teachers."""
    return recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"distill": Distill()})}
    )


def without_rewards(recipe: Recipe) -> Recipe:
    """Return the recipe without any reward."""
    return _with_rewards(recipe, lambda reward: NO_REWARD)


def policy_only(recipe: Recipe) -> Recipe:
    """Return the same data as the policy reads it: without teachers, critic and reward model; other
    rewards and their requirements on labels stay."""
    objective = recipe.train.objective
    changes = {
        "credit": "sample",
        "objective": "preference" if objective == REWARD_MODEL else objective,
    }
    recipe = _with_rewards(without_teachers(recipe), _without_reward_model)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})


def _with_rewards(recipe: Recipe, changed: Callable[[object], object]) -> Recipe:
    """Return the recipe with `changed` applied to each of its rewards: to a name, or to names with
    weights."""
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


def _without_reward_model(reward: object) -> object:
    """Return the reward without `reward_model`."""
    if isinstance(reward, dict):
        others = {name: weight for name, weight in reward.items() if name != REWARD_MODEL}
        return others or NO_REWARD
    return NO_REWARD if reward == REWARD_MODEL else reward
