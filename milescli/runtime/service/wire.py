"""Encodes the messages of the Tinker API that its client sends and receives as protocol buffers:
the datums of a forward and backward pass, its result, and samples. Older clients send the first as
JSON, and receive all as JSON. Knows nothing of losses or models.

Encoding: https://protobuf.dev/programming-guides/encoding. Numbers of fields are those of the
message types in `tinker_public.proto`."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
"""DTYPE_FLOAT32, DTYPE_INT64, DTYPE_INT32."""
_NAMES = {"float32": _DTYPES[1], "int64": _DTYPES[2]}
_LENGTH = 1
"""STOP_REASON_LENGTH."""
_RECORD = "ArrayRecord"


class ClientError(ValueError):
    """Reports an error of a client, in words for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """Holds one token sequence, and the inputs of its loss."""

    tokens: np.ndarray
    """[n] integers that the model reads."""
    inputs: Mapping[str, np.ndarray]
    """By name, as the client shaped them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRequest:
    """Holds a client's request for a forward, or forward and backward, pass."""

    model_id: str
    seq_id: int
    """Number of the request among those of the model."""
    data: Sequence[Datum]
    loss: str
    config: Mapping[str, float] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """Holds the result of a pass."""

    logprobs: Sequence[np.ndarray]
    """[datums] [n] float32 of the targets."""
    metrics: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the result as older clients read it."""
        outputs = [
            {"logprobs": {"data": each.tolist(), "dtype": "float32", "shape": [len(each)]}}
            for each in self.logprobs
        ]
        return {
            "loss_fn_output_type": _RECORD,
            "loss_fn_outputs": outputs,
            "metrics": dict(self.metrics),
        }

    def to_proto(self) -> bytes:
        """Return a ForwardBackwardOutput with one record of all datums."""
        flat = np.concatenate([*self.logprobs, np.zeros(0)]).astype("<f4")
        offsets = np.cumsum([0, *(4 * len(each) for each in self.logprobs)]).astype("<i8")
        tensor = _bytes(1, flat.tobytes()) + _bytes(2, offsets.tobytes()) + _varint(3, 1)
        entry = _bytes(1, b"logprobs") + _bytes(2, tensor)
        record = _bytes(1, _RECORD.encode()) + _bytes(2, entry) + _varint(3, len(self.logprobs))
        metrics = b"".join(
            _bytes(3, _bytes(1, name.encode()) + _double(2, value))
            for name, value in self.metrics.items()
        )
        return _bytes(1, _RECORD.encode()) + _bytes(2, record) + metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """Holds one sampled sequence."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_cut: bool
    """True if it ended by its limit of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """Holds the result of a request for samples."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Sequence[float] | None = None
    """[prompt tokens], NaN for the first; None if they were not requested."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as older clients read it."""
        made = [
            {
                "stop_reason": "length" if each.is_cut else "stop",
                "tokens": list(each.tokens),
                "logprobs": list(each.logprobs),
            }
            for each in self.sequences
        ]
        of_prompt = self.prompt_logprobs and [
            None if math.isnan(value) else value for value in self.prompt_logprobs
        ]
        return {"type": "sample", "sequences": made, "prompt_logprobs": of_prompt}

    def to_proto(self) -> bytes:
        """Return a SampleResponse."""
        parts = [
            _bytes(
                1,
                _varint(1, _LENGTH if each.is_cut else 0)
                + _bytes(2, np.array(each.tokens, "<i4").tobytes())
                + _bytes(3, np.array(each.logprobs, "<f4").tobytes()),
            )
            for each in self.sequences
        ]
        if self.prompt_logprobs is not None:
            parts.append(_bytes(2, np.array(self.prompt_logprobs, "<f4").tobytes()))
        return b"".join(parts)


def pass_from_proto(body: bytes) -> PassRequest:
    """Read a ForwardBackwardRequest. Raises ClientError."""
    found = _Fields(body)
    numbers = {entry.text(1): entry.number(2) for entry in found.all(5)}
    for entry in found.all(7):
        value = entry.first(2)
        if value.has(2):
            raise ClientError(f"`{entry.text(1)}` of the loss's settings must be a number")
        numbers[entry.text(1)] = value.number(1)
    return PassRequest(
        model_id=found.text(1),
        seq_id=found.integer(2),
        data=[_datum(each) for each in found.all(3)],
        loss=found.text(4),
        config=numbers,
        forward_only=bool(found.integer(6)),
    )


def _datum(found: _Fields) -> Datum:
    return Datum(
        tokens=_joined(_tokens(chunk) for chunk in found.all(1)),
        inputs={entry.text(1): _tensor(entry.first(2)) for entry in found.all(2)},
    )


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _tokens(chunk: _Fields) -> np.ndarray:
    text = next(chunk.all(1), None)
    if text is None:
        raise ClientError("only text can be read: a chunk is an image or audio")
    return _array(text.bytes(1), _DTYPES[3])


