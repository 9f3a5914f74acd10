"""Serialises a group: a small JSON header and the bytes of its arrays, bit for bit. Reading a
record never executes code. The prompt is not part of it (the prompt source has it), and of its
images the hashes alone are; images that tools returned are stored once. `journal` calls it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from milescli.core.types import (
    Group,
    Guesses,
    Image,
    ImageSpan,
    Prompt,
    RoutedExperts,
    Sample,
    StopReason,
    TeacherTokens,
    Trajectory,
    VersionSpan,
)

_TYPES = {
    kind.__name__: kind
    for kind in (
        Sample,
        Guesses,
        Trajectory,
        VersionSpan,
        RoutedExperts,
        TeacherTokens,
        ImageSpan,
        Image,
    )
}
_TUPLES = frozenset(("grid", "image_spans"))
"""Fields that are tuples; other sequences are lists."""
FIELDS = {name: [field.name for field in fields(kind)] for name, kind in _TYPES.items()}
"""Field names of the record types: a version of miles with other fields cannot read the records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHead:
    """Describes a recorded group without its tokens."""

    position: int
    """Position of its prompt in the source: unique over a whole run."""
    prompt_index: int
    epoch: int
    oldest: int
    """Weight version of its oldest token."""
    newest: int


def encode_group(position: int, group: Group) -> tuple[dict[str, Any], list[bytes]]:
    """Return (head, arrays in the order in which the head lists them)."""
    parts: list[bytes] = []
    versions = [span.version for sample in group.samples for span in sample.version_spans]
    lines = [line for sample in group.samples for line in sample.trajectories]
    returned = {image.sha256: image for line in lines for image in line.images}
    head = {
        "position": position,
        "prompt_index": group.prompt.index,
        "epoch": group.epoch,
        "oldest": min(versions),
        "newest": max(versions),
        "greedy_reward": group.greedy_reward,
        "images": [_fields(image, parts) for image in returned.values()],
        "samples": _plain(group.samples, parts),
    }
    return head, parts


def read_head(head: Mapping[str, Any]) -> GroupHead:
    """Read a GroupHead. Raises KeyError or ValueError for anything else."""
    return GroupHead(**{field.name: int(head[field.name]) for field in fields(GroupHead)})


def decode_group(head: Mapping[str, Any], body: bytes, *, prompt: Prompt) -> Group:
    """Decode a group. `body`: the arrays, one after the other. Raises KeyError, TypeError or
    ValueError if it is not a group of this prompt."""
    if head["prompt_index"] != prompt.index:
        raise ValueError(f"it belongs to prompt {head['prompt_index']}, not to {prompt.index}")
    rest = _Arrays(body)
    rest.images = {image.sha256: image for image in rest.value(head["images"])}
    samples = rest.value(head["samples"])
    if rest.at != len(body):
        raise ValueError(f"{len(body) - rest.at} bytes are left over")
    known = {image.sha256 for image in prompt.images} | rest.images.keys()
    lines = [line for sample in samples for line in sample.trajectories]
    if other := {span.sha256 for line in lines for span in line.image_spans} - known:
        raise ValueError(f"{len(other)} of its images differ from those of the prompt")
    return Group(
        prompt=prompt,
        samples=samples,
        epoch=head["epoch"],
        greedy_reward=head["greedy_reward"],
    )


def _plain(value: Any, parts: list[bytes]) -> Any:
    """Return a value as JSON; append the bytes of arrays to `parts` and keep their size."""
    if isinstance(value, array):
        parts.append(value.tobytes())
        return {"array": value.typecode, "size": len(parts[-1])}
    if isinstance(value, bytes):
        parts.append(value)
        return {"array": "", "size": len(value)}
    if isinstance(value, Image):
        return value.sha256
    if is_dataclass(value):
        return _fields(value, parts)
    if isinstance(value, Mapping):
        return {"map": [[name, _plain(item, parts)] for name, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_plain(item, parts) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    return float(value)  # numpy's too


def _fields(value: Any, parts: list[bytes]) -> dict[str, Any]:
    items = {field.name: _plain(getattr(value, field.name), parts) for field in fields(value)}
    return {"type": type(value).__name__, **items}


class _Arrays:
    """Takes the arrays that a head describes from a body, in their order."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.at = 0
        self.images: dict[str, Image] = {}
        """Those that trajectories name, by hash."""

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        if "array" in plain:
            return self._array(plain["array"], plain["size"])
        if "map" in plain:
            return {name: self.value(item) for name, item in plain["map"]}
        items = {name: self.value(item) for name, item in plain.items() if name != "type"}
        if plain["type"] == Sample.__name__:
            items["stop_reason"] = StopReason(items["stop_reason"])
        for name in _TUPLES & items.keys():
            items[name] = tuple(items[name])
        if "images" in items:
            items["images"] = tuple(self.images[name] for name in items["images"])
        return _TYPES[plain["type"]](**items)

    def _array(self, typecode: str, size: int) -> array[Any] | bytes:
        piece = self._body[self.at : self.at + size]
        if len(piece) != size:
            raise ValueError(f"an array of {size} bytes has {len(piece)}")
        self.at += size
        return array(typecode, piece) if typecode else piece
