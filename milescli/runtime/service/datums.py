"""Converts the datums of a client to the batch of one pass, and checks them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from milescli.plan.types import Plan
from milescli.runtime.service.wire import ClientError, Datum, PassRequest
from milescli.train.base import TrainBatch, TrainSequence, TrainShard
from milescli.train.objectives.client_losses import INPUTS, LossInputs, objective_of
from milescli.train.packing import pack
from milescli.train.streams import Stream

TARGETS = "target_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the datums of a service."""

    plan: Plan
    vocab_size: int

    @property
    def max_tokens(self) -> int:
        """Return the longest sequence, its last target included."""
        return self.plan.batch.max_sequence_tokens


def batch_of(request: PassRequest, limits: Limits) -> TrainBatch:
    """Return the batch of one pass, whose loss is the sum over all tokens. Raises ClientError for
    what cannot be computed, in words for the client."""
    inputs = INPUTS.get(request.loss)
    if inputs is None:
        raise ClientError(f"the loss `{request.loss}` is not supported: use {', '.join(INPUTS)}")
    if unknown := set(request.config) - set(inputs.settings):
        raise ClientError(
            f"`{min(unknown)}` is not a setting of `{request.loss}`: "
            f"{', '.join(inputs.settings) or 'it has none'}"
        )
    if not request.data:
        raise ClientError("the request has no datum")
    sequences = list[TrainSequence]()
    for number, datum in enumerate(request.data):
        try:
            sequences.append(_sequence(datum, inputs, request.config, limits, number=number))
        except ValueError as error:
            raise ClientError(f"datum {number} of {len(request.data)}: {error}") from None
    if any(_has_other_targets(datum) for datum in request.data):
        sequences = [
            replace(sequence, streams={**sequence.streams, Stream.CANDIDATES: _candidates(datum)})
            for sequence, datum in zip(sequences, request.data, strict=True)
        ]
    batch = pack(
        sequences,
        objective=objective_of(request.loss),
        dp=limits.plan.trainer.dp,
        max_tokens_per_microbatch=limits.plan.batch.max_row_tokens(limits.plan.trainer.cp),
        logprob_ids=range(len(sequences)),
    )
    return TrainBatch(shards=[_summed(shard) for shard in batch.shards])


def _has_other_targets(datum: Datum) -> bool:
    """Return True if some target is not the next token: clients may set any target that has no
    weight."""
    return not np.array_equal(datum.inputs[TARGETS][:-1], datum.tokens[1:])


def _candidates(datum: Datum) -> np.ndarray:
    """Return the targets as [n + 1, 1] int32."""
    return np.concatenate([np.zeros(1), datum.inputs[TARGETS]]).astype(np.int32)[:, None]


def _summed(shard: object) -> TrainShard:
    """Return the shard without a divisor, because the loss is a sum."""
    assert isinstance(shard, TrainShard), "packed from sequences that are here"
    return replace(shard, loss_weights=np.ones_like(shard.loss_weights))


def _sequence(
    datum: Datum, inputs: LossInputs, config: Mapping[str, float], limits: Limits, *, number: int
) -> TrainSequence:
    targets = datum.inputs.get(TARGETS)
    if targets is None:
        raise ClientError(f"it has no `{TARGETS}`")
    if targets.ndim != 1 or len(targets) != len(datum.tokens) or not len(targets):
        raise ClientError(
            f"`{TARGETS}` has the shape {list(targets.shape)} for {len(datum.tokens)} tokens; each "
            "token needs one target"
        )
    token_ids, every = np.concatenate([datum.tokens, targets[-1:]]), (datum.tokens, targets)
    if min(map(np.min, every)) < 0 or max(map(np.max, every)) >= limits.vocab_size:
        raise ClientError(f"a token is not one of the {limits.vocab_size} of the vocabulary")
    if len(token_ids) > limits.max_tokens:
        raise ClientError(
            f"it has {len(token_ids)} tokens, and the server was planned for {limits.max_tokens}"
        )
    known = {TARGETS, *inputs.streams, *inputs.settings}
    if unknown := set(datum.inputs) - known:
        raise ClientError(
            f"`{min(unknown)}` is not an input of this loss: {', '.join(sorted(known))}"
        )
    streams = {
        stream: _values(name, datum.inputs.get(name), len(targets))
        for name, stream in inputs.streams.items()
    }
    for name, (stream, usual) in inputs.settings.items():
        given = datum.inputs.get(name)
        if given is None:
            given = np.full(len(targets), config.get(name, usual))
        streams[stream] = _values(name, given, len(targets))
    return TrainSequence(
        token_ids=token_ids.astype(np.int32),
        loss_mask=np.arange(len(token_ids)) > 0,
        streams=streams,
        token_weight=1.0,
        share=1.0,
        group=number,
    )


def _values(name: str, given: np.ndarray | None, count: int) -> np.ndarray:
    """Return [count + 1] float32: nothing is predicted at the first token."""
    if given is None:
        raise ClientError(f"it has no `{name}`")
    if given.shape != (count,):
        raise ClientError(f"`{name}` has the shape {list(given.shape)} for {count} targets")
    if not np.isfinite(given).all():
        raise ClientError(f"`{name}` has a value that is not finite")
    return np.concatenate([np.zeros(1), given]).astype(np.float32)
