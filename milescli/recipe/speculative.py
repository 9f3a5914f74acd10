"""Defines how engines guess tokens ahead (`rollout.speculative`), and how the models that guess are
trained: the MTP layer (`train.mtp`) and the draft model (`train.draft`). Parts of the schema, with
their rules.

What a model and its device support is checked by `models.mtp`, `backends.sglang.speculation` and
`runtime.draft_model`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from milescli.recipe.section import NonNegativeFloat, Positive, PositiveFloat, Rule, Section

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe


class SpeculativeSettings(Section):
    """Speculative decoding: a cheap method guesses several tokens, and the model verifies them in
    one pass. On a CPU the tokens are the same as without it; on a GPU their distribution is
    (docs/speculation.md)."""

    kind: Literal["none", "ngram", "draft", "mtp"] = "none"
    """How tokens are drafted. ngram: the tokens that followed the same n-gram before, in this
    engine; draft: a smaller model; mtp: the model's own multi-token-prediction layer."""
    model: str | None = None
    """draft: folder or hub name of a model with the policy's tokenizer, or the directory of a run.
    The run trains it to imitate the policy if `train.draft.lr` is set; otherwise its weights stay
    frozen."""
    revision: str | None = None
    """draft: revision on the hub (branch, tag or commit)."""
    guesses: Positive | None = None
    """Number of tokens per guess; null: the plan chooses."""
    ngram_breadth: Positive = 1
    """ngram: number of alternative continuations to try after one token, within `guesses`."""
    ngram_length: Positive = 18
    """ngram: length of the longest n-gram, in tokens."""


class Mtp(Section):
    """The multi-token-prediction layer, which predicts the token after next (arXiv 2412.19437,
    section 2.2); engines can use it to guess tokens (`rollout.speculative.kind: mtp`)."""

    loss_weight: NonNegativeFloat | None = None
    """Weight of the layer's loss: the mean cross-entropy of the token after next over an update's
    trained tokens. null or 0: the layer is not trained."""
    trains_trunk: bool = False
    """true: this loss also trains the rest of the model, including its embedding and output layer;
    false: only the layer."""

    @property
    def is_on(self) -> bool:
        """Return True if the layer is trained."""
        return bool(self.loss_weight)


class Draft(Section):
    """Training of the draft model (`rollout.speculative.kind: draft`): it learns to predict the
    policy's tokens from the samples of each step. Its own optimizer has the policy's settings."""

    lr: PositiveFloat | None = None
    """Learning rate of the draft model, the same in every step. null: its weights stay frozen."""

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
        "speculative decoding has no samples to speed up",
        why=f"`{_KEY}.kind` is {kind}, but the run learns from the rows of `data.train`, and "
        "evaluations do not speculate",
        fix=f"--set {_KEY}.kind=none",
    )
    yield Rule(
        recipe.train.lora.is_on and kind != "ngram",
        f"engines that serve an adapter cannot speculate with {kind}",
        why="SGLang 0.5.20 cannot serve one together with a draft model"
        if kind == "draft"
        else "an MTP layer together with an adapter is untested",
        fix=[f"--set {_KEY}.kind=ngram", "--set train.lora.rank=null"],
    )
    yield Rule(
        (recipe.engines.attention_dp or 1) > 1 and kind != "mtp",
        f"engines with DP attention cannot speculate with {kind}",
        why=f"`engines.attention_dp` is {recipe.engines.attention_dp}, and SGLang supports that "
        "only with MTP layers",
        fix=[f"--set {_KEY}.kind=none", "--set engines.attention_dp=1"],
    )
    yield Rule(
        kind == "mtp" and recipe.weights.channel == "distributed",
        "new weights would not reach the layer that guesses tokens",
        why="`weights.channel` is distributed, and SGLang then updates only the model, not its "
        "MTP layer",
        fix=["--set weights.channel=tensor", f"--set {_KEY}.kind=ngram"],
    )