def _tensor(found: _Fields) -> np.ndarray:
    if found.has(2):
        raise ClientError("sparse tensors are not supported: send one target for each token")
    dtype = _DTYPES.get(found.integer(3))
    if dtype is None:
        raise ClientError(f"tensors of dtype {found.integer(3)} are not supported")
    shape, flat = found.integers(4), _array(found.bytes(1), dtype)
    if any(size > flat.size for size in shape):
        raise ClientError(f"a tensor has the shape {shape} and {flat.size} numbers")
    return flat.reshape(shape) if shape else flat


def _array(data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ClientError(f"a tensor has {len(data)} bytes, which are no {dtype.name}")
    return np.frombuffer(data, dtype)


def pass_from_json(body: Mapping[str, Any]) -> PassRequest:
    """Read the request of an older client. Raises ClientError."""
    try:
        forward_only = "forward_input" in body
        given = body["forward_input" if forward_only else "forward_backward_input"]
        return PassRequest(
            model_id=str(body["model_id"]),
            seq_id=int(body.get("seq_id") or 0),
            data=[
                Datum(
                    tokens=tokens_of(each["model_input"]),
                    inputs={k: _json_tensor(v) for k, v in each["loss_fn_inputs"].items()},
                )
                for each in given["data"]
            ],
            loss=str(given["loss_fn"]),
            config={key: float(x) for key, x in (given.get("loss_fn_config") or {}).items()},
            forward_only=forward_only,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ClientError(f"the request lacks a field, or has a wrong one: {error}") from None


def tokens_of(model_input: Mapping[str, Any]) -> np.ndarray:
    """Return [n] the tokens of a ModelInput in JSON. Raises ClientError for other chunks."""
    chunks = model_input["chunks"]
    if any(each.get("type", "encoded_text") != "encoded_text" for each in chunks):
        raise ClientError("only text can be read: a chunk is an image or audio")
    return _joined(np.array(each["tokens"], np.int64) for each in chunks)


def _json_tensor(given: Mapping[str, Any]) -> np.ndarray:
    if given.get("sparse_crow_indices") is not None:
        raise ClientError("sparse tensors are not supported: send one target for each token")
    flat = np.array(given["data"], _NAMES[given["dtype"]])
    return flat.reshape(given["shape"]) if given.get("shape") else flat


class _Fields:
    """Holds the fields of one message, by number."""

    def __init__(self, data: bytes) -> None:
        """Read all of them. Raises ClientError."""
        self._found: dict[int, list[Any]] = {}
        for number, value in _read(memoryview(data)):
            self._found.setdefault(number, []).append(value)

    def has(self, number: int) -> bool:
        return number in self._found

    def all(self, number: int) -> Iterator[_Fields]:
        """Yield the messages of a field."""
        return (_Fields(self._as_bytes(value)) for value in self._found.get(number, ()))

    def first(self, number: int) -> _Fields:
        """Return the message of a field; an empty one if the field is missing."""
        return next(self.all(number), _Fields(b""))

    def bytes(self, number: int) -> bytes:
        return self._as_bytes(self._found.get(number, [b""])[-1])

    def text(self, number: int) -> str:
        return str(self.bytes(number), "utf-8")

    def integer(self, number: int) -> int:
        value = self._found.get(number, [0])[-1]
        if not isinstance(value, int):
            raise ClientError(f"field {number} is not an integer")
        return value

    def integers(self, number: int) -> list[int]:
        """Return a repeated field, packed or not."""
        values = list[int]()
        for value in self._found.get(number, ()):
            values += [value] if isinstance(value, int) else _varints(self._as_bytes(value))
        return values

    def number(self, number: int) -> float:
        """Return a double; 0.0 if the field is missing."""
        data = self._found.get(number, [bytes(8)])[-1]
        if isinstance(data, int) or len(data) != 8:
            raise ClientError(f"field {number} is not a double")
        return float(struct.unpack("<d", data)[0])

    @staticmethod
    def _as_bytes(value: Any) -> bytes:
        if isinstance(value, int):
            raise ClientError("a field has an integer in the place of bytes")
        return bytes(value)


def _read(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        if kind == BYTES:
            size, at = _read_varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise ClientError(f"the message has a field of unknown type {kind}")
        if at + size > len(data):
            raise ClientError("the message ends within a field")
        yield key >> 3, data[at : at + size]
        at += size


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for number, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return value, at + number + 1
    raise ClientError("the message ends within a number")


def _varints(data: bytes) -> list[int]:
    values, at = list[int](), 0
    while at < len(data):
        value, at = _read_varint(memoryview(data), at)
        values.append(value)
    return values


def _to_varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def _varint(number: int, value: int) -> bytes:
    return _to_varint(number << 3 | VARINT) + _to_varint(value)


def _bytes(number: int, value: bytes) -> bytes:
    return _to_varint(number << 3 | BYTES) + _to_varint(len(value)) + value


def _double(number: int, value: float) -> bytes:
    return _to_varint(number << 3 | FIXED64) + struct.pack("<d", value)
