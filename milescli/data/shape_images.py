"""Draws the pictures of `task:shapes`: one to five shapes on a dark ground, to be counted. Pure and
seeded."""

from __future__ import annotations

import base64
import hashlib
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass

SIDE = 56
"""Pixels: 4 x 4 patches of 14, which are four tokens of a model that merges 2 x 2."""
MAX_SHAPES = 5
"""Most shapes in one picture; all counts are equally likely."""
_RADIUS = 5
_CELLS = 4
"""Cells in a row, and in a column; no two shapes are in one cell."""
_QUESTION = "How many shapes?"
_HELDOUT_MODULUS = 8
"""One picture in eight is held out, whatever the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapesRow:
    """Holds one line of the task's file."""

    prompt: str
    label: str
    demonstration: str
    images: tuple[str, ...]
    """One data URL."""


def shape_rows(rng: random.Random, *, heldout: bool) -> Iterator[ShapesRow]:
    """Yield rows without end."""
    while True:
        count = 1 + int(rng.random() * MAX_SHAPES)
        png = _png(rng, count)
        if (hashlib.sha256(png).digest()[0] % _HELDOUT_MODULUS == 0) is heldout:
            url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
            yield ShapesRow(
                prompt=f"<image>{_QUESTION}",
                label=str(count),
                demonstration=str(count),
                images=(url,),
            )


def _png(rng: random.Random, count: int) -> bytes:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (SIDE, SIDE), _colour(rng, 0, 90))
    draw = ImageDraw.Draw(picture)
    cells = sorted(range(_CELLS**2), key=lambda _: rng.random())[:count]
    step = SIDE / _CELLS
    for cell in cells:
        shift = step / 2 - _RADIUS - 1
        x, y = (
            (place + 0.5) * step + (2 * rng.random() - 1) * shift for place in divmod(cell, _CELLS)
        )
        box = (x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS)
        colour = _colour(rng, 150, 255)
        kind = int(rng.random() * 3)
        if kind == 0:
            draw.ellipse(box, fill=colour)
        elif kind == 1:
            draw.rectangle(box, fill=colour)
        else:
            draw.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=colour)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _colour(rng: random.Random, low: int, high: int) -> tuple[int, int, int]:
    red, green, blue = (low + int(rng.random() * (high - low + 1)) for _ in range(3))
    return red, green, blue
