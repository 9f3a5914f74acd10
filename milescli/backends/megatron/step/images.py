"""The images of a rank's shard: pixels of each, computed on first use, and the positions of their
tokens in a row. Made anew for each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from milescli.core.types import ImageSpan
from milescli.train.base import TrainShard

Grid = tuple[int, int, int]
ReadPatches = Callable[[bytes], np.ndarray]
"""PNG -> [patches, numbers of a patch] float32, as the model's image processor cuts it."""


@dataclass(slots=True, kw_only=True)
class StepImages:
    """Holds the images of a shard."""

    files: Mapping[str, bytes]
    """PNG by hash."""
    read: ReadPatches
    features: dict[int, dict[str, Sequence[torch.Tensor]]] = field(default_factory=dict)
    """Features of frozen towers, by identity of the model and hash of the image."""
    _patches: dict[str, torch.Tensor] = field(default_factory=dict)

    def patches(self, image: str) -> torch.Tensor:
        """Return [patches, numbers of a patch] float32 of the image of this hash."""
        if image not in self._patches:
            self._patches[image] = torch.from_numpy(self.read(self.files[image]))
        return self._patches[image]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowImages:
    """Holds the images of one microbatch."""

    step: StepImages
    grids: dict[str, Grid]
    """Rows and columns of patches by hash, each image once, in the order of their features."""
    place: torch.Tensor
    """[S] int64 index among the tokens of all these images, one image after the other; -1: no image
    token."""


class ShardPlaces:
    """Locates the image tokens of a shard. T: tokens of the shard."""

    def __init__(self, shard: TrainShard, *, step: StepImages, merge_size: int) -> None:
        """`merge_size` is the model's."""
        self._spans, self._step = shard.image_spans, step
        self._starts = shard.cu_seqlens
        num_tokens = len(shard.token_ids)
        self._image = np.full(num_tokens, -1, np.int64)
        self._token = np.zeros(num_tokens, np.int64)
        self._numbers: dict[str, int] = {}
        rotary = []
        for start, end, spans in zip(
            self._starts, self._starts[1:], self._spans or [()] * len(self._starts), strict=False
        ):
            rotary.append(rotary_positions(int(end - start), spans, merge_size=merge_size))
            for span in spans:
                places = slice(start + span.start, start + span.start + span.num_tokens)
                number = self._numbers.setdefault(span.sha256, len(self._numbers))
                self._image[places] = number
                self._token[places] = np.arange(span.num_tokens)
        self._rotary = np.concatenate(rotary, axis=1) if rotary else np.zeros((3, 0), np.int64)

    def rotary(self, source: torch.Tensor) -> torch.Tensor:
        """Return [3, S] positions of the tokens at `source` [S], -1 for padding."""
        inputs = source.numpy()
        return torch.from_numpy(np.where(inputs >= 0, self._rotary[:, inputs.clip(0)], 0))

    def of_row(self, indices: Sequence[int], source: torch.Tensor) -> RowImages:
        """Return the images of a row of sequences `indices`, whose tokens are those at `source`
        [S]."""
        spans: list[ImageSpan] = [
            span for index in indices for span in (self._spans[index] if self._spans else ())
        ]
        grids, first, end = {}, np.zeros(len(self._numbers) + 1, np.int64), 0
        for span in spans:
            if span.sha256 not in grids:
                grids[span.sha256], first[self._numbers[span.sha256]] = span.grid, end
                end += span.num_tokens
        inputs = source.numpy()
        image = np.where(inputs >= 0, self._image[inputs.clip(0)], -1)
        place = np.where(image >= 0, first[image] + self._token[inputs.clip(0)], -1)
        return RowImages(step=self._step, grids=grids, place=torch.from_numpy(place))


# --- rotary positions


def rotary_positions(num_tokens: int, spans: Sequence[ImageSpan], *, merge_size: int) -> np.ndarray:
    """Return [3, num_tokens] int64: time, row and column of each token. All three of a text token
    are one more than the largest before it. Those of an image's tokens are its place in the grid of
    tokens, counted from that number on. `merge_size` rows and columns of patches are one token."""
    positions = np.empty((3, num_tokens), np.int64)
    token = following = 0
    for span in spans:
        before = span.start - token
        positions[:, token : span.start] = following + np.arange(before)
        following += before
        frames, rows, columns = (
            span.grid[0],
            span.grid[1] // merge_size,
            span.grid[2] // merge_size,
        )
        token = span.start + span.num_tokens
        assert frames * rows * columns == span.num_tokens, (span, merge_size)
        positions[:, span.start : token] = following + np.indices((frames, rows, columns)).reshape(
            3, -1
        )
        following += max(rows, columns)
    positions[:, token:] = following + np.arange(num_tokens - token)
    return positions
