"""`train.lora`: what is trained beside a frozen model, instead of it. Part of the schema, with its
rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.recipe.section import Positive, PositiveFloat, Rule, Section

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe


class Lora(Section):
    """A low-rank adapter (arXiv 2106.09685): y = W x + scaling * B A x, and W stays as it is."""

    rank: Positive | None = None
    """r of A [r, in] and B [out, r]; null: no adapter, all weights are trained."""
    alpha: PositiveFloat | None = None
    """scaling = alpha / r (rslora: / sqrt(r)); null: twice the rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Of x before A, while gradients are computed; runs that sample have none."""
    targets: list[str] = Field(default=["all-linear"], min_length=1)
    """Last parts of module names, as folders have them (q_proj); all-linear: every matrix of the
    layers that can have an adapter."""
    exclude: list[str] = Field(default=[])
    """Of those, the ones that have none; a part of the whole name, too (experts)."""
    type: Literal["lora", "rslora", "dora"] = "lora"
    """dora is refused: no engine serves it."""
    experts: Literal["each", "shared_outer"] = "each"
    """each: a pair for each expert; shared_outer: one A for all experts of a layer where they read
    (gate, up), and one B where they write (down), the other matrix for each."""
    publish: Literal["auto", "adapter", "merged"] = "auto"
    """What engines are sent: the adapter, which they compute beside the frozen model, or the model
    with it merged in; auto: chosen by the plan."""

    @property
    def is_on(self) -> bool:
        """Return True if an adapter is trained."""
        return self.rank is not None


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for runs that train an adapter, or start with one."""
    lora, adapter, layout = recipe.train.lora, recipe.model.adapter, recipe.parallel
    yield Rule(
        adapter is not None and not lora.is_on,
        f"`model.adapter={adapter}` in a run that trains all weights",
        why="an adapter is begun with where one is trained",
        fix=[
            "--lora RANK   # that of the adapter",
            f"miles export {adapter} --to DIR --merge   # then --set model.path=DIR",
        ],
    )
    if not lora.is_on:
        return
    yield Rule(
        lora.type == "dora",
        "`train.lora.type=dora` cannot be served",
        why="DoRA scales each column of W + B A to a length of its own (arXiv 2402.09353), and "
        "SGLang 0.5.20 serves W x + B A x alone: it would sample from another policy",
        fix=["--set train.lora.type=lora", "--set train.lora.type=rslora"],
    )
    yield Rule(
        recipe.trains_scores,
        f"`train.objective={recipe.train.objective}` trains no adapter",
        why="its model begins with a new score head, which must be trained, too, and an "
        "adapter leaves everything else as it is",
        fix="--set train.lora.rank=null",
    )
    yield Rule(
        lora.dropout and not recipe.learns_from_rows,
        f"`train.lora.dropout={lora.dropout}` in a run that learns from samples",
        why="the engine samples without dropout, so that the trainer's log-probs would be of "
        "another policy than the one that sampled",
        fix="--set train.lora.dropout=0",
    )
    yield Rule(
        recipe.weights.format != "hf",
        f"`weights.format={recipe.weights.format}` with an adapter",
        why="engines are sent the adapter's matrices as they are, and no weight of the model",
        fix=["--set weights.format=hf", "--set train.lora.rank=null"],
    )
    yield Rule(
        lora.publish == "merged" and recipe.adapters,
        "`train.lora.publish=merged` with several adapters",
        why="one set of engines serves them all, each beside the same frozen model",
        fix="--set train.lora.publish=auto",
    )
    yield Rule(
        (layout.etp or 1) > (layout.tp or layout.etp or 1),
        f"`parallel.etp={layout.etp}` above `parallel.tp={layout.tp}` with an adapter",
        why="the norm of the gradient would count adapters of experts more than once",
        fix=f"--set parallel.etp={layout.tp}",
    )


def doubts(recipe: Recipe) -> list[str]:
    """Return warnings about settings that are probably not intended."""
    if not recipe.train.lora.is_on or recipe.model.scratch is None:
        return []
    return [
        "the adapter is trained over random weights (`model.scratch`), which it cannot make a "
        "model of; begin with one that was trained: --set model.scratch=null --set "
        "model.path=RUN --set warmup.steps=0"
    ]
