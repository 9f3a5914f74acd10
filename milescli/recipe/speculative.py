"""How engines guess tokens ahead (`rollout.speculative`), and the models that learn to: the MTP
layer (`train.mtp`) and the draft model (`train.draft`). Parts of the schema, with their rules.

What a model and its device allow is `models.mtp`'s, `backends.sglang.speculation`'s and
`runtime.draft_model`'s to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from milescli.recipe.section import NonNegativeFloat, Positive, PositiveFloat, Rule, Section

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe


class SpeculativeSettings(Section):
    """Guess tokens ahead, which the model then looks at all at once (speculative decoding). On a
    CPU the tokens are those without it (docs/speculation.md; on a GPU, their distribution)."""

    kind: Literal["none", "ngram", "draft", "mtp"] = "none"
    """Who guesses. ngram: what followed the same tokens before, in this engine; draft: a smaller
    model; mtp: the model's own multi-token-prediction layer."""
    model: str | None = None
    """draft: a folder or hub name of a model with the policy's tokenizer, or the directory of a
    run. It learns what the policy says where `train.draft.lr` is set, and else keeps its
    weights."""
    revision: str | None = None
    """draft: hub revision (branch, tag or commit)."""
    guesses: Positive | None = None
    """Tokens that are guessed each time; null: as many as the plan says."""
    ngram_breadth: Positive = 1
    """ngram: ways to go on that are tried behind one token, within `guesses`."""
    ngram_length: Positive = 18
    """ngram: tokens of the longest n-gram."""


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
        """Return True if the layer is trained."""
        return bool(self.loss_weight)


class Draft(Section):
    """Of `rollout.speculative.kind: draft`: the model learns to say what the policy says, from what
    each step sampled, with an optimizer of its own that is set as the policy's."""

    lr: PositiveFloat | None = None
    """Of its optimizer, the same in every step. null: it keeps its weights."""

    @property
    def is_on(self) -> bool:
        """Return True if the draft model is trained."""
        return self.lr is not None


