"""Defines the section `data`: prompts to answer, or rows to learn from. With its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.recipe.data_files import FIELDS, check_names
from milescli.recipe.section import Names, Positive, PositiveFloat, Rule, Section, set_option
from milescli.recipe.train import PAIR_OBJECTIVES, ROW_OBJECTIVES

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe


class MixSource(Section):
    """One of the sources that `data.mix` interleaves."""

    path: Names
    """Prompts, in the same formats as `data.prompts`: a file, a data set, a task, or a list of
    these."""
    name: str | None = None
    """Name of the source in records; null: its path."""
    weight: PositiveFloat | None = None
    """Share of the prompts, relative to the weights of all sources; null: 1, unless `quota` is
    set."""
    quota: Positive | None = None
    """Number of prompts that the source contributes to each pass over the mix; use it instead of a
    weight."""
    reward: str | None = None
    """Reward for the source's prompts; null: `rollout.reward`."""
    prompt_key: str | None = None
    label_key: str | None = None
    """Columns of the source; null: those that `data` names."""

    @property
    def called(self) -> str:
        """Return its name in records."""
        return self.name or (self.path if isinstance(self.path, str) else ", ".join(self.path))


class Data(Section):
    """Where prompts, or rows to learn from, come from."""

    prompts: Names | None = None
    """A .jsonl, .parquet, .csv or .arrow file; `hf:NAME[@REVISION][:SUBSET][:SPLIT]` to download a
    data set from the hub (`hf:openai/gsm8k:main:train`); or `task:NAME` for prompts that miles
    generates (`task:sums`). A range of rows: `train.jsonl[0:1000]`. Or a list of these, which is
    read as one."""
    mix: list[MixSource] | None = None
    """Several sources instead of `prompts`: a list of {path: train.jsonl, weight: 2}, or with
    `quota` instead of `weight`, and with the other settings of one source (name, reward,
    prompt_key, label_key). The run's seed fixes the order in which they are interleaved."""
    eval: Names | None = None
    """Held-out prompts, in the same formats; null: no evaluation."""
    demonstrations: Names | None = None
    """Worked examples for the warm-up, in the same formats."""
    train: Names | None = None
    """Rows to learn from without sampling, in the same formats: chats, prompts with responses or
    plain texts (`train.objective: supervised`, distillation), or pairs of a chosen and a rejected
    response (preference, reward_model). Use it instead of `prompts`."""
    validation: Names | None = None
    """Held-out rows of the same kind as `train`, for measuring the loss; null: none."""
    max_row_tokens: Positive = 1024
    """Longest row of `train` and `validation` in tokens, including the chat template."""
    long_rows: Literal["drop", "truncate", "error"] = "drop"
    """What to do with longer rows. drop: skip and count them; truncate: cut off the end; error:
    reject the run."""
    chat_template: str = "auto"
    """How messages become text. auto: with the template of the model's tokenizer; none: prompts are
    raw text, as base models read it; chatml; or a file that contains a Jinja template."""
    prompt_key: str | None = None
    """Column of the prompt (text, or a list of messages), or a field in one (`input.messages`);
    null: found from the layout of the rows or from common column names (`docs/data.md`)."""
    label_key: str | None = None
    """Column of the label, or a field in one (`reward_model.ground_truth`); null: found from the
    layout of the rows or from common column names."""
    response_key: str | None = None
    """Column of the response in rows of prompts and responses; null: found from the layout of the
    rows or from common column names."""
    ignore_columns: Names | None = None
    """Columns to ignore although they look like part of the prompt (`images`, `context`); null:
    such a column stops the run."""
    remote_images: bool = False
    """Download images whose rows contain addresses (`https://...`), once, into `~/.cache/miles`;
    false: reject such rows."""
    system_prompt: str | None = None
    """System message to put before every prompt; null: none."""
    max_prompt_tokens: Positive = 256
    """Longest prompt in tokens, including the chat template."""
    long_prompts: Literal["drop", "error"] = "drop"
    """What to do with longer prompts. drop: skip and count them; error: reject the run."""
    dedup: Literal["none", "exact"] = "none"
    """exact: keep only the first of several identical training prompts; none: keep all of them."""
    shuffle: bool = True
    """Shuffle every epoch, in an order that the run's seed fixes."""
    curriculum: str = "none"
    """How a step chooses its prompts among the next ones of the epoch. none: all, in order;
    learnable: those that the policy answers correctly about half of the time, untried ones first;
    or an import path."""
    curriculum_pool: Annotated[float, Field(ge=1.0)] = 4.0
    """Number of candidates for each prompt that a step needs; those not chosen wait for the next
    epoch."""


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules that each stage has data, and that files are named correctly."""
    data, warmup, evaluation = recipe.data, recipe.warmup, recipe.eval
    needs_prompts = not recipe.learns_from_rows and recipe.train.objective not in ROW_OBJECTIVES
    yield Rule(
        needs_prompts and not data.prompts and not data.mix,
        "the recipe has no prompts",
        why="`data.prompts` is not set, so the model has nothing to respond to",
        fix=["--set data.prompts=train.jsonl", "--set data.prompts=task:sums"],
    )
    yield Rule(
        warmup.steps and not data.demonstrations,
        f"{warmup.steps} warm-up steps have no examples to imitate",
        why="`warmup.steps` needs worked examples in `data.demonstrations`",
        fix=[
            set_option("data.demonstrations", data.prompts or "FILE.jsonl"),
            "--set warmup.steps=0",
        ],
    )
    yield Rule(
        needs_prompts and evaluation.every and not data.eval,
        f"the evaluation every {evaluation.every} steps has no prompts",
        why="`eval.every` needs held-out prompts in `data.eval`",
        fix=["--set data.eval=test.jsonl", "--set eval.every=0"],
    )
    yield from _mix_rules(data)
    for name in FIELDS:
        check_names(getattr(data, name), key=f"data.{name}")


def _mix_rules(data: Data) -> Iterator[Rule]:
    """Yield the rules for the entries of `mix`."""
    mix = data.mix or []
    yield Rule(
        mix and data.prompts is not None,
        "the recipe has two sources of prompts",
        why=f"`data.prompts` is `{data.prompts}`, and `data.mix` lists {len(mix)} more",
        fix=["--set data.prompts=null", "--set data.mix=null"],
    )
    for number, source in enumerate(mix, start=1):
        check_names(source.path, key="data.mix")
        yield Rule(
            source.weight is not None and source.quota is not None,
            f"source {number} of `data.mix` has both a weight and a quota",
            why="a weight is a share of the prompts; a quota is their number in each pass",
            fix=f"remove one of them from `{source.called}`",
        )
    without = [source.called for source in mix if source.quota is None]
    first = without[0] if without else ""
    yield Rule(
        0 < len(without) < len(mix),
        "`data.mix` has quotas for some of its sources only",
        why=f"`{first}` has no quota, so its number of prompts is undefined",
        fix=f"give `{first}` a quota, or give every source a weight",
    )
    names = [source.called for source in mix]
    twice = next((name for name in names if names.count(name) > 1), None)
    yield Rule(
        twice,
        f"two sources of `data.mix` have the name `{twice}`",
        why="records and rewards identify sources by name",
        fix="give each source a different `name`",
    )


def row_rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for runs that learn from rows of a file instead of samples."""
    data, train, objective = recipe.data, recipe.train, recipe.train.objective
    key = "prompts" if data.prompts is not None else "mix"
    imitates = " --set train.objective=supervised" * (objective == "policy")
    yield Rule(
        data.train is not None and (data.prompts is not None or data.mix),
        "the recipe has two sources of training data",
        why=f"`data.train` is {data.train}, and `data.{key}` is set: a run learns either from "
        "rows as they are, or from responses that engines sample for prompts",
        fix=[f"--set data.{key}=null{imitates}", "--set data.train=null"],
    )
    yield Rule(
        objective in ROW_OBJECTIVES and data.train is None,
        f"`train.objective={objective}` has no training data",
        why="this objective learns from "
        f"{'pairs' if objective in PAIR_OBJECTIVES else 'chats or texts'} in `data.train`, which "
        "is not set",
        fix=[
            f"{set_option('data.train', data.prompts or 'FILE.jsonl')} --set data.prompts=null",
            "--set train.objective=policy   # to learn from what engines sample",
        ],
    )
    yield Rule(
        data.train is not None and objective == "policy",
        "`train.objective=policy` cannot learn from rows",
        why=f"this objective reinforces what engines sample, but `data.train` is {data.train}",
        fix=[
            "--set train.objective=supervised   # to imitate them",
            f"{set_option('data.prompts', data.train)} --set data.train=null",
        ],
    )
    if recipe.learns_from_rows:
        yield from _rules_with_rows(recipe)
        return
    key = "train.epochs" if train.epochs is not None else "data.validation"
    yield Rule(
        train.epochs is not None or data.validation is not None,
        f"`{key}` only applies to runs that learn from rows",
        why="`data.train` is not set, and a run that samples prompts has no fixed number of rows",
        fix=[f"--set {key}=null", "--set data.train=FILE.jsonl --set data.prompts=null"],
    )


