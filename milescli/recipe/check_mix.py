"""Rules that bind the entries of `data.mix`. Pure; called by `check`."""

from __future__ import annotations

from milescli.core.errors import RecipeError
from milescli.recipe.data import Data
from milescli.recipe.data_files import check_names


def check_mix(data: Data) -> None:
    """Raises RecipeError where the mix cannot be meant."""
    mix = data.mix or []
    if mix and data.prompts is not None:
        raise RecipeError(
            "the recipe has two sources of prompts",
            why=f"`data.prompts` is `{data.prompts}` and `data.mix` has {len(mix)} more",
            fix=["--set data.prompts=null", "--set data.mix=null"],
        )
    for number, source in enumerate(mix, start=1):
        check_names(source.path, key="data.mix")
        if source.weight is not None and source.quota is not None:
            raise RecipeError(
                f"number {number} of `data.mix` has a weight and a quota",
                why="a weight is a share of the prompts, a quota their number in each pass",
                fix=f"take one of the two off `{source.called}`",
            )
    num_quotas = sum(source.quota is not None for source in mix)
    if 0 < num_quotas < len(mix):
        without = next(source for source in mix if source.quota is None)
        raise RecipeError(
            "`data.mix` has quotas for some of its sources only",
            why=f"how many prompts of `{without.called}` go with them is not said",
            fix=f"give `{without.called}` a quota, or all of them weights",
        )
    names = [source.called for source in mix]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RecipeError(
            f"two sources of `data.mix` are called `{twice}`",
            why="records and rewards tell them apart by name",
            fix="give each a `name` of its own",
        )
