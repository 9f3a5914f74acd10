"""What a plan says of an MTP layer that is trained (`train.mtp`). Pure."""

from __future__ import annotations

from milescli.core.units import format_count
from milescli.models import table
from milescli.models.facts import ModelFacts
from milescli.plan.decisions import Log
from milescli.recipe.schema import Recipe


def note_mtp(recipe: Recipe, facts: ModelFacts, log: Log) -> None:
    """Nothing where none is trained, and none guesses."""
    if not facts.trains_mtp:
        if recipe.rollout.speculative.kind == "mtp":
            why = "the layer that guesses stays as it is while the policy learns"
            log.note("train.mtp.loss_weight", "off", why)
        return
    lines, through = table(facts), ""
    if recipe.train.mtp.trains_trunk:
        through = "; its loss trains the model below it, too"
    log.note(
        "train.mtp.loss_weight",
        recipe.train.mtp.loss_weight,
        f"{format_count(lines.num_mtp_parameters)} of {format_count(lines.num_parameters)} numbers "
        f"are the MTP layer's, on the last stage{through}",
    )
