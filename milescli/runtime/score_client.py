"""The driver's side of a reward model: what comes while it reads is read together next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from milescli.core.concurrency import in_thread
from milescli.train.base import TrainBatch, Trainer
from milescli.train.objectives.reward_model import scored_sequence
from milescli.train.packing import pack

CALL_TOKENS = 16384
"""Sent at once, about; more wait."""
_Waiting = tuple[Sequence[int], asyncio.Future[float]]


class ScoreClient:
    """Implements milescli.rollout.rewards.reward_model.ScoreServer. Belongs to one event loop."""

    def __init__(self, ranks: Trainer) -> None:
        """`ranks`: of the model."""
        self._ranks = ranks
        self._waiting: list[_Waiting] = []
        self._work: asyncio.Task[None] | None = None

    async def score(self, token_ids: Sequence[int]) -> float:
        """See ScoreServer. Raises what the call of the ranks raises."""
        reply: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((token_ids, reply))
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._serve())
        return await reply

    async def _serve(self) -> None:
        while self._waiting:
            batch = self._taken()
            try:
                scores = await self._scores([token_ids for token_ids, _ in batch])
            except Exception as error:  # told to all who wait for it
                for _, reply in batch:
                    if not reply.done():
                        reply.set_exception(error)
                continue
            for (_, reply), score in zip(batch, scores, strict=True):
                if not reply.done():
                    reply.set_result(score)

    def _taken(self) -> list[_Waiting]:
        """Who comes first, up to the bound; one at least."""
        tokens = count = 0
        while count < len(self._waiting) and (not count or tokens < CALL_TOKENS):
            tokens += len(self._waiting[count][0])
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    async def _scores(self, lines: Sequence[Sequence[int]]) -> list[float]:
        batch = await in_thread(lambda: self._packed(lines))
        return [float(values[-1]) for values in await self._ranks.score(batch)]

    def _packed(self, lines: Sequence[Sequence[int]]) -> TrainBatch:
        return pack(
            [scored_sequence(line, group=n) for n, line in enumerate(lines)],
            objective="reward_model",
            dp=1,
            max_tokens_per_microbatch=1,  # each alone: who asked beside it must not change a bit
        )
