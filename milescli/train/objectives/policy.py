"""Policy gradients, made of pieces: advantage estimator, its credit over tokens, policy ratio,
surrogate, correction of the mismatch between trainer and engine, KL and entropy terms, distillation
from a teacher, aggregation. `train.*` of the recipe chooses each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from milescli.core.plug_points import ADVANTAGES, AGGREGATIONS, CORRECTIONS, CREDITS, SURROGATES
from milescli.core.types import Group, RewardDetail, Sample, StepReport
from milescli.platform.lazy import torch
from milescli.recipe.distill import teachers_by_source
from milescli.recipe.schema import Recipe
from milescli.recipe.train import Train
from milescli.train.advantages import (
    Advantage,
    AdvantageEstimator,
    AdvantageRows,
    estimate,
    keeps_state,
    next_state,
)
from milescli.train.aggregation import Aggregation, share_of
from milescli.train.base import (
    Figure,
    Reduce,
    SequenceOutline,
    TokenLoss,
    TrainSequence,
    sequence_of,
)
from milescli.train.corrections import CorrectionFn, apply_correction
from milescli.train.credits import Credit
from milescli.train.kl import MAX_LOG_RATIO, kl_estimate, log_ratio_at
from milescli.train.objectives.supervised import distill_streams, divergence, teacher_streams
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream
from milescli.train.surrogates import Surrogate, compute_terms
from milescli.workers.isolated import resolve_isolated


class EntropyControl:
    """Adapts the weight c of the entropy bonus. c rises by `entropy_delta` after a step whose
    entropy is below `entropy_target`, else falls; it stays between 0 and `entropy_max`, and acts
    only while the entropy is below the target (Skywork-OR1, arXiv 2505.22312). Without a target, c
    is `entropy_coef`."""

    def __init__(self, settings: Train) -> None:
        self._settings = settings
        self._coef = settings.entropy_coef
        self._is_low = True

    @property
    def weight(self) -> float:
        """Return the weight of the entropy bonus in the next step."""
        return self._coef if self._is_low else 0.0

    @property
    def state(self) -> dict[str, float]:
        """Return everything that changes from step to step."""
        if self._settings.entropy_target is None:
            return {}
        return {"entropy_coef": self._coef, "entropy_is_low": float(self._is_low)}

    def observe(self, entropy: float | None) -> None:
        """Update the weight. `entropy`: mean over the trained tokens of the step, in nats; None
        leaves the weight as it is."""
        target, delta = self._settings.entropy_target, self._settings.entropy_delta
        if target is None or entropy is None:
            return
        self._is_low = entropy < target
        moved = self._coef + (delta if self._is_low else -delta)
        self._coef = min(max(moved, 0.0), self._settings.entropy_max)

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state` returned."""
        self._coef = state.get("entropy_coef", self._coef)
        self._is_low = bool(state.get("entropy_is_low", self._is_low))


_STD_FLOOR = 1e-8
"""Added to a variance before whitening by its root."""
TRUNCATION = 2.0
"""Bound of the ratio trainer / engine of a token (TIS, fengyao.notion.site/off-policy-rl)."""
_STATE_PREFIX = "advantage."
"""Prefix of the names of numbers in the advantage estimator's state."""
_METRIC_PREFIX = "figure."
"""Prefix of the names of streams that become metrics."""


