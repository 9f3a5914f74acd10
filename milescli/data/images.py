"""Images of rows and chats: how rows name them, how tools return them, which mark of a text stands
for which, and how the one token that a chat template writes for an image is expanded to all its
tokens; downloads images from URLs. It does not cut pictures (`image_processor` does) and knows no
file format."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from milescli.core.errors import DataError, MilesError
from milescli.core.files import parse_json, read_json, read_regular_bytes
from milescli.core.types import Image, ImageSpan
from milescli.data.image_processor import (
    MAX_FILE_BYTES,
    ImageProcessor,
    load_processor,
    normalised,
)
from milescli.data.tables import kind_of
from milescli.models import parse_facts

MARK = "<image>"
"""Stands in the text of a turn for one image, in their order."""
COLUMNS = ("images", "image")
"""Columns that contain the images of a row."""
PARTS = frozenset(("image", "image_url", "input_image"))
"""Types of the parts of a message that are images."""
Source = str | bytes
"""A path, relative to the folder of its file, a data URL, or the bytes of a file."""
Content = str | list[dict[str, Any]]
"""Content of a message: text, or parts in OpenAI's form if it has images."""
_ENCODED = ("bytes", "base64", "data")
"""Fields whose text is base64."""
_FIELDS = (*_ENCODED, "image", "image_url", "url", "path", "source")
"""Fields of a part, or of a value, that hold the image; the first that is not empty."""
DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,([\w+/=]*)", re.ASCII)
_MAX_PATH = 1024
_PNG_MODES = frozenset(("1", "L", "LA", "P", "RGB", "RGBA", "I;16"))
_REMOTE = ("http://", "https://", "s3://", "gs://")


@dataclass(frozen=True)
class PromptImages:
    """Describes how one model reads the images of its prompts."""

    folder: Path
    """Folder of the model."""
    token_id: int
    """The token that stands for a part of an image."""
    reserved_ids: tuple[int, ...] = ()
    """The image token and the video token: after either, an engine expects a picture, so a response
    ends if one is sampled."""
    mark_ids: tuple[int, ...] = ()
    """The tokens that mark the place of an image: its token between a start and an end."""
    opening_id: int | None = None
    """The token that chat templates write for an image, which is replaced by the image's own tokens
    between two ends, on separate lines (Gemma 3); None: they write `token_id`."""
    fetches: bool = False
    """True if images are downloaded from URLs (`data.remote_images`)."""

    @cached_property
    def processor(self) -> ImageProcessor:
        """Return the model's processor. Raises CheckpointError if its folder has none."""
        return load_processor(self.folder)

    def read(self, source: Source, *, base: Path) -> Image:
        """Return the image that a row names. `base`: folder of relative paths. Raises ValueError
        with the reason if it cannot be used."""
        with _reasons(source):
            return self.processor.read(_bytes_of(source, base=base, fetches=self.fetches))

    def check(self, source: Source, *, base: Path) -> None:
        """Raise ValueError as `read`, without making the image."""
        with _reasons(source):
            normalised(_bytes_of(source, base=base, fetches=self.fetches))

    def expanded(
        self, token_ids: Sequence[int], images: Sequence[Image]
    ) -> tuple[list[int], tuple[ImageSpan, ...], list[int]]:
        """Return the tokens with the one token of each image replaced by all its tokens, the spans
        of the images, and [num_tokens] the index in `token_ids` from which each token comes. Raises
        ValueError unless there are as many image tokens as images."""
        marks = sum(token == self.token_id for token in token_ids)
        if marks != len(images):
            raise ValueError(
                f"the chat template writes {marks} image tokens for {len(images)} images"
                if images
                else f"its text contains the image token {marks} times, but it has no image"
            )
        ids: list[int] = []
        spans: list[ImageSpan] = []
        places: list[int] = []
        waiting = iter(images)
        for place, token in enumerate(token_ids):
            count = 1
            if token == self.token_id:
                image = next(waiting)
                count = image.num_tokens
                spans.append(
                    ImageSpan(
                        start=len(ids), num_tokens=count, grid=image.grid, sha256=image.sha256
                    )
                )
            ids += [token] * count
            places += [place] * count
        return ids, tuple(spans), places


ANY_MODEL_IMAGES = PromptImages(Path(), -1)
"""Checks images when the model is unknown."""


