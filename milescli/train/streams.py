"""Names the values per token that accompany the tokens."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from milescli.core.errors import RecipeError
from milescli.core.user_code import name_of, plugin_fix

if TYPE_CHECKING:
    import torch


class Stream(StrEnum):
    """Names the streams that miles knows; an objective of yours may use others under any string. A
    stream has one float32 value, or a row of values, per token. Off the loss mask it has no
    meaning."""

    ADVANTAGE = "advantage"
    ENGINE = "engine"
    """Log-prob by the engine that sampled the token, at the sampling temperature."""
    OLD = "old"
    """Log-prob by the policy before the first update of the step."""
    REFERENCE = "reference"
    """Log-prob by the frozen reference."""
    VALUES = "values"
    """The critic's estimate of the return from this token on, before the first update of the step.
    """
    RETURNS = "returns"
    """The critic's target."""
    TURN_REWARD = "turn_reward"
    """Reward of a single turn, at the turn's last token; 0 elsewhere. Only if some turn has such a
    reward."""
    UNIFORM = "uniform"
    """A random number in [0, 1), fixed by the sample's seed: a draw that is the same under every
    layout."""
    ENTROPY_COEF = "entropy_coef"
    """Weight of the entropy bonus in this step, the same for all tokens."""
    TRUNCATION = "truncation"
    """Bound of trainer / engine, by which a token's loss is weighted; the same for all tokens."""
    CORRECTION = "correction"
    """Weight of a token's loss, from `train.correction`."""
    CANDIDATES = "candidates"
    """int32 [k] the teacher's likeliest token ids at each position, likeliest first. With this
    stream, a loss gets the policy's log-probs of these tokens (`PackedTokens.candidates`)."""
    TEACHER = "teacher"
    """Log-prob by the teacher: of the token, or with candidates [k] of these."""
    TEACHER_INDEX = "teacher_index"
    """Which of `train.distill.teachers` scores the sequence; missing: the only one."""


LOGPROB_STREAMS = frozenset({Stream.ENGINE, Stream.OLD, Stream.REFERENCE})
"""Streams that the loss compares with the policy's own log-probs."""
RANK_STREAMS = (Stream.OLD, Stream.REFERENCE, Stream.VALUES, Stream.CANDIDATES, Stream.TEACHER)
"""Streams that the trainer's ranks compute if an objective needs them, in this order. CANDIDATES
come with TEACHER."""


def require_per_position(
    piece: object, values: torch.Tensor | None, made: object, *, kind: str, of: str, count: int
) -> None:
    """Require `count` numbers in `values`, one per position; None means that `made`, the result of
    a plug-in, has the wrong type. Raises RecipeError; `of` says what the values are, such as "a
    loss"."""
    if values is not None and values.shape == (count,):
        return
    gave = f"a {type(made).__name__}" if values is None else f"{of} of shape {list(values.shape)}"
    raise RecipeError(
        f"the {kind} `{name_of(piece)}` returned {gave}",
        why=f"there are {count} positions, and each needs one value",
        fix=plugin_fix(piece, f"docs/extending.md says what a {kind} gives"),
    )
