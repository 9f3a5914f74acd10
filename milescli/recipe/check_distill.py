"""Rules of `train.distill`: teachers, what each of them teaches, and what is learned beside them.
Pure; called by `check`."""

from __future__ import annotations

from milescli.core.errors import RecipeError
from milescli.recipe.check_url import check_url
from milescli.recipe.schema import Recipe

_EXAMPLE = "--set 'train.distill.teachers=[{path: FOLDER}]'"
_SERVED = "--set 'train.distill.teachers=[{url: \"http://HOST:PORT\"}]'"
NO_REWARD = "none"
"""The name of the reward that scores nothing."""


def check_distill(recipe: Recipe) -> None:
    """Raises RecipeError."""
    _someone_to_learn_from(recipe)
    if recipe.teachers:
        _places(recipe)
        _objective(recipe)
        _routing(recipe)


def _someone_to_learn_from(recipe: Recipe) -> None:
    if recipe.train.objective == "distillation" and not recipe.teachers:
        raise RecipeError(
            "`train.objective=distillation` has no teacher",
            why="`train.distill.teachers` is empty",
            fix=[_EXAMPLE, "--set train.objective=supervised   # to imitate the rows"],
        )
    rollout = recipe.rollout
    is_scored = rollout.is_scored_by_agent or NO_REWARD not in rollout.reward_weights
    unrewarded = not is_scored and not recipe.learns_from_rows
    weight = recipe.train.distill.reward_weight
    if unrewarded and (not recipe.teachers or weight):
        raise RecipeError(
            "there is no reward to learn from",
            why=f"`rollout.reward` is {rollout.reward_name}, and "
            + (
                f"`train.distill.reward_weight` {weight:g} asks for one"
                if recipe.teachers
                else "the run has no teacher either"
            ),
            fix=["--set rollout.reward=math"]
            + (["--set train.distill.reward_weight=0"] if recipe.teachers else [_EXAMPLE]),
        )


def _places(recipe: Recipe) -> None:
    """Each teacher is here or served, and all are alike; a served one can say what is asked."""
    distill = recipe.train.distill
    for teacher in recipe.teachers:
        if (teacher.path is None) == (teacher.url is None):
            raise RecipeError(
                f"a teacher of `train.distill.teachers` is {teacher.called}",
                why="it has either a `path`, and the trainer's ranks hold it, or a `url`",
                fix=[_EXAMPLE, _SERVED],
            )
    if not distill.is_served:
        return
    for teacher in recipe.teachers:
        if teacher.url is None:
            raise RecipeError(
                "teachers are all here, or all served",
                why=f"{teacher.called} is a path, and another of them has a `url`",
                fix="python -m sglang.launch_server --model-path FOLDER   # serves it too",
            )
        check_url(
            teacher.url,
            key="train.distill.teachers[].url",
            section="train.distill.server",
            example="http://HOST:PORT",
        )
    if recipe.train.objective == "distillation" and not distill.cache:
        raise RecipeError(
            "served teachers are not asked at each step",
            why="`train.distill.cache` is false, and the rows are the same in each epoch",
            fix="--set train.distill.cache=true",
        )
    if not recipe.learns_from_rows and recipe.rollout.temperature != 1.0:
        raise RecipeError(
            "a served teacher would be asked at another temperature than the policy",
            why=f"`rollout.temperature` is {recipe.rollout.temperature:g}, and SGLang says what a "
            "model thinks of a prompt at 1",
            fix=["--set rollout.temperature=1", _EXAMPLE],
        )


def _objective(recipe: Recipe) -> None:
    objective, kl = recipe.train.objective, recipe.train.distill.kl
    if objective in ("supervised", "preference", "reward_model"):
        raise RecipeError(
            f"`train.objective={objective}` has no use for a teacher",
            why=f"`train.distill.teachers` has {recipe.teachers[0].called}, and its loss compares "
            "with none",
            fix=["--set 'train.distill.teachers=[]'", "--set train.objective=distillation"],
        )
    if objective == "distillation" and kl == "sampled":
        raise RecipeError(
            "`train.distill.kl=sampled` is of tokens that the policy samples",
            why=f"`train.objective` is distillation: the tokens are those of {recipe.data.train}, "
            "which somebody else wrote",
            fix=["--set train.distill.kl=forward", "--set train.distill.kl=reverse"],
        )


def _routing(recipe: Recipe) -> None:
    """Each source of the mix has one teacher, and each teacher a source."""
    teachers, mix = recipe.teachers, recipe.data.mix or []
    names = [source.called for source in mix]
    if len(teachers) == 1 and teachers[0].sources is None:
        return
    taught: dict[str, str] = {}
    for teacher in teachers:
        if not teacher.sources:
            raise RecipeError(
                f"what does the teacher {teacher.called} teach?",
                why=f"the recipe has {len(teachers)} teachers, and this one names no `sources`",
                fix="give each teacher the names of entries of data.mix: "
                f"{{..., sources: [{names[0] if names else 'math'}]}}",
            )
        for name in teacher.sources:
            if name not in names:
                raise RecipeError(
                    f"the teacher {teacher.called} teaches `{name}`, which is no source of prompts",
                    why=f"`data.mix` has {', '.join(names) or 'no entries'}",
                    fix="name an entry of data.mix, or give one that `name`",
                )
            if name in taught:
                raise RecipeError(
                    f"`{name}` has two teachers",
                    why=f"{taught[name]} and {teacher.called}; a prompt is learned from one",
                    fix=f"take `{name}` off the `sources` of one of them",
                )
            taught[name] = teacher.called
    if missing := [name for name in names if name not in taught]:
        raise RecipeError(
            f"nobody teaches `{missing[0]}`",
            why=f"`train.distill.teachers` teach {', '.join(taught)}; data.mix has "
            f"{', '.join(missing)} too",
            fix=f"add `{missing[0]}` to the `sources` of a teacher",
        )
