"""How engines guess tokens ahead: a section of `rollout`. Part of the schema."""

from __future__ import annotations

from typing import Literal

from milescli.recipe.section import Positive, Section


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