def _kind_rules(settings: SpeculativeSettings) -> Iterator[Rule]:
    kind, model, breadth = settings.kind, settings.model, settings.ngram_breadth
    yield Rule(
        kind == "draft" and not (model or "").strip(),
        "the draft model is missing",
        why=f"`{_KEY}.kind` is draft, so `{_KEY}.model` must name the draft model",
        fix=[f"--set {_KEY}.model=FOLDER", f"--set {_KEY}.kind=ngram"],
    )
    yield Rule(
        kind != "draft" and model is not None,
        f"`{_KEY}.model` is `{model}`, but no draft model is used",
        why=f"`{_KEY}.kind` is {kind}",
        fix=[f"--set {_KEY}.kind=draft", f"--set {_KEY}.model=null"],
    )
    yield Rule(
        settings.revision is not None and model is None,
        f"`{_KEY}.revision` is `{settings.revision}`, but no model is downloaded",
        why=f"a revision belongs to `{_KEY}.model`",
        fix=f"--set {_KEY}.revision=null",
    )
    for name in ("ngram_breadth", "ngram_length"):
        default = SpeculativeSettings.model_fields[name].default
        yield Rule(
            kind != "ngram" and getattr(settings, name) != default,
            f"`{_KEY}.{name}` only applies to n-grams",
            why=f"`{_KEY}.kind` is {kind}",
            fix=[f"--set {_KEY}.kind=ngram", f"--set {_KEY}.{name}={default}"],
        )
    yield Rule(
        kind == "ngram" and settings.guesses and breadth > settings.guesses,
        f"{settings.guesses} guesses cannot have {breadth} alternatives",
        why=f"`{_KEY}.ngram_breadth` is larger than `{_KEY}.guesses`",
        fix=f"--set {_KEY}.ngram_breadth={settings.guesses}",
    )


def mtp_rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for `train.mtp`."""
    mtp, weights = recipe.train.mtp, recipe.weights
    yield Rule(
        mtp.trains_trunk and not mtp.is_on,
        "`train.mtp.trains_trunk` is true, but the MTP layer has no loss",
        why="`train.mtp.loss_weight` is off",
        fix=["--set train.mtp.loss_weight=0.1", "--set train.mtp.trains_trunk=false"],
    )
    if not mtp.is_on:
        return
    yield Rule(
        recipe.trains_scores,
        f"`train.objective={recipe.train.objective}` cannot train an MTP layer",
        why="the model returns scores and predicts no tokens",
        fix=_NO_MTP,
    )
    yield Rule(
        recipe.train.lora.is_on,
        "an MTP layer cannot be trained together with an adapter",
        why="`train.lora.rank` freezes the model's own weights, including those of the layer; "
        "they are neither saved nor sent to engines",
        fix=[_NO_MTP, "--set train.lora.rank=null"],
    )
    yield Rule(
        weights.channel == "distributed",
        "the trained MTP layer would not reach the engines",
        why="`weights.channel` is distributed, and SGLang then updates only the model, not its "
        "MTP layer",
        fix=["--set weights.channel=tensor", _NO_MTP],
    )
    yield Rule(
        weights.format != "hf",
        f"`weights.format={weights.format}` does not work with a trained MTP layer",
        why="MTP layers in formats other than the model's own are untested",
        fix=["--set weights.format=hf", _NO_MTP],
    )


def draft_rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for `train.draft`."""
    kind, weights = recipe.rollout.speculative.kind, recipe.weights
    if not recipe.train.draft.is_on:
        return
    yield Rule(
        kind != "draft",
        "there is no draft model to train",
        why=f"`{_KEY}.kind` is {kind}, and `train.draft.lr` applies to a draft model",
        fix=[_NO_DRAFT, f"--set {_KEY}.kind=draft --set {_KEY}.model=MODEL"],
    )
    yield Rule(
        weights.named_channel not in ("auto", "tensor"),
        "the trained draft model would not reach the engines",
        why=f"the channel is {weights.named_channel}, which sends only the policy",
        fix=["--set weights.store=null --set weights.channel=tensor", _NO_DRAFT],
    )
    yield Rule(
        weights.format != "hf",
        f"`weights.format={weights.format}` does not work with a trained draft model",
        why="draft models in formats other than their own are untested",
        fix=["--set weights.format=hf", _NO_DRAFT],
    )
