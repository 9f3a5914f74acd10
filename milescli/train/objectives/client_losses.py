"""Losses that a client of `miles serve` chooses for each call: sums over the tokens of a batch, not
means, as the Tinker API defines them. Each function is a factory for `load_objective`, by import
path; the service makes the sequences itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from milescli.recipe.schema import Recipe
from milescli.train.base import TokenLoss, TrainSequence
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream

WEIGHT, LOW, HIGH, BETA = "weight", "clip_low", "clip_high", "beta"
"""Streams besides those of `Stream`: the weight of a token; what a ratio is clipped to; the factor
of the quadratic term."""


@dataclass(slots=True)
class ClientLoss:
    """Implements Objective over sequences that the service has made."""

    formula: Callable[[PackedTokens], torch.Tensor]
    """Returns [S] the loss of each token."""
    needs: frozenset[Stream] = field(default=frozenset())

    def sequences(self, items: Sequence[TrainSequence]) -> list[TrainSequence]:
        """Return the sequences unchanged."""
        return list(items)

    def complete(self, tokens: PackedTokens) -> None:
        """Do nothing: the client sends every stream."""

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """Return the formula's loss of each token."""
        return TokenLoss(loss=self.formula(tokens))


def cross_entropy(*, recipe: Recipe) -> ClientLoss:
    """Make the loss -weight * log pi."""
    return ClientLoss(lambda tokens: -_logprobs(tokens) * tokens[WEIGHT])


def importance_sampling(*, recipe: Recipe) -> ClientLoss:
    """Make the loss -ratio * advantage, where ratio = pi / sampler."""
    return ClientLoss(lambda tokens: -_ratio(tokens) * tokens[Stream.ADVANTAGE])


def ppo(*, recipe: Recipe) -> ClientLoss:
    """Make the loss -min(ratio * advantage, clip(ratio) * advantage) (PPO, arXiv 1707.06347,
    equation 7)."""

    def formula(tokens: PackedTokens) -> torch.Tensor:
        ratio, advantage = _ratio(tokens), tokens[Stream.ADVANTAGE]
        return -torch.minimum(ratio * advantage, _clipped(ratio, tokens) * advantage)

    return ClientLoss(formula)


def cispo(*, recipe: Recipe) -> ClientLoss:
    """Make the loss -clip(ratio) * advantage * log pi, without a gradient through the ratio (CISPO,
    arXiv 2506.13585, equation 4)."""

    def formula(tokens: PackedTokens) -> torch.Tensor:
        weight = _clipped(_ratio(tokens).detach(), tokens)
        return -weight * tokens[Stream.ADVANTAGE] * _logprobs(tokens)

    return ClientLoss(formula)


def dro(*, recipe: Recipe) -> ClientLoss:
    """Make the loss -(advantage * log pi - beta / 2 * (log ratio)^2) (DRO, arXiv 2405.19107,
    equation 5)."""

    def formula(tokens: PackedTokens) -> torch.Tensor:
        log_ratio = _logprobs(tokens) - tokens[Stream.ENGINE]
        return 0.5 * tokens[BETA] * log_ratio**2 - tokens[Stream.ADVANTAGE] * _logprobs(tokens)

    return ClientLoss(formula)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Lists the inputs that a loss takes with each datum, by the names of the API."""

    streams: Mapping[str, str]
    """Input -> stream with one value for each target token."""
    settings: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Key of `loss_fn_config`, or an input of the same name -> (stream, default)."""


_OF_SAMPLES = {"logprobs": Stream.ENGINE, "advantages": Stream.ADVANTAGE}
_CLIPPED = LossInputs(
    streams=_OF_SAMPLES,
    settings={"clip_low_threshold": (LOW, 0.8), "clip_high_threshold": (HIGH, 1.2)},
)
INPUTS: Mapping[str, LossInputs] = MappingProxyType(
    {
        "cross_entropy": LossInputs(streams={}, settings={"weights": (WEIGHT, 1.0)}),
        "importance_sampling": LossInputs(streams=_OF_SAMPLES),
        "ppo": _CLIPPED,
        "cispo": _CLIPPED,
        "dro": LossInputs(streams=_OF_SAMPLES, settings={"beta": (BETA, 0.05)}),
    }
)
"""Name of a loss -> its inputs."""


def objective_of(loss: str) -> str:
    """Return the import path by which trainer ranks load the loss."""
    return f"{__name__}:{loss}"


def _logprobs(tokens: PackedTokens) -> torch.Tensor:
    """Return [S] the log-probs of the targets, which are the only candidates if they are not the
    next tokens."""
    if tokens.candidates is not None:
        return tokens.candidates[:, 0]
    assert tokens.logprobs is not None, "a model that predicts tokens"
    return tokens.logprobs


def _ratio(tokens: PackedTokens) -> torch.Tensor:
    return (_logprobs(tokens) - tokens[Stream.ENGINE]).exp()


def _clipped(ratio: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
    return torch.minimum(torch.maximum(ratio, tokens[LOW]), tokens[HIGH])
