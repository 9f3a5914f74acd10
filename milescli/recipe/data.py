"""What a recipe can say of data: prompts to answer, or rows to learn from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from milescli.recipe.section import Names, Positive, PositiveFloat, Section


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
        """Its name in records."""
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
    """Column of the prompt (text, or a list of messages); null: the first of prompt, messages,
    question, problem and input that is there."""
    label_key: str | None = None
    """Column of the label; null: the first of label, answer, solution and target that is there."""
    response_key: str | None = None
    """Column of the response in rows of prompts and responses; null: the first of completion,
    response, output, demonstration and answer that is there."""
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
