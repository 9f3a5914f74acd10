"""Defines `train.lora`: an adapter that is trained instead of the whole model. Part of the schema,
with its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.recipe.section import Positive, PositiveFloat, Rule, Section

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe


class Lora(Section):
    """A low-rank adapter (arXiv 2106.09685): y = W x + scaling * B A x. W stays frozen."""

    rank: Positive | None = None
    """Rank r of the matrices A [r, in] and B [out, r]; null: no adapter, train all weights."""
    alpha: PositiveFloat | None = None
    """scaling = alpha / r (rslora: / sqrt(r)); null: twice the rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout of x before A during training; runs that sample must use 0."""
    targets: list[str] = Field(default=["all-linear"], min_length=1)
    """Modules to adapt, by the last part of their names in the model folder (q_proj); all-linear:
    every matrix of the layers that supports an adapter."""
    exclude: list[str] = Field(default=[])
    """Target modules to exclude; a name may also be a part of the whole name (experts)."""
    type: Literal["lora", "rslora", "dora"] = "lora"
    """Kind of adapter: lora or rslora. dora is rejected because no engine serves it."""
    experts: Literal["each", "shared_outer"] = "each"
    """Adapters of experts. each: one pair of matrices per expert; shared_outer: all experts of a
    layer share one A where they read (gate, up) and one B where they write (down); the other matrix
    is per expert."""
    publish: Literal["auto", "adapter", "merged"] = "auto"
    """What engines receive: the adapter, which they apply to the frozen model, or the model with
    the adapter merged; auto: the plan chooses."""

    @property
    def is_on(self) -> bool:
        """Return True if an adapter is trained."""
        return self.rank is not None


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for runs that train an adapter, or start with one."""
    lora, adapter, layout = recipe.train.lora, recipe.model.adapter, recipe.parallel
    yield Rule(
        adapter is not None and not lora.is_on,
        f"`model.adapter={adapter}` is set, but the run trains all weights",
        why="`model.adapter` starts an adapter, so the run must train one",
        fix=[
            "--lora RANK   # the rank of that adapter",
            f"miles export {adapter} --to DIR --merge   # then --set model.path=DIR",
        ],
    )
    yield Rule(
        lora.type == "dora",
        "`train.lora.type=dora` cannot be served",
        why="DoRA rescales each column of W + B A (arXiv 2402.09353), but SGLang 0.5.20 only "
        "serves W x + B A x, so it would sample from another policy",
        fix=["--set train.lora.type=lora", "--set train.lora.type=rslora"],
    )
    if not lora.is_on:
        return
    yield Rule(
        recipe.trains_scores,
        f"`train.objective={recipe.train.objective}` does not support an adapter",
        why="the model starts with a new score head that must be trained too, but an adapter "
        "freezes all other weights",
        fix="--set train.lora.rank=null",
    )
    yield Rule(
        lora.dropout and not recipe.learns_from_rows,
        f"`train.lora.dropout={lora.dropout}` does not work in a run that learns from samples",
        why="the engine samples without dropout, so the trainer would compute log-probs of "
        "another policy than the one that sampled",
        fix="--set train.lora.dropout=0",
    )
    yield Rule(
        recipe.weights.format != "hf",
        f"`weights.format={recipe.weights.format}` does not work with an adapter",
        why="engines receive the adapter's matrices unchanged, and no weights of the model",
        fix=["--set weights.format=hf", "--set train.lora.rank=null"],
    )
    yield Rule(
        lora.publish == "merged" and recipe.adapters,
        "`train.lora.publish=merged` does not work with several adapters",
        why="one set of engines serves all adapters next to the same frozen model",
        fix="--set train.lora.publish=auto",
    )
    yield Rule(
        (layout.etp or 1) > (layout.tp or layout.etp or 1),
        f"with an adapter, `parallel.etp={layout.etp}` cannot exceed `parallel.tp={layout.tp}`",
        why="the gradient norm would count the adapters of experts more than once",
        fix=f"--set parallel.etp={layout.tp}",
    )


def find_warnings(recipe: Recipe) -> list[str]:
    """Return warnings about settings that are probably not intended."""
    if not recipe.train.lora.is_on or recipe.model.scratch is None:
        return []
    return [
        "the adapter is trained over random weights (`model.scratch`), which it cannot make a "
        "model of; begin with one that was trained: --set model.scratch=null --set "
        "model.path=RUN --set warmup.steps=0"
    ]
