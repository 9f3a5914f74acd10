"""Messages of the Tinker API, held against Google's own implementation of protocol buffers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from milescli.runtime.service.wire import (
    PassResult,
    SampledSequence,
    SampleResult,
    pass_from_json,
    pass_from_proto,
)

STRING, BYTES, DOUBLE, INT32, INT64, BOOL = 9, 12, 1, 5, 3, 8
TYPES: dict[str, list[tuple[int, str, int | str, bool]]] = {
    "Csr": [(1, "values", BYTES, False)],
    "Tensor": [
        (1, "dense", BYTES, False),
        (2, "csr", "Csr", False),
        (3, "dtype", INT32, False),
        (4, "shape", INT64, True),
    ],
    "Text": [(1, "tokens", BYTES, False)],
    "Chunk": [(1, "text", "Text", False), (2, "image", "Text", False)],
    "Input": [(1, "key", STRING, False), (2, "value", "Tensor", False)],
    "Datum": [(1, "chunks", "Chunk", True), (2, "inputs", "Input", True)],
    "Value": [(1, "number", DOUBLE, False), (2, "text", STRING, False)],
    "Setting": [(1, "key", STRING, False), (2, "value", "Value", False)],
    "Pass": [
        (1, "model_id", STRING, False),
        (2, "seq_id", INT32, False),
        (3, "data", "Datum", True),
        (4, "loss", STRING, False),
        (6, "forward_only", BOOL, False),
        (7, "config", "Setting", True),
        (99, "later", STRING, False),
    ],
    "Batched": [
        (1, "data", BYTES, False),
        (2, "offsets", BYTES, False),
        (3, "dtype", INT32, False),
    ],
    "Field": [(1, "key", STRING, False), (2, "value", "Batched", False)],
    "Record": [(1, "tag", STRING, False), (2, "fields", "Field", True), (3, "count", INT64, False)],
    "Metric": [(1, "key", STRING, False), (2, "value", DOUBLE, False)],
    "Output": [
        (1, "kind", STRING, False),
        (2, "records", "Record", True),
        (3, "metrics", "Metric", True),
    ],
    "Sequence": [
        (1, "stop", INT32, False),
        (2, "tokens", BYTES, False),
        (3, "logprobs", BYTES, False),
    ],
    "Samples": [(1, "sequences", "Sequence", True), (2, "prompt", BYTES, False)],
}
"""Numbers of fields as in the client's `tinker_public.proto`."""


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="tests.proto", package="t", syntax="proto3")
    for name, fields in TYPES.items():
        message = file.message_type.add(name=name)
        for number, field, kind, repeats in fields:
            made = message.field.add(name=field, number=number, label=3 if repeats else 1)
            made.type = 11 if isinstance(kind, str) else kind
            if isinstance(kind, str):
                made.type_name = f".t.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"t.{name}") for name in TYPES}
    return {name: message_factory.GetMessageClass(each) for name, each in found.items()}


MESSAGES = _messages()
NUMBERS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40)


def _pass(tokens: list[int], weights: list[float], *, seq_id: int = 3) -> Any:
    made = MESSAGES["Pass"](model_id="m:train:0", seq_id=seq_id, loss="ppo", forward_only=True)
    datum = made.data.add()
    datum.chunks.add().text.tokens = np.array(tokens, np.int32).tobytes()
    item = datum.inputs.add(key="weights")
    item.value.dense = np.array(weights, np.float32).tobytes()
    item.value.dtype = 1
    item.value.shape.extend([len(weights)])
    setting = made.config.add(key="clip_low_threshold")
    setting.value.number = 0.7
    made.later = "a field of a later version"
    return made


@given(st.lists(st.integers(0, 2**31 - 1), max_size=300), NUMBERS, st.integers(0, 2**31 - 1))
def test_a_pass_is_read_as_it_was_written(
    tokens: list[int], weights: list[float], seq_id: int
) -> None:
    read = pass_from_proto(_pass(tokens, weights, seq_id=seq_id).SerializeToString())
    assert (read.model_id, read.seq_id, read.loss) == ("m:train:0", seq_id, "ppo")
    assert read.forward_only and read.config == {"clip_low_threshold": 0.7}
    (datum,) = read.data
    assert datum.tokens.tolist() == tokens
    assert datum.inputs["weights"].tolist() == weights