@contextmanager
def _reasons(source: Source) -> Iterator[None]:
    """Turn an error about an image into a ValueError that names the image."""
    try:
        yield
    except DataError as error:
        is_named = isinstance(source, str) and len(source) < _MAX_PATH
        name = f"{source}: " if is_named and not source.startswith("data:") else ""
        raise ValueError(f"{name}{error.what}: {error.why}") from error


def prompt_images(folder: Path) -> PromptImages | None:
    """Return how the model in a folder reads images; None if it reads none, or if the trainer does
    not support its vision tower."""
    try:
        config = read_json(folder / "config.json")
        vision = parse_facts(config).vision if config.get("vision_config") else None
    except (OSError, ValueError, MilesError):  # whoever needs the model says what is wrong with it
        return None
    if vision is None:
        return None
    if vision.tower == "siglip":
        opening, closing = (
            config.get(f"{end}_token_index", default)
            for end, default in (("boi", 255_999), ("eoi", 256_000))
        )
        token = vision.image_token_id
        return PromptImages(
            folder, token, (token, opening), (opening, token, closing), opening_id=opening
        )
    named = (config.get(name) for name in ("image_token_id", "video_token_id"))
    reserved = tuple(token for token in named if isinstance(token, int))
    ends = [config.get(f"vision_{end}_token_id") for end in ("start", "end")]
    marks = (ends[0], vision.image_token_id, ends[1])
    mark_ids = tuple(token for token in marks if isinstance(token, int))
    return PromptImages(folder, vision.image_token_id, reserved, mark_ids)


def collapsed(token_ids: Sequence[int], spans: Sequence[ImageSpan]) -> list[int]:
    """Return the tokens with the tokens of each image replaced by a single one, as engines
    require."""
    collapsed_ids, at = list[int](), 0
    for span in spans:
        collapsed_ids += token_ids[at : span.start + 1]
        at = span.start + span.num_tokens
    return [*collapsed_ids, *token_ids[at:]]


def as_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with each mark as a separate part, in the form of chat templates of
    vision-language models."""
    return [
        {**message, "content": parts_of(message["content"])}
        if MARK in message.get("content", "")
        else dict(message)
        for message in messages
    ]


def parts_of(text: str, *, most: int = -1) -> list[dict[str, str]]:
    """Return a text with each mark as a separate part; if `most` is not negative, marks after the
    first `most` stay text."""
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(MARK, most)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def text_of(content: Content) -> str:
    """Return the content of a message as text, with a mark for each image."""
    if isinstance(content, str):
        return content
    return "".join(
        MARK if part.get("type") in PARTS else str(part.get("text", "")) for part in content
    )


def content_of(value: object) -> Content | None:
    """Return what a tool or an environment returned as the content of a message: text, or parts in
    OpenAI's form if it is or contains images, which are the bytes of files and pictures of PIL,
    alone or in a list with texts. None for anything else. Raises ValueError if an image cannot be
    used."""
    if isinstance(value, str):
        return value
    values = value if isinstance(value, list | tuple) else [value]
    if not any(map(_is_picture, values)):
        return None
    return [
        {"type": "text", "text": each if isinstance(each, str) else json.dumps(each, default=str)}
        if not _is_picture(each)
        else {"type": "image_url", "image_url": {"url": _data_url(each)}}
        for each in values
    ]


def _is_picture(value: object) -> bool:
    pillow = sys.modules.get("PIL.Image")  # a picture exists only where it was imported
    return isinstance(value, bytes) or (pillow is not None and isinstance(value, pillow.Image))


def _data_url(value: Any) -> str:
    buffer = io.BytesIO()
    try:
        if not isinstance(value, bytes):
            value = value if value.mode in _PNG_MODES else value.convert("RGB")
            value.save(buffer, format="PNG")
            value = buffer.getvalue()
        picture = normalised(value)
    except DataError as error:
        raise ValueError(f"{error.what}: {error.why}") from error
    except (OSError, SyntaxError) as error:
        raise ValueError(f"an image cannot be read: {error}") from error
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def source_in(part: Mapping[str, Any]) -> Source | None:
    """Return the image in a part of a message; None if the part only marks the place of an image
    from a column. Raises ValueError."""
    named = {name: part[name] for name in _FIELDS if part.get(name)}
    return _source(named) if named else None


def sources_in(value: Any) -> list[Source]:
    """Return the images of a column: one, or a list. Raises ValueError."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        value = parse_json(value)
    values = value if isinstance(value, list) else [value]
    return [_source(each) for each in values if each not in (None, "", {})]


