"""Datums of a client become a batch whose loss is a sum, or are refused in words for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from milescli.plan.types import TrainerLayout
from milescli.runtime.service.datums import Limits, batch_of
from milescli.runtime.service.wire import Datum, PassRequest
from milescli.train.objectives.client_losses import HIGH, LOW, WEIGHT
from milescli.train.streams import Stream
from tests.plans import PLAN

LIMITS = Limits(plan=dataclasses.replace(PLAN, trainer=TrainerLayout()), vocab_size=100)


def _datum(token_ids: list[int], **inputs: Any) -> Datum:
    given = {"target_tokens": np.array(token_ids[1:], np.int64)}
    given |= {name: np.array(values, np.float32) for name, values in inputs.items()}
    return Datum(tokens=np.array(token_ids[:-1], np.int64), inputs=given)


def _request(*data: Datum, loss: str = "cross_entropy", **config: float) -> PassRequest:
    return PassRequest(model_id="m", seq_id=1, data=data, loss=loss, config=config)


def test_the_loss_is_a_sum_over_the_targets() -> None:
    data = [_datum([1, 2, 3], weights=[0.5, 2.0]), _datum([4, 5])]
    (shard,) = batch_of(_request(*data), LIMITS).shards
    assert shard.loss_weights.tolist() == [1.0, 1.0] and sorted(shard.logprob_ids) == [0, 1]
    by_number = dict(zip(shard.sequence_ids.tolist(), range(2), strict=True))
    starts = shard.cu_seqlens
    first = slice(starts[by_number[0]], starts[by_number[0] + 1])
    assert shard.token_ids[first].tolist() == [1, 2, 3]
    assert shard.loss_mask[first].tolist() == [False, True, True]
    assert shard.streams[WEIGHT][first].tolist() == [0.0, 0.5, 2.0]
    assert Stream.CANDIDATES not in shard.streams


def test_settings_are_of_the_whole_request_or_of_each_token() -> None:
    given = {"logprobs": [-1.0, -2.0], "advantages": [1.0, -1.0]}
    own = _datum([1, 2, 3], **given, clip_high_threshold=[2.0, 3.0])
    request = _request(own, loss="ppo", clip_low_threshold=0.5)
    (shard,) = batch_of(request, LIMITS).shards
    assert shard.streams[LOW].tolist() == [0.0, 0.5, 0.5]
    assert shard.streams[HIGH].tolist() == [0.0, 2.0, 3.0]
    assert shard.streams[Stream.ENGINE].tolist() == [0.0, -1.0, -2.0]


def test_targets_that_are_not_the_next_tokens_are_candidates() -> None:
    own = _datum([1, 2, 3])
    own.inputs["target_tokens"][0] = 9  # type: ignore[index]
    (shard,) = batch_of(_request(own), LIMITS).shards
    assert shard.token_ids.tolist() == [1, 2, 3]
    assert shard.streams[Stream.CANDIDATES].tolist() == [[0], [9], [3]]


LONG = LIMITS.max_tokens + 1
WRONG = [
    (_request(), "no datum"),
    (_request(_datum([1, 2]), loss="gspo"), "gspo"),
    (_request(_datum([1, 2]), beta=1.0), "beta"),
    (_request(_datum([1, 2], mask=[1.0])), "mask"),
    (_request(_datum([1, 100])), "vocabulary"),
    (_request(_datum([1, -1])), "vocabulary"),
    (_request(_datum([1] * LONG)), f"{LONG} tokens"),
    (_request(_datum([1, 2], weights=[1.0, 2.0])), "weights"),
    (_request(_datum([1, 2], weights=[np.nan])), "finite"),
    (_request(_datum([1, 2]), loss="importance_sampling"), "logprobs"),
    (_request(_datum([1])), "target"),
    (_request(dataclasses.replace(_datum([1, 2]), inputs={})), "target_tokens"),
]


@pytest.mark.parametrize(("request_", "word"), WRONG)
def test_what_cannot_be_computed_is_refused(request_: PassRequest, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        batch_of(request_, LIMITS)
