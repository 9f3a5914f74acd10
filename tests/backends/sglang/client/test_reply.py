"""How the parts of a response that was paused become one: tokens, and routes that are asked for
once."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from milescli.backends.sglang.client.reply import PartialResponse, Reply
from milescli.backends.sglang.inside.routing import packed, request_id, unpacked, wanted_from
from milescli.core.errors import MachineError, MismatchError
from milescli.core.types import ImageSpan, StopReason, VersionSpan, WeightVersion
from milescli.rollout.base import GenerateRequest

SHAPE = (2, 2)
ROW_BYTES = 4


def wanted(*, known: int = 0, experts: bool = True) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=[5, 6, 7],
        max_new_tokens=9,
        want_routed_experts=experts,
        num_known_routes=known,
    )


def reply(num_tokens: int, routes: bytes | None) -> Reply:
    return Reply(
        token_ids=list(range(num_tokens)),
        logprobs=array("f", [-1.0] * num_tokens),
        stop_reason=StopReason.STOP,
        spans=[],
        routed_experts=routes,
    )


def rows(first: int, count: int, *, width: int = 1) -> bytes:
    return b"".join(bytes([first + row]) * ROW_BYTES * width for row in range(count))


def test_each_part_is_asked_for_the_rows_that_are_not_there_yet():
    made = PartialResponse(request=wanted())
    assert made.body["rid"] == request_id(0)
    made.extend(reply(4, rows(1, 6)))
    assert made.body["rid"] == request_id(6)
    made.extend(reply(0, None))
    assert made.body["rid"] == request_id(6)
    made.extend(reply(2, rows(7, 2)))
    record = made.completion(StopReason.STOP, routing_shape=SHAPE).routed_experts
    assert record is not None
    assert (record.num_tokens, record.bytes_per_number) == (8, 1)
    assert record.indices == rows(1, 8)


def test_the_record_begins_behind_what_the_caller_knows():
    made = PartialResponse(request=wanted(known=2))
    assert made.body["rid"] == request_id(2)
    made.extend(reply(4, rows(3, 4, width=2)))
    record = made.completion(StopReason.STOP, routing_shape=SHAPE).routed_experts
    assert record is not None
    assert (record.num_tokens, record.bytes_per_number) == (4, 2)


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_what_may_begin_a_stop_string_is_sampled_anew_with_its_routes(count: int) -> None:
    def span(start: int, end: int, version: int) -> VersionSpan:
        return VersionSpan(start=start, end=end, version=WeightVersion(version))

    made = PartialResponse(request=replace(wanted(known=2), num_begun=lambda token_ids: count))
    made.extend(replace(reply(2, rows(3, 2)), spans=[span(0, 2, 1)]))
    made.extend(replace(reply(2, rows(5, 2)), spans=[span(0, 2, 2)]))
    made.drop_begun()
    left = 4 - count
    assert made.token_ids == [0, 1, 0, 1][:left] and len(made.logprobs) == left
    spans = [(span.start, span.end, span.version) for span in made.spans]
    assert spans == [(0, min(left, 2), 1), (2, left, 2)][: (left + 1) // 2]
    assert made.body["rid"] == request_id(6 - count)
    assert made.body["sampling_params"]["max_new_tokens"] == 9 - left
    made.extend(reply(count, rows(7 - count, count)))
    record = made.completion(StopReason.STOP, routing_shape=SHAPE).routed_experts
    assert record is not None and record.indices == rows(3, 4)


SPAN = ImageSpan(start=1, num_tokens=2, grid=(1, 2, 4), sha256="ab")


def test_a_request_may_name_tokens_that_end_it_besides_those_of_all() -> None:
    wanted = GenerateRequest(prompt_ids=[1], max_new_tokens=2, stop_ids=[7])
    body = PartialResponse(request=wanted, stop_ids=[5]).body
    assert body["sampling_params"]["stop_token_ids"] == [5, 7]


def test_an_image_is_sent_as_one_token_in_every_part():
    shown = replace(wanted(experts=False), images=[(SPAN, b"png")])
    made = PartialResponse(request=shown)
    assert made.body["input_ids"] == [5, 6]
    made.extend(replace(reply(2, None), num_prompt_tokens=3))
    assert made.body["input_ids"] == [5, 6, 0, 1]
    assert made.body["image_data"] == ["data:image/png;base64,cG5n"]
    with pytest.raises(MismatchError, match="6 tokens in a prompt with images that has 5"):
        made.extend(replace(reply(1, None), num_prompt_tokens=6))


def test_no_record_is_asked_for_where_none_is_wanted():
    made = PartialResponse(request=wanted(experts=False))
    assert "rid" not in made.body
    made.extend(reply(4, None))
    assert made.completion(StopReason.STOP, routing_shape=None).routed_experts is None


@pytest.mark.parametrize("sent", [None, bytes(6 * ROW_BYTES)])
def test_an_engine_that_keeps_no_record_is_named(sent: bytes | None):
    made = PartialResponse(request=wanted())
    made.extend(reply(4, sent))
    with pytest.raises(MachineError, match="do not record") as caught:
        made.completion(StopReason.STOP, routing_shape=SHAPE)
    assert caught.value.fixes == ["--set train.routing_replay=false"]


def test_the_id_of_a_request_says_what_is_wanted_and_others_say_nothing():
    assert wanted_from(request_id(12)) == wanted_from(f"{request_id(12)}/ab0c") == 12
    assert wanted_from(None) is wanted_from("") is wanted_from("0123/45") is None


@pytest.mark.parametrize(
    ("num_experts", "bits", "width"), [(256, 8, 1), (384, 9, 2), (512, 9, 2), (513, 16, 2)]
)
def test_numbers_take_as_many_bits_as_they_need(num_experts: int, bits: int, width: int) -> None:
    """Also of a response in parts, laid one after the other as they came."""
    chance = torch.Generator().manual_seed(num_experts)
    rows = torch.randint(num_experts, (7, 4, 6), generator=chance, dtype=torch.int32)
    rows[0, 0, 0] = num_experts - 1
    parts = [packed(part, num_experts=num_experts) for part in (rows[:3], rows[3:])]
    assert [len(part) for part in parts] == [3, 4], "SGLang counts the rows"
    sent = b"".join(part.numpy().tobytes() for part in parts)
    assert len(sent) * 8 == 7 * 24 * bits
    plain = unpacked(sent, num_rows=7, numbers=24)
    dtype = {1: np.uint8, 2: np.dtype("<u2")}[width]
    assert np.array_equal(np.frombuffer(plain, dtype), rows.flatten().numpy())
    with pytest.raises(AssertionError, match="bytes of routing"):
        unpacked(sent[:-1], num_rows=7, numbers=24)