def _rules_with_rows(recipe: Recipe) -> Iterator[Rule]:
    data, train, objective = recipe.data, recipe.train, recipe.train.objective
    yield Rule(
        train.updates_per_step > 1,
        "rows cannot be split into several updates",
        why=f"`train.updates_per_step` is {train.updates_per_step}, but a step of "
        f"`train.objective={objective}` is one update on `train.batch_size` rows",
        fix=[
            "--set train.updates_per_step=1",
            "--set train.updates_per_step=1 "
            f"--set train.batch_size={max(1, train.batch_size // train.updates_per_step)}",
        ],
    )
    yield Rule(
        recipe.joins_rows and train.batch_size == 1,
        "`train.preference.loss=kto` needs several rows a step",
        why="`train.batch_size` is 1, and it estimates the KL from the reference on the prompt of "
        "one row and the response of another",
        fix="--set train.batch_size=16",
    )
    yield Rule(
        recipe.joins_rows and data.validation is not None and recipe.eval.num_prompts == 1,
        "`train.preference.loss=kto` needs several held-out rows",
        why="`eval.num_prompts` is 1, and it estimates the KL from the reference on the prompt of "
        "one row and the response of another",
        fix=["--set eval.num_prompts=64", "--set data.validation=null --set eval.every=0"],
    )
    if objective in ROW_OBJECTIVES:
        yield from _rules_without_effect(recipe)
    yield Rule(
        recipe.trains_scores and recipe.warmup.steps,
        f"`train.objective={objective}` does not support a warm-up",
        why=f"`warmup.steps` is {recipe.warmup.steps}: the warm-up imitates responses, but this "
        "model returns a score instead of text",
        fix="--set warmup.steps=0   # start from a model that is already trained",
    )
    yield Rule(
        recipe.eval.every and data.eval is None and data.validation is None,
        f"the evaluation every {recipe.eval.every} steps has no data",
        why="`eval.every` needs held-out rows in `data.validation`, or prompts in `data.eval`",
        fix=["--set data.validation=FILE.jsonl", "--set eval.every=0"],
    )
    yield Rule(
        data.eval is not None and recipe.trains_scores,
        f"`train.objective={objective}` cannot answer prompts",
        why=f"its model returns a score instead of text, but `data.eval` is {data.eval}",
        fix="--set data.eval=null   # data.validation evaluates it on held-out pairs",
    )
    yield Rule(
        data.validation is not None and data.validation == data.train,
        "`data.validation` is the same as `data.train`",
        why="the validation loss would be computed on training rows",
        fix="--set data.validation=FILE.jsonl   # other rows",
    )


