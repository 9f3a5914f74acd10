"""Policy gradients with a ratio to the old policy, made of pieces: advantage estimator, surrogate,
KL term, entropy bonus, aggregation. `train.*` of the recipe chooses each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from milescli.core.types import Group, Sample
from milescli.recipe.schema import Recipe
from milescli.train.advantages import AdvantageEstimator, estimate, load_advantage
from milescli.train.aggregation import Aggregation, load_aggregation, share_of
from milescli.train.base import Figure, Reduce, TokenLoss, TrainSequence
from milescli.train.kl import MAX_LOG_RATIO, kl_estimate
from milescli.train.packed_tokens import PackedTokens
from milescli.train.sequences import sequence_of
from milescli.train.streams import Stream
from milescli.train.surrogates import Surrogate, load_surrogate, terms_of


class Policy:
    """An Objective over scored groups. Derive from it, or hand it pieces, for an algorithm of your
    own."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        advantage: AdvantageEstimator | None = None,
        surrogate: Surrogate | None = None,
        aggregation: Aggregation | None = None,
    ) -> None:
        """Pieces that are not given are those that the recipe names."""
        self.settings = recipe.train
        self.advantage = advantage or load_advantage(recipe.train.advantage)
        self.surrogate = surrogate or load_surrogate(recipe.train.surrogate)
        self.aggregation = aggregation or load_aggregation(recipe.train.aggregation)
        self.old = Stream.ENGINE if recipe.old_logprobs == "engine" else Stream.OLD
        needs = set()
        if self.old is Stream.OLD and recipe.train.updates_per_step > 1:
            needs.add(Stream.OLD)  # with one update, the policy itself is still the old one
        if recipe.train.kl_coef:
            needs.add(Stream.REFERENCE)
        self.needs = frozenset(needs)

    def sequences(self, items: Sequence[Group]) -> list[TrainSequence]:
        """One for each trajectory; a group's are never parted by updates."""
        rows = estimate(self.advantage, items, settings=self.settings)
        return [
            sequence
            for index, (group, row) in enumerate(zip(items, rows, strict=True))
            for sample, advantage in zip(group.samples, row, strict=True)
            for sequence in self._of_sample(sample, advantage=advantage, group=index)
        ]

    def _of_sample(
        self, sample: Sample, *, advantage: float, group: int
    ) -> Iterator[TrainSequence]:
        num_tokens = sample.num_loss_tokens
        share = share_of(self.aggregation, num_tokens=max(num_tokens, 1), settings=self.settings)
        for trajectory in sample.trajectories:
            part = trajectory.num_loss_tokens / num_tokens if num_tokens else 0.0
            yield sequence_of(
                trajectory,
                streams={
                    Stream.ADVANTAGE: np.full(trajectory.num_tokens, advantage, np.float32),
                    Stream.ENGINE: np.frombuffer(trajectory.logprobs, np.float32),
                },
                token_weight=share.token_weight,
                share=share.count * part,
                group=group,
            )

    def complete(self, tokens: PackedTokens) -> None:
        """The driver knows the advantages already."""

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """surrogate + kl_coef * KL - entropy_coef * entropy, per token. The figure `clamp_fraction`
        is the share of tokens whose ratio was cut off."""
        assert tokens.logprobs is not None and tokens.entropy is not None
        old = tokens[self.old] if self.old in tokens else tokens.logprobs.detach()
        log_ratio = tokens.logprobs - old
        terms = terms_of(
            self.surrogate,
            log_ratio=log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
            advantages=tokens[Stream.ADVANTAGE],
            tokens=tokens,
            settings=self.settings,
        )
        loss = terms.loss
        figures = {
            "policy_loss": Figure(loss.detach(), Reduce.LOSS),
            "entropy": Figure(tokens.entropy.detach()),
            "clamp_fraction": Figure((log_ratio.abs() > MAX_LOG_RATIO).float()),
            **{name: Figure(values.detach()) for name, values in terms.figures.items()},
        }
        if Stream.REFERENCE in self.needs:
            kl = kl_estimate(
                tokens.logprobs, tokens[Stream.REFERENCE], kind=self.settings.kl_estimator
            )
            loss = loss + self.settings.kl_coef * kl
            figures["kl"] = Figure(kl.detach())
        if self.settings.entropy_coef:
            loss = loss - self.settings.entropy_coef * tokens.entropy
        return TokenLoss(loss=loss, figures=figures)
