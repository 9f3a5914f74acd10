"""Multimodal rotary positions (M-RoPE) of a sequence with images: Qwen2-VL, arXiv 2409.12191,
section 2.1. Pure; called by trainer ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milescli.core.types import ImageSpan


def rotary_positions(num_tokens: int, spans: Sequence[ImageSpan], *, merge_size: int) -> np.ndarray:
    """Return [3, num_tokens] int64: time, row and column of each token. All three of a text token
    are one more than the largest before it. Those of an image's tokens are its place in the grid of
    tokens, counted from there on. `merge_size` rows and columns of patches are one token."""
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