def _rules_without_effect(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules against settings that no built-in objective on rows reads. An objective of
    the user's may read them."""
    train, objective = recipe.train, f"`train.objective={recipe.train.objective}`"
    terms = {
        "kl_coef": (train.kl_coef, "a KL term", "0"),
        "entropy_coef": (train.entropy_coef, "an entropy bonus", "0"),
        "entropy_target": (train.entropy_target, "an entropy bonus", "null"),
    }
    for name, (value, term, off) in terms.items():
        yield Rule(
            value,
            f"`train.{name}` has no effect on {objective}",
            why=f"it is {value}, but only `train.objective=policy` has {term}",
            fix=f"--set train.{name}={off}",
        )
    caches = recipe.caches_reference
    live = ["--set train.preference.reference=live   # score the rows of each step"] * caches
    why = (
        "the log-probs of all rows by the reference are computed once, before the first step"
        if caches
        else f"{objective} has no term against the initial weights"
    )
    yield Rule(
        train.reference and not recipe.scores_reference,
        f"`train.reference=true` has no effect on {objective}",
        why=why,
        fix=["--set train.reference=null", *live],
    )
    yield Rule(
        train.reference_every and not recipe.scores_reference,
        "there is no reference to update",
        why=f"`train.reference_every` is {train.reference_every}, but {why}",
        fix=["--set train.reference_every=0", *live],
    )
