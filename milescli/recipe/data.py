"""What a recipe can say of data: prompts to answer, or rows to learn from; and the rules of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.recipe.data_files import FIELDS, check_names
from milescli.recipe.section import Names, Positive, PositiveFloat, Rule, Section
from milescli.recipe.train import OF_PAIRS, OF_ROWS

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe


class MixSource(Section):
    """One of the sources that `data.mix` interleaves."""

    path: Names
    """As `data.prompts`: a file, a data set, a task, or a list of these."""
    name: str | None = None
    """Of its prompts, in records; null: its path."""
    weight: PositiveFloat | None = None
    """Its share, among the weights of all; null without a quota: 1."""
    quota: Positive | None = None
    """Prompts that it gives to each pass over the mix, instead of a weight."""
    reward: str | None = None
    """Scores its prompts; null: `rollout.reward`."""
    prompt_key: str | None = None
    label_key: str | None = None
    """Its columns; null: as `data` has them."""

    @property
    def called(self) -> str:
        """Return its name in records."""
        return self.name or (self.path if isinstance(self.path, str) else ", ".join(self.path))


class Data(Section):
    """Where prompts, or the rows to learn from, come from."""

    prompts: Names | None = None
    """A .jsonl, .parquet, .csv or .arrow file; `hf:NAME[@REVISION][:SUBSET][:SPLIT]` for a data set
    of the hub (`hf:openai/gsm8k:main:train`), which is fetched; or `task:NAME` for prompts that
    miles makes itself (`task:sums`). Some rows of one: `train.jsonl[0:1000]`. Or a list of these,
    read as one."""
    mix: list[MixSource] | None = None
    """Several sources instead of `prompts`, interleaved in an order fixed by the run's seed: a list
    of {path: train.jsonl, weight: 2}, or with `quota` in the place of `weight`; and what else
    belongs to one source (name, reward, prompt_key, label_key)."""
    eval: Names | None = None
    """Held-out prompts, in the same forms; null: no evaluation."""
    demonstrations: Names | None = None
    """Worked examples for the warm-up, in the same forms."""
    train: Names | None = None
    """Rows to learn from without sampling, in the same forms: chats, prompts with responses or
    plain texts (`train.objective: supervised`, distillation), or pairs of a chosen and a rejected
    response (preference, reward_model). Instead of `prompts`."""
    validation: Names | None = None
    """Held-out rows of the same kind as `train`, whose loss is measured; null: none."""
    max_row_tokens: Positive = 1024
    """Longest row of `train` and `validation`, chat template included."""
    long_rows: Literal["drop", "truncate", "error"] = "drop"
    """What happens to longer rows. drop: left out and counted; truncate: cut at the end; error: the
    run is refused."""
    chat_template: str = "auto"
    """How messages become text. auto: by the template of the model's tokenizer; none: prompts are
    raw text, as base models read it; chatml; or a file that holds a template (Jinja)."""
    prompt_key: str | None = None
    """Column of the prompt (text, or a list of messages), or a field in one (`input.messages`);
    null: found by the layout of the rows, or by its name (`docs/data.md`)."""
    label_key: str | None = None
    """Column of the label, or a field in one (`reward_model.ground_truth`); null: found by the
    layout of the rows, or by its name."""
    response_key: str | None = None
    """Column of the response in rows of prompts and responses; null: found by the layout of the
    rows, or by its name."""
    ignore_columns: Names | None = None
    """Columns that are left out, though they look like part of the prompt (`images`, `context`);
    null: such a column stops the run."""
    remote_images: bool = False
    """Fetch images of rows that are addresses (`https://...`), once, into `~/.cache/miles`; false:
    such a row is refused."""
    system_prompt: str | None = None
    """Put before every prompt as the system message; null: none."""
    max_prompt_tokens: Positive = 256
    """Longest prompt, chat template included."""
    long_prompts: Literal["drop", "error"] = "drop"
    """What happens to longer prompts. drop: left out and counted; error: the run is refused."""
    dedup: Literal["none", "exact"] = "none"
    """exact: of training prompts that are equal, the first is kept; none: all are."""
    shuffle: bool = True
    """A new order for each epoch, fixed by the run's seed."""
    curriculum: str = "none"
    """How a step's prompts are chosen among the next ones of the epoch. none: all, as they come;
    learnable: those that the policy answers rightly about half of the time, untried ones first; or
    an import path."""
    curriculum_pool: Annotated[float, Field(ge=1.0)] = 4.0
    """Candidates for each prompt that is wanted; those not chosen wait for the next epoch."""


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules that each stage has data, with correctly named files."""
    data, warmup, evaluation = recipe.data, recipe.warmup, recipe.eval
    needs_prompts = not recipe.learns_from_rows and recipe.train.objective not in OF_ROWS
    yield Rule(
        needs_prompts and not data.prompts and not data.mix,
        "the recipe has no prompts",
        why="`data.prompts` is not set: there is nothing to respond to",
        fix=["--set data.prompts=train.jsonl", "--set data.prompts=task:sums"],
    )
    yield Rule(
        warmup.steps and not data.demonstrations,
        f"{warmup.steps} warm-up steps have nothing to imitate",
        why="`warmup.steps` needs worked answers in `data.demonstrations`",
        fix=[
            f"--set data.demonstrations={data.prompts or 'FILE.jsonl'}",
            "--set warmup.steps=0",
        ],
    )
    yield Rule(
        needs_prompts and evaluation.every and not data.eval,
        f"an evaluation every {evaluation.every} steps has nothing to evaluate on",
        why="`eval.every` needs held-out prompts in `data.eval`",
        fix=["--set data.eval=test.jsonl", "--set eval.every=0"],
    )
    yield from _mix_rules(data)
    for name in FIELDS:
        check_names(getattr(data, name), key=f"data.{name}")


def _mix_rules(data: Data) -> Iterator[Rule]:
    """That bind the entries of `mix`."""
    mix = data.mix or []
    yield Rule(
        mix and data.prompts is not None,
        "the recipe has two sources of prompts",
        why=f"`data.prompts` is `{data.prompts}` and `data.mix` has {len(mix)} more",
        fix=["--set data.prompts=null", "--set data.mix=null"],
    )
    for number, source in enumerate(mix, start=1):
        check_names(source.path, key="data.mix")
        yield Rule(
            source.weight is not None and source.quota is not None,
            f"number {number} of `data.mix` has a weight and a quota",
            why="a weight is a share of the prompts, a quota their number in each pass",
            fix=f"take one of the two off `{source.called}`",
        )
    without = [source.called for source in mix if source.quota is None]
    first = without[0] if without else ""
    yield Rule(
        0 < len(without) < len(mix),
        "`data.mix` has quotas for some of its sources only",
        why=f"how many prompts of `{first}` go with them is not said",
        fix=f"give `{first}` a quota, or all of them weights",
    )
    names = [source.called for source in mix]
    twice = next((name for name in names if names.count(name) > 1), None)
    yield Rule(
        twice,
        f"two sources of `data.mix` are called `{twice}`",
        why="records and rewards tell them apart by name",
        fix="give each a `name` of its own",
    )


def row_rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for runs that learn from rows of a file instead of samples."""
    data, train, objective = recipe.data, recipe.train, recipe.train.objective
    key = "prompts" if data.prompts is not None else "mix"
    imitates = " --set train.objective=supervised" * (objective == "policy")
    yield Rule(
        data.train is not None and (data.prompts is not None or data.mix),
        "the recipe has two things to learn from",
        why=f"`data.train` is {data.train}, and `data.{key}` is set: rows are learned from as "
        "they are, prompts are answered by engines",
        fix=[f"--set data.{key}=null{imitates}", "--set data.train=null"],
    )
    yield Rule(
        objective in OF_ROWS and data.train is None,
        f"`train.objective={objective}` has nothing to learn from",
        why=f"it takes {'pairs' if objective in OF_PAIRS else 'chats or texts'} from "
        "`data.train`, which is not set",
        fix=[
            f"--set data.train={data.prompts or 'FILE.jsonl'} --set data.prompts=null",
            "--set train.objective=policy   # to learn from what engines sample",
        ],
    )
    yield Rule(
        data.train is not None and objective == "policy",
        "`train.objective=policy` does not learn from rows",
        why=f"it reinforces what engines sample, and `data.train` is {data.train}",
        fix=[
            "--set train.objective=supervised   # to imitate them",
            f"--set data.prompts={data.train} --set data.train=null",
        ],
    )
    if recipe.learns_from_rows:
        yield from _rules_with_rows(recipe)
        return
    key = "train.epochs" if train.epochs is not None else "data.validation"
    yield Rule(
        train.epochs is not None or data.validation is not None,
        f"`{key}` is of runs that learn from rows",
        why="`data.train` is not set, and engines sample as long as `train.steps` says",
        fix=[f"--set {key}=null", "--set data.train=FILE.jsonl --set data.prompts=null"],
    )


