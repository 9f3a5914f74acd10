"""Lists the checks that are made before a device is taken: each has a name, says what it compares,
and ends as ok, with doubts, with a refusal, or as skipped with the reason. `launch`, `launch
--dry-run`, `data check` and `doctor --recipe` all run this table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from milescli.agents.environment import try_environment
from milescli.backends.sglang.launch.servable import fault_of_images
from milescli.console.output import Output
from milescli.core.errors import DataError, MilesError
from milescli.data.file_prompts import FilePrompts
from milescli.data.tokenizer import ChatTokenizer
from milescli.models import ModelFacts
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.schema import Recipe, Rollout
from milescli.runtime.inputs import token_checks
from milescli.runtime.inputs.auxiliary_models import (
    compare_tokenizers,
    require_adapter,
)
from milescli.runtime.inputs.data_files import (
    check_labels_of,
    near_leak_warning,
    refuse_leak,
    refuse_trained_prompts,
)
from milescli.runtime.inputs.model_facts import require_positions
from milescli.runtime.inputs.reward_trial import try_rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSubject:
    """Holds the parts of a run's inputs that are compared. If the caller could not load a part,
    `missing` says why."""

    recipe: Recipe
    loaded: LoadedRecipe | None = None
    """The recipe with the origins of its values; None after a run was planned."""
    facts: ModelFacts | None = None
    tokenizer: ChatTokenizer | None = None
    own_stop_ids: Sequence[int] = ()
    """Tokens that end a turn of the chat template, if engines do not know them."""
    trained: Sequence[tuple[FilePrompts, Rollout]] = ()
    """The prompts that are trained on, source by source, each with how it is scored."""
    heldout: FilePrompts | None = None
    rows: Sequence[Any] = ()
    """Trajectories or pairs to train on."""
    rewards_tried: bool = False
    """True if the user's rewards were called already."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Name of a part -> why it could not be loaded."""
    output: Output | None = None

    @property
    def prompts(self) -> list[tuple[FilePrompts, Rollout]]:
        """Return all prompts that the policy will answer."""
        graded = [(self.heldout, self.recipe.rollout)] if self.heldout is not None else []
        return [*self.trained, *graded]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Describes one comparison."""

    name: str
    compares: str
    run: Callable[[Any], Iterable[str] | None]
    """Yields doubts for the user; raises the MilesError with which a run would be refused."""
    needs: tuple[str, ...] = ()
    """Parts of the subject that it needs."""


class CheckSkipped(Exception):
    """Reports why a check could not be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Holds the result of one check."""

    name: str
    compares: str
    doubts: tuple[str, ...] = ()
    refusal: MilesError | None = None
    not_checked: str = ""
    """Why the check was not made; empty if it was."""

    def as_dict(self) -> dict[str, object]:
        """Return the outcome as JSON fields."""
        state = (
            "refused"
            if self.refusal
            else "not checked"
            if self.not_checked
            else "doubt" * bool(self.doubts) or "ok"
        )
        refusal = self.refusal.as_dict() if self.refusal else None
        return {
            "name": self.name,
            "compares": self.compares,
            "state": state,
            "doubts": list(self.doubts),
            "refusal": refusal,
            "not_checked": self.not_checked or None,
        }


def run_checks(checks: Iterable[Check], subject: CheckSubject) -> Iterator[Outcome]:
    """Make each check in order, and yield its outcome."""
    for check in checks:
        made = partial(Outcome, name=check.name, compares=check.compares)
        reasons = [subject.missing[part] for part in check.needs if part in subject.missing]
        if reasons:
            yield made(not_checked=reasons[0])
            continue
        try:
            yield made(doubts=tuple(check.run(subject) or ()))
        except MilesError as error:
            yield made(refusal=error)
        except CheckSkipped as why:
            yield made(not_checked=str(why))


def require_checks(checks: Iterable[Check], subject: CheckSubject) -> list[Outcome]:
    """Make each check, warn of doubts, and return the outcomes. Raises the first refusal."""
    made = []
    for outcome in run_checks(checks, subject):
        if outcome.refusal is not None:
            raise outcome.refusal
        for doubt in outcome.doubts if subject.output else ():
            subject.output.warn(doubt)  # type: ignore[union-attr]
        made.append(outcome)
    return made


def _positions(subject: CheckSubject) -> None:
    assert subject.facts is not None, "the check needs the facts"
    if subject.recipe.data.train is None:
        require_positions(subject.recipe, subject.facts)


def _shown_images(subject: CheckSubject) -> None:
    assert subject.facts is not None, "the check needs the facts"
    is_exact = subject.recipe.train.on_policy == "exact"
    if fault := fault_of_images(subject.facts, is_exact=is_exact):
        for part, _ in subject.prompts:
            if any(prompt.images for prompt in part.first(token_checks.NUM_LOOKED_AT)):
                raise DataError(
                    f"`{subject.facts.family}` models do not support images here",
                    why=fault,
                    fix=[
                        "--set train.on_policy=auto",
                        "--set data.ignore_columns=images   # use only the texts",
                    ],
                )


def _adapter(subject: CheckSubject) -> None:
    assert subject.facts is not None, "the check needs the facts"
    require_adapter(subject.recipe, subject.facts)


def _other_models(subject: CheckSubject) -> None:
    assert subject.tokenizer is not None, "the check needs the tokenizer"
    assert subject.facts is not None, "the check needs the facts"
    if elsewhere := compare_tokenizers(subject.recipe, subject.tokenizer, subject.facts):
        raise CheckSkipped(f"{', '.join(elsewhere)} must be fetched or written out first")


def _labels(subject: CheckSubject) -> None:
    for part, rollout in subject.trained:
        check_labels_of(rollout, part, None, output=subject.output)
    if subject.heldout is not None:
        graded = subject.heldout.first(subject.recipe.eval.num_prompts)
        check_labels_of(subject.recipe.rollout, subject.heldout, graded, output=subject.output)


def _held_out(subject: CheckSubject) -> Iterator[str]:
    heldout, recipe = subject.heldout, subject.recipe
    if heldout is None:
        return
    parts = [part for part, _ in subject.trained]
    refuse_leak(heldout, parts, num_heldout=recipe.eval.num_prompts)
    graded = heldout.first(recipe.eval.num_prompts)
    if subject.rows:
        refuse_trained_prompts(graded, subject.rows)
    for part in parts if subject.output else []:
        warning = near_leak_warning(
            heldout, graded, part, named=recipe.data.eval, output=subject.output
        )
        if warning:
            yield warning


def _environment(subject: CheckSubject) -> None:
    if subject.recipe.rollout.plays_environment and subject.prompts:
        first = subject.prompts[0][0].first(1)
        try_environment(subject.recipe.rollout.environment, first[0])


def _rewards(subject: CheckSubject) -> Iterator[str]:
    tried = set[str]()
    for part, rollout in () if subject.rewards_tried else subject.prompts:
        if not tried.issuperset(rollout.reward_names):
            yield from try_rewards(rollout, part.first(1)[0], but=tried)
            tried.update(rollout.reward_names)


OTHER_MODELS = Check(
    name="other models",
    compares="tokenizers of teachers, draft, reward and role models with the policy's",
    run=_other_models,
    needs=("tokenizer", "facts"),
)
"""A launch makes this comparison while it downloads the models."""
HELD_OUT = Check(
    name="held out",
    compares="held-out prompts with all that is trained on",
    run=_held_out,
    needs=("prompts", "rows"),
)
REWARD = Check(
    name="reward",
    compares="your reward with what a run takes: it is called once, on the first row",
    run=_rewards,
    needs=("prompts",),
)
INPUTS = (
    Check(
        name="positions",
        compares="the longest prompt and response with the positions of the model",
        run=_positions,
        needs=("facts",),
    ),
    Check(
        name="images",
        compares="images of prompts with what engines show to the model",
        run=_shown_images,
        needs=("facts", "prompts"),
    ),
    Check(
        name="adapter",
        compares="names, ranks and sizes of `model.adapter` with the model below it",
        run=_adapter,
        needs=("facts",),
    ),
    Check(
        name="embedding",
        compares="the tokenizer's size with the rows of the embedding",
        run=token_checks.check_embedding,
        needs=("tokenizer",),
    ),
    Check(
        name="end of turn",
        compares="the token that ends a turn of the chat template with those at which engines stop",
        run=token_checks.check_end_tokens,
        needs=("tokenizer",),
    ),
    Check(
        name="template",
        compares="what the chat template writes with the tokens of the tokenizer",
        run=token_checks.check_markers,
        needs=("tokenizer",),
    ),
    Check(
        name="date",
        compares="what the chat template writes today with what it writes on another day",
        run=token_checks.check_template_date,
        needs=("tokenizer",),
    ),
    Check(
        name="labels",
        compares="each label with what the reward can grade",
        run=_labels,
        needs=("prompts",),
    ),
    HELD_OUT,
    Check(
        name="special tokens",
        compares="texts of users with the special tokens of the tokenizer",
        run=token_checks.check_special_tokens,
        needs=("tokenizer", "prompts"),
    ),
    Check(
        name="environment",
        compares="the environment with the first row: it is begun once",
        run=_environment,
        needs=("prompts",),
    ),
    REWARD,
)
"""Checks that need rows, model and tokenizer."""