@given(st.binary(max_size=200))
def test_what_is_no_message_is_refused(body: bytes) -> None:
    try:
        pass_from_proto(body)
    except ValueError:
        return


@given(st.data())
def test_a_message_that_is_cut_is_refused_or_read(data: st.DataObject) -> None:
    whole = _pass([1, 2, 300], [0.5, 1.0, 2.0]).SerializeToString()
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        pass_from_proto(cut)
    except ValueError:
        return


@given(st.data())
def test_a_message_with_a_wrong_byte_is_refused_or_read(data: st.DataObject) -> None:
    wrong = bytearray(_pass([1, 2, 300], [0.5, 1.0, 2.0]).SerializeToString())
    wrong[data.draw(st.integers(0, len(wrong) - 1))] = data.draw(st.integers(0, 255))
    try:
        pass_from_proto(bytes(wrong))
    except ValueError:
        return


def test_what_cannot_be_computed_is_refused() -> None:
    image = _pass([1], [1.0])
    image.data[0].chunks.add().image.tokens = b"png"
    sparse = _pass([1], [1.0])
    sparse.data[0].inputs[0].value.csr.values = b"1234"
    text = _pass([1], [1.0])
    text.config[0].value.text = "wide"
    for wrong in (image, sparse, text):
        with pytest.raises(ValueError, match=r"image|sparse|number"):
            pass_from_proto(wrong.SerializeToString())


@given(st.lists(NUMBERS, max_size=4), st.floats(-1e9, 1e9))
def test_results_are_read_as_they_were_made(logprobs: list[list[float]], loss: float) -> None:
    result = PassResult(
        logprobs=[np.array(each, np.float32) for each in logprobs], metrics={"loss:sum": loss}
    )
    read = MESSAGES["Output"].FromString(result.to_proto())
    (record,) = read.records
    (field,) = record.fields
    assert (field.key, record.count, field.value.dtype) == ("logprobs", len(logprobs), 1)
    ends = np.frombuffer(field.value.offsets, np.int64) // 4
    flat = np.frombuffer(field.value.data, np.float32)
    parts = [flat[a:b].tolist() for a, b in itertools.pairwise(ends)]
    assert parts == logprobs
    assert [(one.key, one.value) for one in read.metrics] == [("loss:sum", loss)]
    told = result.to_json()
    assert [each["logprobs"]["data"] for each in told["loss_fn_outputs"]] == logprobs


def test_samples_are_read_as_they_were_made() -> None:
    made = [
        SampledSequence(tokens=[5, 300000], logprobs=[-0.5, -1.0], is_cut=True),
        SampledSequence(tokens=[], logprobs=[], is_cut=False),
    ]
    result = SampleResult(sequences=made, prompt_logprobs=[math.nan, -2.0])
    read = MESSAGES["Samples"].FromString(result.to_proto())
    assert [each.stop for each in read.sequences] == [1, 0]
    assert np.frombuffer(read.sequences[0].tokens, np.int32).tolist() == [5, 300000]
    assert np.frombuffer(read.sequences[0].logprobs, np.float32).tolist() == [-0.5, -1.0]
    first, second = np.frombuffer(read.prompt, np.float32)
    assert math.isnan(first) and second == -2.0
    told = result.to_json()
    assert told["prompt_logprobs"] == [None, -2.0]
    assert [each["stop_reason"] for each in told["sequences"]] == ["length", "stop"]


def test_the_form_of_older_clients_is_read_too() -> None:
    datum = {
        "model_input": {"chunks": [{"tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}},
    }
    given = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": None}
    read = pass_from_json({"model_id": "m", "seq_id": 2, "forward_input": given})
    assert read.forward_only and read.data[0].tokens.tolist() == [1, 2, 3]
    assert read.data[0].inputs["target_tokens"].tolist() == [2, 3, 4]
    for wrong in ({}, {"model_id": "m", "forward_input": {"data": [{}], "loss_fn": "x"}}):
        with pytest.raises(ValueError, match="field"):
            pass_from_json(wrong)
