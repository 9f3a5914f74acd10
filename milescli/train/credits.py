"""Spreads a sample's advantage over its tokens, on the trainer's ranks. `train.credit` names a
function: built in here, an entry point, or an import path."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from milescli.recipe.train import Train
from milescli.train.streams import Stream

if TYPE_CHECKING:
    import torch

    from milescli.train.packed_tokens import PackedTokens


class Credit(Protocol):
    """Defines a plug-in of `train.credit`. An attribute `needs` (a frozenset of `Stream`) names
    what the ranks must compute first."""

    def __call__(
        self,
        *,
        advantages: torch.Tensor,
        penalty: torch.Tensor,
        tokens: PackedTokens,
        settings: Train,
    ) -> torch.Tensor:
        """Return [S] the advantage of each trained token. `advantages` [S]: those of the estimator;
        `penalty` [S]: penalty of each token (the KL term, with `train.kl_in: reward`; else 0)."""
        ...


def sample(
    *, advantages: torch.Tensor, penalty: torch.Tensor, tokens: PackedTokens, settings: Train
) -> torch.Tensor:
    """A_t = A - penalty_t: each token has the advantage of its sample (GRPO)."""
    return advantages - penalty


def to_go(
    *, advantages: torch.Tensor, penalty: torch.Tensor, tokens: PackedTokens, settings: Train
) -> torch.Tensor:
    """G_t = sum over the trained tokens j >= t of gamma^(j - t) x_j; x is -penalty, plus the
    rewards of turns at their ends, plus the rest of A at the last trained token (REINFORCE++, arXiv
    2501.03262). j counts trained tokens only: the output of a tool is no step."""

    def of_part(rows: TrainedRows, rewards: torch.Tensor) -> torch.Tensor:
        return discounted_sum(rewards, settings.gamma)

    return _by_parts(of_part, advantages, penalty, tokens)


def gae(
    *, advantages: torch.Tensor, penalty: torch.Tensor, tokens: PackedTokens, settings: Train
) -> torch.Tensor:
    """A_t = sum over the trained tokens j >= t of (gamma lam)^(j - t) d_j; d_j = x_j + gamma V_(j +
    1) - V_j, V = 0 after the last (GAE, arXiv 1506.02438, eq. 16), x as in `to_go`."""
    import torch

    def of_part(rows: TrainedRows, rewards: torch.Tensor) -> torch.Tensor:
        values = rows.gather(rows.tokens[Stream.VALUES])
        following = torch.nn.functional.pad(values[:, 1:], (0, 1))
        errors = rewards + settings.gamma * following - values
        return discounted_sum(errors, settings.gamma * settings.lam)

    return _by_parts(of_part, advantages, penalty, tokens)


gae.needs = frozenset({Stream.VALUES})  # type: ignore[attr-defined]


MAX_CELLS = 2**22
"""Largest padded table of a rank's sequences that is computed at once: one long response would make
it as wide for all, and a cell takes up to 76 bytes."""


def _by_parts(
    of_part: Callable[[TrainedRows, torch.Tensor], torch.Tensor],
    advantages: torch.Tensor,
    penalty: torch.Tensor,
    tokens: PackedTokens,
) -> torch.Tensor:
    """Return [S] float32 what `of_part` computes of (rows, their rewards [N, K]), for sequences of
    similar length at a time."""
    credit = advantages.new_zeros(advantages.shape).float()
    for index, part in tokens.parts(MAX_CELLS):
        rows = TrainedRows(part)
        rewards = rows.token_rewards(advantages[index], penalty[index])
        credit[index] = rows.scatter(of_part(rows, rewards))
    return credit


class TrainedRows:
    """Holds the trained tokens of each sequence next to each other, without the tokens between
    them. N: sequences; K: trained tokens of the longest."""

    def __init__(self, tokens: PackedTokens) -> None:
        self.tokens = tokens
        self._mask = tokens.whole_sequences(tokens.loss_mask) > 0  # [N, L]
        self._places = self._mask.cumsum(1) - 1  # [N, L] which trained token a column is
        self._counts = self._mask.sum(1)
        self._width = max(int(self._counts.max()), 1) if len(self._counts) else 1

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather [S] -> [N, K] float64, 0 beyond the last trained token."""
        import torch

        whole = self.tokens.whole_sequences(values).double()
        rows = whole.new_zeros((len(whole), self._width + 1))
        places = torch.where(self._mask, self._places, self._width)  # the last column is dropped
        return rows.scatter(1, places, torch.where(self._mask, whole, 0.0))[:, :-1]

    def token_rewards(self, advantages: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
        """Return [N, K] the reward at each trained token; a sequence's rewards sum to its advantage
        less its penalties."""
        rewards, rest = self.gather(-penalty), self.gather(advantages)
        if Stream.TURN_REWARD in self.tokens:
            of_turns = self.gather(self.tokens[Stream.TURN_REWARD])
            rewards = rewards + of_turns
            rest = rest - of_turns.sum(1, keepdim=True)
        return rewards + rest * self.is_last

    @property
    def is_last(self) -> torch.Tensor:
        """Return [N, K], True at the last trained token of each sequence."""
        import torch

        columns = torch.arange(self._width, device=self._counts.device)
        return columns == (self._counts - 1)[:, None]

    def scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Scatter [N, K] -> [S] float32, 0 off the mask."""
        import torch

        whole = rows.gather(1, self._places.clamp(min=0))
        return self.tokens.own_part(torch.where(self._mask, whole, 0.0).float())


_BLOCK = 128
"""Columns that one matrix product sums; the powers of a factor above 0.5 stay normal numbers."""


def discounted_sum(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Compute y_t = x_t + factor y_(t + 1), [N, K] -> [N, K], block by block from the end."""
    import torch

    width = values.shape[1]
    steps = torch.arange(_BLOCK, device=values.device)
    distance = steps[:, None] - steps[None, :]
    powers = factor ** distance.clamp(min=0).to(values.dtype) * (distance >= 0)
    carried = factor ** (_BLOCK - steps).to(values.dtype)
    pieces, after = [], values.new_zeros((len(values), 1))
    for begin in range((width - 1) // _BLOCK * _BLOCK, -1, -_BLOCK):
        part = values[:, begin : begin + _BLOCK]
        count = part.shape[1]
        piece = part @ powers[:count, :count] + after * carried[_BLOCK - count :]
        pieces.append(piece)
        after = piece[:, :1]
    return torch.cat(pieces[::-1], dim=1)
