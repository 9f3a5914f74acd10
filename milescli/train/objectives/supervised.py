"""Imitation: minimises the negative log-likelihood of the tokens on the loss mask. Also used by the
warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from milescli.core.types import TeacherTokens, Trajectory
from milescli.platform.lazy import torch
from milescli.recipe.distill import Distill
from milescli.recipe.schema import Recipe
from milescli.train.base import Figure, TokenLoss, TrainSequence, sequence_of
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream


class Supervised:
    """Implements Objective over demonstrations: the mean loss over all tokens on their masks."""

    needs: frozenset[Stream] = frozenset()
    takes = "chats"

    def __init__(self, *, recipe: Recipe) -> None:
        """Accept the recipe, whose settings do not matter here."""

    def sequences(self, items: Sequence[Trajectory]) -> list[TrainSequence]:
        """Return one sequence per trajectory."""
        return [
            sequence_of(
                trajectory,
                streams={},
                token_weight=1.0,
                share=float(trajectory.num_loss_tokens),
                group=index,
            )
            for index, trajectory in enumerate(items)
        ]

    def complete(self, tokens: PackedTokens) -> None:
        """Do nothing: the loss needs no more streams."""

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """Return -log pi(token)."""
        assert tokens.logprobs is not None and tokens.entropy is not None
        return TokenLoss(loss=-tokens.logprobs, figures={"entropy": Figure(tokens.entropy)})


_MAX_LOGPROB = -1e-7
"""Largest log-prob of a set of tokens, so that the remaining probability is above 0 in float32."""

BY_CANDIDATES = frozenset({Stream.CANDIDATES, Stream.TEACHER})
"""Streams that `divergence` needs."""


def distill_streams(settings: Distill) -> frozenset[Stream]:
    """Return the streams that the ranks compute for a policy's distillation loss; predictions of
    served teachers come with the samples."""
    if not settings.teachers:
        return frozenset()
    compared = {Stream.OLD} if settings.kl == "sampled" else set()
    teacher_streams = {Stream.TEACHER} if settings.kl == "sampled" else BY_CANDIDATES
    return frozenset(compared if settings.is_served else compared | teacher_streams)


def teacher_streams(teacher_tokens: TeacherTokens) -> dict[str, np.ndarray]:
    """Convert a teacher's predictions for a sequence to the streams of `distill_streams`."""
    logprobs = np.frombuffer(teacher_tokens.logprobs, np.float32)
    if not teacher_tokens.topk:
        return {Stream.TEACHER: logprobs}
    ids = np.frombuffer(teacher_tokens.token_ids, np.int32)
    return {
        Stream.CANDIDATES: ids.reshape(-1, teacher_tokens.topk),
        Stream.TEACHER: logprobs.reshape(-1, teacher_tokens.topk),
    }


def divergence(tokens: PackedTokens, settings: Distill) -> torch.Tensor:
    """Return [S] the KL between policy and teacher at each token, over the teacher's k likeliest
    tokens and all others taken as one: reverse, sum p log(p / q); forward, sum q log(q / p); p is
    the policy's probability, q the teacher's (GKD, arXiv 2306.13649, section 3, with the vocabulary
    cut to k + 1). It is never negative, and 0 only if both agree on all k. Differentiable."""
    assert tokens.candidates is not None, "the ranks give the log-probs of candidates"
    policy = with_other_tokens(tokens.candidates)
    teacher = with_other_tokens(tokens[Stream.TEACHER])
    own, other = (policy, teacher) if settings.kl == "reverse" else (teacher, policy)
    return (own.exp() * (own - other)).sum(dim=1)


def with_other_tokens(logprobs: torch.Tensor) -> torch.Tensor:
    """Append the log-prob of all other tokens together, log(1 - sum p): [S, k] -> [S, k + 1]."""
    chosen = torch.logsumexp(logprobs, dim=1, keepdim=True).clamp(max=_MAX_LOGPROB)
    return torch.cat([logprobs, torch.log(-torch.expm1(chosen))], dim=1)


class Distillation(Supervised):
    """Implements Objective over demonstrations that a teacher has scored: the mean loss over all
    tokens on their masks."""

    def __init__(self, *, recipe: Recipe) -> None:
        """Take the settings from `train.distill` of the recipe."""
        super().__init__(recipe=recipe)
        self.settings = recipe.train.distill
        self.needs = frozenset() if recipe.caches_teacher else BY_CANDIDATES

    def sequences(self, items: Sequence[Trajectory]) -> list[TrainSequence]:
        """Return one sequence per trajectory, with the teacher's log-probs if they are stored."""
        made = super().sequences(items)
        if self.needs:
            return made
        teacher_tokens = [item.teacher for item in items]
        assert all(teacher_tokens), "rows are scored before the first step"
        return [
            replace(sequence, streams=teacher_streams(words))
            for sequence, words in zip(made, teacher_tokens, strict=True)
            if words is not None
        ]

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """Return coef * KL (`divergence`), and report -log pi(token) without training on it."""
        assert tokens.logprobs is not None and tokens.entropy is not None
        kl = divergence(tokens, self.settings)
        shown = {
            "teacher_kl": kl,
            "imitation_loss": -tokens.logprobs,
            "entropy": tokens.entropy,
        }
        return TokenLoss(
            loss=self.settings.coef * kl,
            figures={name: Figure(values.detach()) for name, values in shown.items()},
        )
