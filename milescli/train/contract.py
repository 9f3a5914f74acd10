"""Tests the contracts of an algorithm's pieces; plug-in authors can run them:
`check_surrogate(fn)`, `check_advantage(fn)`, ... Each raises RecipeError with what is wrong. A run
does not use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from milescli.core.errors import RecipeError
from milescli.core.examples import example_chats, example_groups, example_pairs
from milescli.core.user_code import name_of, plugin_fix
from milescli.recipe.schema import Recipe
from milescli.recipe.train import Train
from milescli.train.advantages import (
    AdvantageEstimator,
    AdvantageRows,
    estimate,
    keeps_state,
    next_state,
)
from milescli.train.aggregation import Aggregation, share_of
from milescli.train.base import Objective, TrainSequence
from milescli.train.corrections import CorrectionFn, apply_correction
from milescli.train.credits import Credit
from milescli.train.objectives import sequences_from
from milescli.train.objectives.policy import Policy
from milescli.train.optimizers import Schedule, UpdateRule
from milescli.train.packed_tokens import PackedTokens, Places
from milescli.train.streams import RANK_STREAMS, Stream
from milescli.train.surrogates import Surrogate


def packed(
    sequences: Sequence[TrainSequence], *, extra: Mapping[str, torch.Tensor] | None = None
) -> PackedTokens:
    """Pack all tokens of a step end to end, as `Objective.complete` sees them. `extra` holds
    streams that ranks compute, [S]."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    divisor = sum(sequence.share for sequence in sequences if sequence.loss_mask.any())

    def joined(part: Callable[[TrainSequence], np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([part(sequence)[1:] for sequence in sequences]))

    mask = joined(lambda sequence: sequence.loss_mask)
    weights = joined(
        lambda sequence: np.full(
            len(sequence.token_ids), sequence.token_weight / (divisor or 1.0), np.float32
        )
    )
    streams = {
        name: joined(lambda sequence, name=name: sequence.streams[name])
        for name in sequences[0].streams
    }
    return PackedTokens(
        places=Places(
            sequence=torch.tensor([i for i, n in enumerate(lengths) for _ in range(n - 1)]),
            offset=torch.tensor([place for n in lengths for place in range(1, n)]),
            lengths=torch.tensor(lengths),
        ),
        loss_mask=mask,
        loss_weights=torch.where(mask, weights, 0.0),
        streams={**streams, **(extra or {})},
    )


def as_microbatch(
    tokens: PackedTokens,
    logprobs: torch.Tensor,
    *,
    only: Sequence[int] | None = None,
    are_scores: bool = False,
    candidates: torch.Tensor | None = None,
) -> PackedTokens:
    """Return the same tokens as a loss sees them after `complete`; `only` selects sequences.
    `logprobs` [S]: log-probs of all tokens, or scores. `candidates` [S, k]: log-probs of the
    teacher's candidates."""
    chosen = range(tokens.num_sequences) if only is None else only
    at = torch.isin(tokens.places.sequence, torch.tensor(list(chosen)))
    number = torch.full((tokens.num_sequences,), -1)
    number[torch.tensor(list(chosen))] = torch.arange(len(chosen))
    own = logprobs[at]
    return replace(
        tokens,
        places=replace(
            tokens.places,
            sequence=number[tokens.places.sequence[at]],
            offset=tokens.places.offset[at],
            lengths=tokens.places.lengths[torch.tensor(list(chosen))],
        ),
        loss_mask=tokens.loss_mask[at],
        loss_weights=tokens.loss_weights[at],
        streams={
            name: values[at] for name, values in {**tokens.streams, **tokens.new_streams}.items()
        },
        new_streams={},
        logprobs=None if are_scores else own,
        entropy=None if are_scores else 0.1 * own.square(),
        scores=own if are_scores else None,
        candidates=None if candidates is None else candidates[at],
    )


_SETTINGS = Train(updates_per_step=2, constant_length=16)
EXAMPLES: dict[str, Callable[[], Any]] = {
    "groups": example_groups,
    "chats": example_chats,
    "pairs": example_pairs,
}
"""What an objective takes -> function that makes examples of it."""
_CLOSE = 1e-4
"""Relative tolerance: float32 sums in another order differ by less."""


def check_advantage(estimator: AdvantageEstimator) -> AdvantageRows:
    """Return the estimator's advantages of the examples, with its state after a step on them if it
    has one; require a finite number for each sample or token."""
    groups, state = example_groups(), dict[str, float]()
    if keeps_state(estimator):
        state = next_state(estimator, groups, settings=_SETTINGS, state=state)
    return estimate(estimator, groups, settings=_SETTINGS, state=state)


def check_schedule(schedule: Schedule) -> list[float]:
    """Return the schedule's learning rates over ten steps; require numbers of 0 or more."""
    rates = [schedule(progress=step / 9, settings=_SETTINGS.optimizer) for step in range(10)]
    for rate in rates:
        if not (isinstance(rate, int | float) and np.isfinite(rate) and rate >= 0):
            raise _contract_error(
                schedule, f"it returned {rate!r}; a learning rate must be a number of at least 0"
            )
    return rates


def check_rule(rule: UpdateRule) -> None:
    """Run three steps on a few weights; require that they stay finite, that they change, and that
    each part of a weight changes as it does within the whole."""
    rng = torch.Generator().manual_seed(0)
    start, grads = torch.randn(6, generator=rng), torch.randn(3, 6, generator=rng)

    def after(part: slice) -> torch.Tensor:
        weight = start[part].clone()
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        for step, grad in enumerate(grads, 1):
            rule(
                weight=weight,
                grad=grad[part].clone(),
                first=first,
                second=second,
                step=step,
                lr=0.01,
                weight_decay=0.1,
                settings=_SETTINGS.optimizer,
            )
        return weight

    whole = after(slice(None))
    if not torch.isfinite(whole).all() or torch.equal(whole, start):
        raise _contract_error(rule, f"of {start.tolist()} it makes {whole.tolist()}")
    parts = torch.cat([after(slice(0, 2)), after(slice(2, None))])
    if not torch.allclose(whole, parts, rtol=_CLOSE):
        raise _contract_error(
            rule,
            "it makes something else of a part of a weight than of the whole; ranks have parts",
        )


def check_before_log_probs(hook: Callable[..., Any]) -> None:
    """Call the hook as a rank does, with a small model."""
    with torch.no_grad():
        for stream in (Stream.OLD, Stream.REFERENCE):
            hook(model=torch.nn.Linear(4, 4), stream=str(stream))


def check_aggregation(aggregation: Aggregation) -> None:
    """Require a LossShare for samples of any length."""
    for num_tokens in (1, 2, 1000, 1_000_000):
        share = share_of(aggregation, num_tokens=num_tokens, settings=_SETTINGS)
        if not (share.count > 0 and np.isfinite([share.count, share.token_weight]).all()):
            raise _contract_error(aggregation, f"of {num_tokens} tokens it says {share}")


def check_credit(credit: Credit) -> None:
    """Require a finite advantage for each position."""
    tokens = _step(Policy(recipe=_recipe()))
    given = tokens[Stream.ADVANTAGE]
    made = credit(advantages=given, penalty=0.1 * given.abs(), tokens=tokens, settings=_SETTINGS)
    _require_positions(credit, made, tokens)


def check_correction(correction: CorrectionFn) -> None:
    """Require a finite weight of 0 or more for each position."""
    tokens = _step(Policy(recipe=_recipe()))
    made = apply_correction(
        correction,
        log_ratio=tokens[Stream.OLD] - tokens[Stream.ENGINE],
        tokens=tokens,
        settings=_SETTINGS,
    )
    _require_positions(correction, made.weights, tokens)
    if bool((made.weights[tokens.loss_mask] < 0).any()):
        raise _contract_error(correction, "a weight is negative")


def check_surrogate(surrogate: Surrogate) -> None:
    """Require that loss and gradient of the examples are finite, and independent of how they are
    packed."""
    _check_loss(surrogate, Policy(recipe=_recipe(), surrogate=surrogate))


def check_objective(factory: Callable[..., Objective[Any]]) -> None:
    """Require that loss and gradient of a whole objective are finite, and independent of how the
    examples are packed."""
    _check_loss(factory, factory(recipe=_recipe()))


def _check_loss(piece: object, objective: Objective[Any]) -> None:
    tokens, takes = _step(objective), getattr(objective, "takes", "groups")
    are_scores = getattr(objective, "of_scores", False)
    count = len(tokens.loss_mask)
    values = torch.from_numpy(-np.random.default_rng(1).gamma(1.0, 1.0, count)).float()

    def gradient(parts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, total = values.clone().requires_grad_(), torch.zeros(())
        for part in parts:
            cut = as_microbatch(
                tokens,
                logprobs,
                only=part,
                are_scores=are_scores,
                candidates=_candidates(logprobs) if Stream.CANDIDATES in objective.needs else None,
            )
            loss = objective.loss(cut).loss
            _require_positions(piece, loss, cut)
            total = total + (torch.where(cut.loss_mask, loss, 0.0) * cut.loss_weights).sum()
        total.backward()
        assert logprobs.grad is not None
        return total.detach(), logprobs.grad

    everything = list(range(tokens.num_sequences))
    whole, slopes = gradient([everything])
    if not bool(torch.isfinite(slopes).all()):
        raise _contract_error(piece, "its gradient is not finite")
    # a pair is never parted
    first, second = (4, 6) if takes == "pairs" else (5, 6)
    parts = [everything[:first], everything[first:second], everything[second:]]
    parted, parted_slopes = gradient(parts)
    scale = _CLOSE * (1.0 + slopes.abs().max())
    if abs(whole - parted) > _CLOSE * (1 + abs(whole)) or bool(
        ((slopes - parted_slopes).abs() > scale).any()
    ):
        raise _contract_error(
            piece,
            f"its loss is {float(whole):.6g} of all sequences at once and {float(parted):.6g} of "
            "the same in three microbatches: it takes a mean or a maximum over what happens to be "
            "packed together (`tokens.sum_by_sequence` in a loss, `tokens.reduce` in `complete`)",
        )


def _recipe() -> Recipe:
    return Recipe(train=Train(updates_per_step=2, reference=True))


def _step(objective: Objective[Any]) -> PackedTokens:
    """Return the tokens of a step, with the streams that ranks would compute, after `complete`."""
    items = EXAMPLES[getattr(objective, "takes", "groups")]()
    sequences = sequences_from(objective, items, name="policy")
    count = sum(len(sequence.token_ids) - 1 for sequence in sequences)
    rng = np.random.default_rng(2)
    extra = {
        stream: torch.from_numpy(-rng.gamma(1.0, 1.0, count)).float()
        for stream in (*RANK_STREAMS, Stream.VALUES)
    }
    if Stream.CANDIDATES in objective.needs:
        extra[Stream.CANDIDATES] = torch.zeros((count, 2), dtype=torch.int32)
        extra[Stream.TEACHER] = _candidates(extra[Stream.TEACHER])
    tokens = packed(sequences, extra=extra)
    objective.complete(tokens)
    return tokens


def _candidates(logprobs: torch.Tensor) -> torch.Tensor:
    """Return [S, 2] log-probs of two other tokens, which depend on those of the targets."""
    return torch.stack([logprobs - 1.0, logprobs - 2.0], dim=1)


def _require_positions(piece: object, made: Any, tokens: PackedTokens) -> None:
    wanted = list(tokens.loss_mask.shape)
    if not isinstance(made, torch.Tensor) or list(made.shape) != wanted:
        gave = f"shape {list(made.shape)}" if isinstance(made, torch.Tensor) else repr(made)
        raise _contract_error(
            piece, f"it returned {gave}; there are {wanted[0]} positions, each has a value"
        )
    if not bool(torch.isfinite(made[tokens.loss_mask]).all()):
        raise _contract_error(
            piece, "it returned a value that is not finite, at a token that is trained on"
        )


def _contract_error(piece: object, why: str) -> RecipeError:
    return RecipeError(
        f"`{name_of(piece)}` does not meet its contract",
        why=why,
        fix=plugin_fix(piece, "docs/extending.md says what it is given and gives"),
    )
