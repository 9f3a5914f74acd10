"""Pictures as a vision-language model sees them: made alike once, so that engine and trainer read
the same bytes, and cut into patches as the model's own image processor does. PIL and numpy alone;
called where prompts are read, and by trainer ranks."""

from __future__ import annotations

import hashlib
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.core.errors import CheckpointError, DataError
from milescli.core.types import Image

if TYPE_CHECKING:
    import numpy as np

CONFIG_NAME = "preprocessor_config.json"
MAX_FILE_BYTES = 64 * 2**20
MAX_PIXELS = 64 * 10**6
"""Of a file before it is resized; a larger one is no picture of a prompt, but fills the memory."""
_MAX_ASPECT = 200
"""Longest side by shortest, beyond which transformers' processor refuses a picture."""
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class ImageProcessor:
    """Does what `Qwen2VLImageProcessor` of transformers does with its PIL backend, bit for bit."""

    def __init__(self, folder: Path) -> None:
        """Read the settings of a model's folder. Raises CheckpointError for a folder without a
        processor, or with one of another kind."""
        import numpy as np

        settings = _read(folder / CONFIG_NAME)
        sizes = settings.get("size") or {}
        self._patch = int(settings.get("patch_size", 14))
        self._frames = int(settings.get("temporal_patch_size", 2))
        self._merge = int(settings.get("merge_size", 2))
        self._least = int(settings.get("min_pixels") or sizes.get("shortest_edge") or 56 * 56)
        self._most = int(settings.get("max_pixels") or sizes.get("longest_edge") or 28**2 * 1280)
        self._scale = float(settings.get("rescale_factor", 1 / 255))
        self._mean = np.array(settings.get("image_mean", _CLIP_MEAN), np.float32)
        self._std = np.array(settings.get("image_std", _CLIP_STD), np.float32)

    def read(self, data: bytes) -> Image:
        """Make a picture alike: turned by EXIF, its first frame, RGB, alpha on white. Raises
        DataError for a file that is no picture, or too large."""
        picture = _normalised(data)
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG")
        png = buffer.getvalue()
        rows, columns = self._grid(*picture.size)
        return Image(
            sha256=hashlib.sha256(png).hexdigest(),
            png=png,
            width=picture.width,
            height=picture.height,
            grid=(1, rows, columns),
            num_tokens=rows * columns // self._merge**2,
        )

    def patches(self, png: bytes) -> np.ndarray:
        """Return [patches, numbers of a patch] float32 of a file that `read` has made."""
        import numpy as np
        from PIL import Image as Pillow

        with Pillow.open(io.BytesIO(png)) as picture:
            rows, columns = self._grid(*picture.size)
            size = (columns * self._patch, rows * self._patch)
            pixels = np.asarray(picture.resize(size, Pillow.Resampling.BICUBIC))
        scaled = (pixels.astype(np.float64) * self._scale).astype(np.float32)
        frame = ((scaled - self._mean) / self._std).transpose(2, 0, 1)
        video = np.broadcast_to(frame, (self._frames, *frame.shape)).reshape(
            self._frames,
            len(frame),
            rows // self._merge,
            self._merge,
            self._patch,
            columns // self._merge,
            self._merge,
            self._patch,
        )
        # rows and columns of tokens, those of patches within one; then what a patch is made of
        return np.ascontiguousarray(
            video.transpose(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)
        )

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches: whole tokens, between the least and the most pixels, in
        about the picture's own proportions."""
        if max(width, height) > _MAX_ASPECT * min(width, height):
            raise DataError(
                f"a picture of {width} x {height} pixels is too long",
                why=f"models of this kind see no more than {_MAX_ASPECT} to 1",
                fix="cut it into parts, or leave its row out",
            )
        unit = self._patch * self._merge
        rows, columns = (round(side / unit) * unit for side in (height, width))
        if rows * columns > self._most:
            shrink = math.sqrt(height * width / self._most)
            rows, columns = (
                max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width)
            )
        elif rows * columns < self._least:
            grow = math.sqrt(self._least / (height * width))
            rows, columns = (math.ceil(side * grow / unit) * unit for side in (height, width))
        return rows // self._patch, columns // self._patch


def _normalised(data: bytes):
    from PIL import Image as Pillow
    from PIL import ImageOps

    if len(data) > MAX_FILE_BYTES:
        raise _too_large(f"{len(data)} bytes", f"{MAX_FILE_BYTES} bytes")
    try:
        with Pillow.open(io.BytesIO(data)) as file:
            if file.width * file.height > MAX_PIXELS:
                raise _too_large(f"{file.width} x {file.height} pixels", f"{MAX_PIXELS} pixels")
            picture = ImageOps.exif_transpose(file)
            if picture.has_transparency_data:
                picture = picture.convert("RGBA")
                ground = Pillow.new("RGBA", picture.size, "white")
                picture = Pillow.alpha_composite(ground, picture)
            return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        raise DataError(
            "a file is no picture that can be read",
            why=f"{type(error).__name__}: {error}",
            fix="leave its row out, or write the picture again as PNG or JPEG",
        ) from error


def _too_large(size: str, bound: str) -> DataError:
    return DataError(
        f"a picture of {size} is too large",
        why=f"the bound is {bound}; a model sees far less of it",
        fix="make it smaller, or leave its row out",
    )


def _read(path: Path) -> dict:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"`{path.parent}` has no image processor",
            why=f"{path.name}: {error}",
            fix="fetch the model again: a vision-language model needs this file",
        ) from error
    kind = str(settings.get("image_processor_type", ""))
    if not kind.startswith("Qwen2VLImageProcessor"):
        raise CheckpointError(
            f"the image processor `{kind}` of `{path.parent}` is not known",
            why="miles cuts pictures as Qwen2VLImageProcessor does",
            fix="use a model of the Qwen2.5-VL or Qwen3-VL families",
        )
    return settings
