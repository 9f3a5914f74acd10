"""`train.mtp`: the multi-token-prediction layer, trained beside the policy. Part of the schema."""

from __future__ import annotations

from milescli.recipe.section import NonNegativeFloat, Section


class Mtp(Section):
    """The layer that guesses the token after next (arXiv 2412.19437, section 2.2), and by which
    engines guess ahead (`rollout.speculative.kind: mtp`)."""

    loss_weight: NonNegativeFloat | None = None
    """Weight of its loss beside the objective's: the cross-entropy of the token after next, the
    mean over an update's trained tokens. null or 0: the layer is left as it is."""
    trains_trunk: bool = False
    """Let that loss train the model below the layer too, its embedding and its output layer; false:
    the layer alone."""

    @property
    def is_on(self) -> bool:
        """The layer is trained."""
        return bool(self.loss_weight)
