"""How many tokens engines guess ahead (`rollout.speculative`), and why. Pure."""

from __future__ import annotations

from milescli.plan.decisions import Log
from milescli.recipe.schema import Recipe

ON_CPU = {"ngram": 3, "draft": 3, "mtp": 1}
"""By kind: a pass over four tokens of a request takes two to three times as long as over one there,
so that a wrong guess costs what a right one saves."""
ON_DEVICES = {"ngram": 11, "draft": 3, "mtp": 3}
"""By kind: SGLang's own defaults, of MTP those for DeepSeek's; a pass is bound by the reading of
weights there, and guesses cost little."""


def guesses(recipe: Recipe, *, on_cpu: bool) -> tuple[int, str]:
    """Tokens that are guessed each time, and why so many; (0, why) where nothing is guessed."""
    settings = recipe.rollout.speculative
    if settings.kind == "none":
        return 0, "`rollout.speculative.kind` is none"
    if settings.guesses is not None:
        return settings.guesses, "pinned by `rollout.speculative.guesses`"
    if on_cpu:
        why = "few: a pass over several tokens takes longer on a CPU"
        return max(ON_CPU[settings.kind], settings.ngram_breadth), why
    return max(ON_DEVICES[settings.kind], settings.ngram_breadth), "SGLang's own default"


def note_speculation(recipe: Recipe, *, on_cpu: bool, log: Log) -> None:
    """Nothing where nothing is guessed."""
    number, why = guesses(recipe, on_cpu=on_cpu)
    if not number:
        return
    log.note("rollout.speculative.guesses", number, why)
    exact = (
        "the tokens of a seed are those without it"
        if on_cpu
        else "samples have the distribution that they have without it, but a seed gives other "
        "tokens; nothing of it was tried on a device"
    )
    log.note("rollout.speculative.kind", recipe.rollout.speculative.kind, exact)
