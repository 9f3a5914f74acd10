"""Names the values per token that accompany the tokens."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from milescli.core.errors import RecipeError
from milescli.core.user_code import mend, name_of

if TYPE_CHECKING:
    import torch


class Stream(StrEnum):
    """Names the streams that miles knows; an objective of yours may make others under any string. A
    stream has one float32 value, or a row of values, per token. Off the loss mask it means
    nothing."""

    ADVANTAGE = "advantage"
    ENGINE = "engine"
    """Log-prob by the engine that sampled the token, at the sampling temperature."""
    OLD = "old"
    """Log-prob by the policy before the first update of the step."""
    REFERENCE = "reference"
    """Log-prob by the frozen reference."""
    VALUES = "values"
    """The critic's estimate of the return from here on, before the first update of the step."""
    RETURNS = "returns"
    """The critic's target."""
    TURN_REWARD = "turn_reward"
    """At the last token of a turn what that turn was worth by itself, else 0; only where some turn
    has such a reward."""
    UNIFORM = "uniform"
    """A random number in [0, 1), fixed by the sample's seed: a draw that no layout changes."""
    ENTROPY_COEF = "entropy_coef"
    """Weight of the entropy bonus in this step, the same for all tokens."""
    TRUNCATION = "truncation"
    """Bound of trainer / engine, which a token's loss is weighted by; the same for all tokens."""
    CORRECTION = "correction"
    """The weight of a token's loss by `train.correction`."""
    CANDIDATES = "candidates"
    """int32 [k] token ids at each position, likeliest first: the teacher's. Where they are, a loss
    is given the policy's log-probs of them (`PackedTokens.candidates`)."""
    TEACHER = "teacher"
    """Log-prob by the teacher: of the token, or where there are candidates [k] of these."""
    TEACHER_INDEX = "teacher_index"
    """Which of `train.distill.teachers` the sequence has; not there: the only one."""


LOGPROBS = frozenset({Stream.ENGINE, Stream.OLD, Stream.REFERENCE})
"""Streams that the loss compares with the policy's own log-probs."""
FROM_RANKS = (Stream.OLD, Stream.REFERENCE, Stream.VALUES, Stream.CANDIDATES, Stream.TEACHER)
"""Streams that the trainer's ranks compute where an objective needs them, in this order.
CANDIDATES come with TEACHER."""


def require_each(
    piece: object, values: torch.Tensor | None, made: object, *, kind: str, of: str, count: int
) -> None:
    """Require `count` numbers in `values`, one per position; None means that `made`, the result of
    the piece, has the wrong type. Raises RecipeError; `of` says what the values are, such as "a
    loss"."""
    if values is not None and values.shape == (count,):
        return
    gave = f"a {type(made).__name__}" if values is None else f"{of} of shape {list(values.shape)}"
    raise RecipeError(
        f"the {kind} `{name_of(piece)}` returned {gave}",
        why=f"there are {count} positions, and each needs one value",
        fix=mend(piece, f"docs/extending.md says what a {kind} gives"),
    )
