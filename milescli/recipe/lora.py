"""`train.lora`: what is trained beside a frozen model, instead of it. Part of the schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from milescli.recipe.section import Positive, PositiveFloat, Section


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
        """An adapter is trained."""
        return self.rank is not None