_KEY = "rollout.speculative"
_NO_MTP = "--set train.mtp.loss_weight=null"
_NO_DRAFT = "--set train.draft.lr=null"


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for `rollout.speculative`."""
    settings, kind = recipe.rollout.speculative, recipe.rollout.speculative.kind
    yield from _kind_rules(settings)
    if kind == "none":
        return
    yield Rule(
        recipe.learns_from_rows,
        "nothing is sampled that could be guessed ahead",
        why=f"`{_KEY}.kind` is {kind}, and `data.train` has the rows to learn from; evaluations "
        "guess nothing",
        fix=f"--set {_KEY}.kind=none",
    )
    yield Rule(
        recipe.train.lora.is_on and kind != "ngram",
        f"engines that serve an adapter cannot guess by {kind}",
        why="SGLang 0.5.20 serves none beside a draft model"
        if kind == "draft"
        else "an MTP layer beside an adapter was never tried",
        fix=[f"--set {_KEY}.kind=ngram", "--set train.lora.rank=null"],
    )
    yield Rule(
        (recipe.engines.attention_dp or 1) > 1 and kind != "mtp",
        f"engines whose devices share out the requests cannot guess by {kind}",
        why=f"`engines.attention_dp` is {recipe.engines.attention_dp}, and SGLang has that with "
        "MTP layers alone",
        fix=[f"--set {_KEY}.kind=none", "--set engines.attention_dp=1"],
    )
    yield Rule(
        kind == "mtp" and recipe.weights.channel == "distributed",
        "new weights would not reach the layer that guesses",
        why="`weights.channel` is distributed, by which SGLang updates the model alone, without "
        "its MTP layer",
        fix=["--set weights.channel=tensor", f"--set {_KEY}.kind=ngram"],
    )


def _kind_rules(settings: SpeculativeSettings) -> Iterator[Rule]:
    kind, model, breadth = settings.kind, settings.model, settings.ngram_breadth
    yield Rule(
        kind == "draft" and not (model or "").strip(),
        "no model is named that guesses",
        why=f"`{_KEY}.kind` is draft, and `{_KEY}.model` says which one",
        fix=[f"--set {_KEY}.model=FOLDER", f"--set {_KEY}.kind=ngram"],
    )
    yield Rule(
        kind != "draft" and model is not None,
        f"`{_KEY}.model` is `{model}`, and no model guesses",
        why=f"`{_KEY}.kind` is {kind}",
        fix=[f"--set {_KEY}.kind=draft", f"--set {_KEY}.model=null"],
    )
    yield Rule(
        settings.revision is not None and model is None,
        f"`{_KEY}.revision` is `{settings.revision}`, but nothing is downloaded",
        why=f"a revision belongs to `{_KEY}.model`",
        fix=f"--set {_KEY}.revision=null",
    )
    for name in ("ngram_breadth", "ngram_length"):
        default = SpeculativeSettings.model_fields[name].default
        yield Rule(
            kind != "ngram" and getattr(settings, name) != default,
            f"`{_KEY}.{name}` has no n-grams to be about",
            why=f"`{_KEY}.kind` is {kind}",
            fix=[f"--set {_KEY}.kind=ngram", f"--set {_KEY}.{name}={default}"],
        )
    yield Rule(
        kind == "ngram" and settings.guesses and breadth > settings.guesses,
        f"{settings.guesses} guesses have no {breadth} ways to go on",
        why=f"`{_KEY}.ngram_breadth` is larger than `{_KEY}.guesses`",
        fix=f"--set {_KEY}.ngram_breadth={settings.guesses}",
    )


def mtp_rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for `train.mtp`."""
    mtp, weights = recipe.train.mtp, recipe.weights
    yield Rule(
        mtp.trains_trunk and not mtp.is_on,
        "`train.mtp.trains_trunk` is true, and there is no loss that could",
        why="`train.mtp.loss_weight` is off",
        fix=["--set train.mtp.loss_weight=0.1", "--set train.mtp.trains_trunk=false"],
    )
    if not mtp.is_on:
        return
    yield Rule(
        recipe.trains_scores,
        f"`train.objective={recipe.train.objective}` trains no MTP layer",
        why="its model gives scores, and predicts no token",
        fix=_NO_MTP,
    )
    yield Rule(
        recipe.train.lora.is_on,
        "an MTP layer is not trained beside an adapter",
        why="with `train.lora.rank` the model's own weights, the layer's too, stay as they are, "
        "and are neither saved nor sent to engines",
        fix=[_NO_MTP, "--set train.lora.rank=null"],
    )
    yield Rule(
        weights.channel == "distributed",
        "what the MTP layer learns would not reach the engines",
        why="`weights.channel` is distributed, by which SGLang updates the model alone, without "
        "its MTP layer",
        fix=["--set weights.channel=tensor", _NO_MTP],
    )
    yield Rule(
        weights.format != "hf",
        f"`weights.format={weights.format}` with an MTP layer that is trained",
        why="MTP layers in other formats than the model's own were never tried",
        fix=["--set weights.format=hf", _NO_MTP],
    )


def draft_rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for `train.draft`."""
    kind, weights = recipe.rollout.speculative.kind, recipe.weights
    if not recipe.train.draft.is_on:
        return
    yield Rule(
        kind != "draft",
        "there is no draft model that could learn",
        why=f"`{_KEY}.kind` is {kind}, and `train.draft.lr` is that of a draft model",
        fix=[_NO_DRAFT, f"--set {_KEY}.kind=draft --set {_KEY}.model=MODEL"],
    )
    yield Rule(
        weights.channel not in ("auto", "tensor"),
        "what the draft model learns would not reach the engines",
        why=f"`weights.channel` is {weights.channel}, which sends the model alone",
        fix=["--set weights.channel=tensor", _NO_DRAFT],
    )
    yield Rule(
        weights.format != "hf",
        f"`weights.format={weights.format}` with a draft model that is trained",
        why="draft models in other formats than their own were never tried",
        fix=["--set weights.format=hf", _NO_DRAFT],
    )