def _rules_with_rows(recipe: Recipe) -> Iterator[Rule]:
    data, train, objective = recipe.data, recipe.train, recipe.train.objective
    yield Rule(
        train.updates_per_step > 1,
        "rows are not parted into several updates",
        why=f"`train.updates_per_step` is {train.updates_per_step}; a step of "
        f"`train.objective={objective}` is one update of `train.batch_size` rows",
        fix=[
            "--set train.updates_per_step=1",
            "--set train.updates_per_step=1 "
            f"--set train.batch_size={max(1, train.batch_size // train.updates_per_step)}",
        ],
    )
    yield Rule(
        recipe.trains_scores and recipe.warmup.steps,
        f"`train.objective={objective}` has no warm-up",
        why=f"`warmup.steps` is {recipe.warmup.steps}: it imitates responses, and a model that "
        "gives a score writes none",
        fix="--set warmup.steps=0   # begin with a model that was trained before",
    )
    yield Rule(
        recipe.eval.every and data.eval is None and data.validation is None,
        f"an evaluation every {recipe.eval.every} steps has nothing to evaluate on",
        why="`eval.every` needs held-out rows in `data.validation`, or prompts in `data.eval`",
        fix=["--set data.validation=FILE.jsonl", "--set eval.every=0"],
    )
    yield Rule(
        data.eval is not None and recipe.trains_scores,
        f"`train.objective={objective}` answers no prompts",
        why=f"its model gives a score instead of a next token, and `data.eval` is {data.eval}",
        fix="--set data.eval=null   # data.validation measures it on held-out pairs",
    )
    yield Rule(
        data.validation is not None and data.validation == data.train,
        "`data.validation` is `data.train`",
        why="the loss would be of rows that were trained on",
        fix="--set data.validation=FILE.jsonl   # other rows",
    )
