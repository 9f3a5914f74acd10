"""`train.draft`: the draft model that guesses for the engines, trained beside the policy. Part of
the schema."""

from __future__ import annotations

from milescli.recipe.section import PositiveFloat, Section


class Draft(Section):
    """Of `rollout.speculative.kind: draft`: the model learns to say what the policy says, from what
    each step sampled, with an optimizer of its own that is set as the policy's."""

    lr: PositiveFloat | None = None
    """Of its optimizer, the same in every step. null: it keeps its weights."""

    @property
    def is_on(self) -> bool:
        """It is trained."""
        return self.lr is not None