def _source(value: Any) -> Source:
    if isinstance(value, Mapping):
        name = next((name for name in _FIELDS if value.get(name)), None)
        if name is None:
            raise ValueError(f"an image has none of the fields {', '.join(_FIELDS)}")
        found, is_encoded = value[name], name in _ENCODED and isinstance(value[name], str)
        return f"data:image/png;base64,{found}" if is_encoded else _source(found)
    if isinstance(value, str | bytes):
        return value
    raise ValueError(f"an image must be a path, a data URL or bytes, not {kind_of(value)}")


def _bytes_of(source: Source, *, base: Path, fetches: bool) -> bytes:
    if isinstance(source, bytes):
        return source
    if source.startswith(_REMOTE):
        if not fetches or not source.startswith("http"):
            raise ValueError(
                f"`{source:.80}` is remote: download the image and name the file, or set "
                "`data.remote_images=true` for http addresses"
            )
        return _fetched(source, most=MAX_FILE_BYTES)
    text = source
    if (found := DATA_URL.fullmatch(source)) is not None:
        text = found[1]
    elif len(source) < _MAX_PATH:
        path = base / Path(source.removeprefix("file://")).expanduser()
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
            return read_regular_bytes(path)
        except (OSError, RuntimeError) as error:  # RuntimeError: a home that nobody has
            raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"an image is not valid base64: {error}") from None


def with_marks(
    turns: list[dict[str, Any]],
    in_parts: Sequence[Source | None],
    column: Sequence[Source],
    *,
    may_lack: bool = False,
) -> tuple[list[dict[str, Any]], tuple[Source, ...]]:
    """Return the turns of a row with a mark for each image, and the images in their order.
    `in_parts`: the images of its parts, None for parts that take the next one of `column`. If a row
    has no mark, the marks go before the text of its first user. `may_lack`: marks without an image
    are text. Raises ValueError unless there are as many marks as images."""
    own = [source for source in in_parts if source is not None]
    if own and (column or len(own) < len(in_parts)):
        raise ValueError("some of its images are in the messages, and others are in a column")
    sources = tuple(own or column)
    marks = sum(turn["content"].count(MARK) for turn in turns)
    if sources and not marks:
        place = next((n for n, turn in enumerate(turns) if turn["role"] == "user"), 0)
        first = {**turns[place], "content": MARK * len(sources) + turns[place]["content"]}
        return [*turns[:place], first, *turns[place + 1 :]], sources
    if marks != len(sources) and not (may_lack and not sources):
        raise ValueError(f"it has {marks} marks `{MARK}` but {len(sources)} images")
    return turns, sources


_FETCH_S, _FETCH_TRIES = 30.0, 2


def _fetched(url: str, *, most: int) -> bytes:
    """Return the file at a URL of http or https. Raises ValueError with the reason if it cannot be
    downloaded, or has more than `most` bytes."""
    cached = _cache() / hashlib.sha256(url.encode()).hexdigest()
    if cached.is_file():
        return cached.read_bytes()
    data = _get_url(url, most)
    cached.parent.mkdir(parents=True, exist_ok=True)
    part = cached.with_suffix(f".{os.getpid()}")
    part.write_bytes(data)
    part.replace(cached)
    return data


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "miles" / "images"


def _get_url(url: str, most: int) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "miles"})
    for last in range(1, _FETCH_TRIES + 1):
        try:
            with urllib.request.urlopen(request, timeout=_FETCH_S) as answer:
                data = answer.read(most + 1)
        except urllib.error.HTTPError as error:
            raise ValueError(f"cannot fetch {url:.200}: {error.code} {error.reason}") from None
        except (OSError, ValueError) as error:
            if last == _FETCH_TRIES:
                reason = getattr(error, "reason", error)
                raise ValueError(f"cannot fetch {url:.200}: {reason}") from None
        else:
            if len(data) > most:
                raise ValueError(f"{url:.200} is larger than {most} bytes")
            return data
    raise AssertionError(url)