class Policy:
    """Implements Objective over scored groups. Derive from it, or pass pieces to it, for an
    algorithm of your own."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        advantage: AdvantageEstimator | None = None,
        credit: Credit | None = None,
        surrogate: Surrogate | None = None,
        correction: CorrectionFn | None = None,
        aggregation: Aggregation | None = None,
    ) -> None:
        """Use the given pieces, and those that the recipe names for the others."""
        self.settings = train = _with_defaults(recipe)
        self.advantage = advantage or resolve_isolated(ADVANTAGES, train.advantage)
        self.reward_weights = recipe.rollout.reward_weights
        self.credit = credit or CREDITS.load(train.credit)
        self.surrogate = surrogate or SURROGATES.load(train.surrogate)
        self.correction = correction or CORRECTIONS.load(train.correction.kind)
        self.aggregation = aggregation or resolve_isolated(AGGREGATIONS, train.aggregation)
        self.old = Stream.ENGINE if recipe.old_logprobs == "engine" else Stream.OLD
        self.kl_in_reward = train.kl_coef > 0 and train.kl_in == "reward"
        self.teacher_of = {} if train.distill.is_served else teachers_by_source(train.distill)
        self.is_taught = bool(train.distill.teachers)
        self.teacher_in_reward = self.is_taught and train.distill.kl == "sampled"
        needs = {
            *_needs_of(self.credit),
            *_needs_of(self.surrogate),
            *distill_streams(train.distill),
        }
        if self.old is Stream.OLD and train.updates_per_step > 1:
            needs.add(Stream.OLD)  # with one update, the policy itself is still the old one
        if self.correction is not None or self.kl_in_reward:
            needs.add(Stream.OLD)
        if train.kl_coef:
            needs.add(Stream.REFERENCE)
        self.entropy = EntropyControl(train)
        self.kept: dict[str, float] = {}
        """What the advantage estimator keeps, before the step."""
        self._kept_after: dict[str, float] | None = None
        self.truncation: float | None = None
        """Bound of trainer / engine; None: tokens are not weighted by it."""
        self.draws = Stream.UNIFORM in needs
        self.needs_greedy = getattr(self.advantage, "needs_greedy", False)
        """Groups come with the reward of a greedy response."""
        self.advantages_read_tokens = getattr(self.advantage, "reads_tokens", False)
        """They are estimated of each group by itself, unless `normalize_std` is batch."""
        self.needs = frozenset(needs - {Stream.UNIFORM})
        self.credits_samples = train.credit == "sample" and credit is None
        """Each token has what the driver gave its sample."""
        reads_turns = self.advantages_read_tokens or not self.credits_samples
        reads_parts = getattr(self.advantage, "needs_weights", False)
        details = {RewardDetail.TURNS: reads_turns, RewardDetail.PARTS: reads_parts}
        self.compares = frozenset(detail for detail, is_read in details.items() if is_read)
        """What of rewards besides their sum makes advantages."""

    def sequences(self, items: Sequence[Group]) -> list[TrainSequence]:
        """Return one sequence per trajectory; updates never split a group."""
        has_turn_rewards = self.has_turn_rewards(items)
        return [
            sequence
            for index, (group, row) in enumerate(zip(items, self.advantages(items), strict=True))
            for sequence in self.of_group(
                group, row, number=index, has_turn_rewards=has_turn_rewards
            )
        ]

    def has_turn_rewards(self, items: Sequence[Group]) -> bool:
        """Return True if the credit needs rewards of single turns and the step has some."""
        return not self.credits_samples and any(
            trajectory.rewards is not None
            for group in items
            for sample in group.samples
            for trajectory in sample.trajectories
        )

    def advantages(self, items: Sequence[Group]) -> AdvantageRows:
        """Return the estimator's advantages of a step's groups, which need no tokens if each is one
        number. The estimator's state changes only when the step is done (`observe`), however often
        its groups are packed."""
        if keeps_state(self.advantage):
            self._kept_after = next_state(
                self.advantage, items, settings=self.settings, state=self.kept
            )
        return estimate(
            self.advantage,
            items,
            settings=self.settings,
            weights=self.reward_weights,
            state=self.kept,
        )

    def of_group(
        self,
        group: Group,
        row: Sequence[Advantage],
        *,
        number: int,
        has_turn_rewards: bool = False,
    ) -> Iterator[TrainSequence]:
        """Yield the sequences of one group of the step. `number`: its index; `row`: its
        advantages."""
        for sample, advantage in zip(group.samples, row, strict=True):
            yield from self._of_sample(
                sample,
                advantage=advantage,
                group=number,
                source=group.prompt.source,
                has_turn_rewards=has_turn_rewards,
            )

    def outlines(self, items: Sequence[Group]) -> list[SequenceOutline]:
        """Return the outlines of the sequences that `sequences` would return, for groups whose
        tokens are in another process."""
        return [
            outline
            for number, group in enumerate(items)
            for sample in group.samples
            for _, outline in self._outlines(sample, number)
        ]

    def _outlines(self, sample: Sample, group: int) -> Iterator[tuple[int, SequenceOutline]]:
        """Yield (index, outline) of each trajectory, except for those of roles that are not
        trained."""
        num_tokens = sample.num_loss_tokens if sample.is_learned else 0
        share = share_of(self.aggregation, num_tokens=max(num_tokens, 1), settings=self.settings)
        for index, trajectory in enumerate(sample.trajectories):
            own = trajectory.num_loss_tokens
            if trajectory.role is not None and num_tokens and not own:
                continue  # of a role that is not trained: nothing of it reaches the loss
            part = own / num_tokens if num_tokens else 0.0
            yield (
                index,
                SequenceOutline(
                    num_tokens=trajectory.num_tokens,
                    is_trained=bool(num_tokens and own),
                    token_weight=share.token_weight,
                    share=share.count * part,
                    group=group,
                ),
            )

    def _of_sample(
        self,
        sample: Sample,
        *,
        advantage: Advantage,
        group: int,
        source: str | None,
        has_turn_rewards: bool,
    ) -> Iterator[TrainSequence]:
        for index, outline in self._outlines(sample, group):
            trajectory = sample.trajectories[index]
            values = advantage[index] if isinstance(advantage, Sequence) else advantage
            streams = {
                Stream.ADVANTAGE: np.full(trajectory.num_tokens, values, np.float32),
                Stream.ENGINE: np.frombuffer(trajectory.logprobs, np.float32),
            }
            if has_turn_rewards:
                streams[Stream.TURN_REWARD] = np.asarray(
                    trajectory.rewards or np.zeros(trajectory.num_tokens), np.float32
                )
            if trajectory.teacher is not None:
                streams |= teacher_streams(trajectory.teacher)
            if self.teacher_of:
                streams[Stream.TEACHER_INDEX] = np.full(
                    trajectory.num_tokens, self.teacher_of[source], np.float32
                )
            if self.truncation is not None:
                streams[Stream.TRUNCATION] = np.full(
                    trajectory.num_tokens, self.truncation, np.float32
                )
            if self.settings.entropy_target is not None:
                streams[Stream.ENTROPY_COEF] = np.full(
                    trajectory.num_tokens, self.entropy.weight, np.float32
                )
            if self.draws:
                draw = np.random.default_rng([sample.seed, index])
                streams[Stream.UNIFORM] = draw.random(trajectory.num_tokens, np.float32)
            made = sequence_of(
                trajectory,
                streams=streams,
                token_weight=outline.token_weight,
                share=outline.share,
                group=group,
            )
            if not sample.is_learned:
                made = replace(made, loss_mask=np.zeros_like(made.loss_mask))
            yield made

    def complete(self, tokens: PackedTokens) -> None:
        """Spread the samples' advantages over tokens, then compute the streams that need the whole
        step."""
        made_here = not self.credits_samples or self.kl_in_reward or self.settings.whiten
        if made_here or self.is_taught:
            tokens[Stream.ADVANTAGE] = self._advantages(tokens)
        if self.correction is not None:
            made = apply_correction(
                self.correction,
                log_ratio=tokens[Stream.OLD] - tokens[Stream.ENGINE],
                tokens=tokens,
                settings=self.settings,
            )
            tokens[Stream.CORRECTION] = made.weights
            for name, values in made.figures.items():
                tokens[_METRIC_PREFIX + name] = values
        if (complete := getattr(self.surrogate, "complete", None)) is not None:
            complete(tokens, self.settings)

    def _advantages(self, tokens: PackedTokens) -> torch.Tensor:
        given, distill = tokens[Stream.ADVANTAGE], self.settings.distill
        penalty = torch.zeros_like(given)
        if self.is_taught:
            given = distill.reward_weight * given
            if Stream.TURN_REWARD in tokens:
                of_turns = tokens[Stream.TURN_REWARD]
                tokens[Stream.TURN_REWARD] = distill.reward_weight * of_turns
        if self.kl_in_reward:
            old, reference = tokens[Stream.OLD], tokens[Stream.REFERENCE]
            kl = kl_estimate(old, reference, kind=self.settings.kl_estimator)
            penalty = torch.where(tokens.loss_mask, self.settings.kl_coef * kl, 0.0)
            tokens[_METRIC_PREFIX + "kl"] = kl
        if self.teacher_in_reward:
            gap = tokens[Stream.OLD] - tokens[Stream.TEACHER]
            penalty = penalty + torch.where(tokens.loss_mask, distill.coef * gap, 0.0)
            tokens[_METRIC_PREFIX + "teacher_kl"] = gap
        values = self.credit(
            advantages=given, penalty=penalty, tokens=tokens, settings=self.settings
        )
        if Stream.VALUES in self.needs:
            tokens[Stream.RETURNS] = values + tokens[Stream.VALUES]
        return whitened(values, tokens) if self.settings.whiten else values

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """Return surrogate x correction + kl_coef * KL - entropy_coef * entropy, per token, plus
        the terms of `train.distill`. The metric `clamp_fraction` is the share of tokens whose ratio
        was clamped."""
        assert tokens.logprobs is not None and tokens.entropy is not None
        settings = self.settings
        old = tokens[self.old] if self.old in tokens else tokens.logprobs.detach()
        raw = tokens.logprobs - old
        log_ratio = log_ratio_at(settings.ratio, raw, tokens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        advantages = tokens[Stream.ADVANTAGE]
        terms = compute_terms(
            self.surrogate,
            log_ratio=log_ratio,
            advantages=advantages,
            tokens=tokens,
            settings=settings,
        )
        loss, shown = terms.loss, dict(terms.figures)
        if self.correction is not None:
            loss = loss * tokens[Stream.CORRECTION]
        if Stream.TRUNCATION in tokens:
            before = tokens[Stream.OLD] if Stream.OLD in tokens else tokens.logprobs.detach()
            mismatch = (before - tokens[Stream.ENGINE]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            shown["correction_ratio"] = mismatch.exp()
            loss = loss * torch.minimum(mismatch.exp(), tokens[Stream.TRUNCATION])
        if settings.off_policy_mask is not None:
            is_left = self._has_diverged(tokens, advantages, bound=settings.off_policy_mask)
            loss = torch.where(is_left, 0.0, loss)
            shown["off_policy_masked"] = is_left.float()
        shown["clamp_fraction"] = (raw.abs() > MAX_LOG_RATIO).float()
        shown |= {
            name.removeprefix(_METRIC_PREFIX): tokens[name]
            for name in (*tokens.streams, *tokens.new_streams)
            if name.startswith(_METRIC_PREFIX)
        }
        figures = {
            "policy_loss": Figure(loss.detach(), Reduce.LOSS),
            "entropy": Figure(tokens.entropy.detach()),
            **{name: Figure(values.detach()) for name, values in shown.items()},
        }
        if settings.kl_coef and not self.kl_in_reward:
            kl = kl_estimate(tokens.logprobs, tokens[Stream.REFERENCE], kind=settings.kl_estimator)
            if settings.kl_unbiased:
                kl = kl * raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            loss = loss + settings.kl_coef * kl
            figures["kl"] = Figure(kl.detach())
        if self.is_taught and not self.teacher_in_reward:
            teacher_kl = divergence(tokens, settings.distill)
            loss = loss + settings.distill.coef * teacher_kl
            figures["teacher_kl"] = Figure(teacher_kl.detach())
        if Stream.ENTROPY_COEF in tokens:
            figures["entropy_coef"] = Figure(tokens[Stream.ENTROPY_COEF])
            loss = loss - tokens[Stream.ENTROPY_COEF] * tokens.entropy
        elif settings.entropy_coef:
            loss = loss - settings.entropy_coef * tokens.entropy
        return TokenLoss(loss=loss, figures=figures)

    def truncate_mismatch(self) -> bool:
        """Weight each token's loss by trainer / engine from now on, at most `TRUNCATION`. Returns
        False and changes nothing if the policy ratio is relative to the engine's log-probs, or if
        the recipe names a correction."""
        if self.old is Stream.ENGINE or self.correction is not None:
            return False
        self.truncation = TRUNCATION
        return True

    @property
    def state(self) -> dict[str, float]:
        """Return everything that changes from step to step (`AdaptiveObjective`)."""
        truncation = {} if self.truncation is None else {"truncation": self.truncation}
        state = {_STATE_PREFIX + name: value for name, value in self.kept.items()}
        return {**self.entropy.state, **truncation, **state}

    def observe(self, report: StepReport) -> None:
        """Adapt the entropy weight to a step's report, and commit the advantage estimator's state
        after the step (`AdaptiveObjective`)."""
        self.entropy.observe(report.figures.get("entropy"))
        if self._kept_after is not None:
            self.kept, self._kept_after = self._kept_after, None

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state` returned (`AdaptiveObjective`)."""
        self.entropy.restore(state)
        self.truncation = state.get("truncation")
        self.kept = {
            name.removeprefix(_STATE_PREFIX): value
            for name, value in state.items()
            if name.startswith(_STATE_PREFIX)
        }
        self._kept_after = None

    @staticmethod
    def _has_diverged(
        tokens: PackedTokens, advantages: torch.Tensor, *, bound: float
    ) -> torch.Tensor:
        """Return [S] True where the advantage is negative and the mean over the sequence of log
        pi_engine - log pi is above `bound` (OPSM of DeepSeek-V3.2, arXiv 2512.02556)."""
        assert tokens.logprobs is not None
        gap = tokens[Stream.ENGINE] - tokens.logprobs.detach()
        count = tokens.sum_by_sequence(tokens.loss_mask).clamp(min=1.0)
        return (advantages < 0) & (tokens.spread(tokens.sum_by_sequence(gap) / count) > bound)


def whitened(values: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
    """Return [S] (x - mean) / std over the trained tokens of the step on all ranks (REINFORCE++,
    arXiv 2501.03262); the std is the sample's (n - 1)."""
    centred = values - tokens.reduce(values, "mean")
    count = tokens.reduce(torch.ones_like(values), "sum")
    variance = tokens.reduce(centred.square(), "sum") / (count - 1.0).clamp(min=1.0)
    return centred * torch.rsqrt(variance + _STD_FLOOR)


def _with_defaults(recipe: Recipe) -> Train:
    """Return `train` with null settings replaced by settings of other sections."""
    length = recipe.train.constant_length or recipe.rollout.max_response_tokens
    return recipe.train.model_copy(update={"constant_length": length})


def _needs_of(piece: object) -> frozenset[Stream]:
    return getattr(piece, "needs", frozenset())
