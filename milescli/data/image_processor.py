"""Pictures as a vision-language model sees them: normalised once, so that engine and trainer read
the same bytes, and cut into patches as the model's own image processor does. Only PIL and numpy;
called where prompts are read, and by trainer ranks."""

from __future__ import annotations

import hashlib
import io
import json
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.core.errors import CheckpointError, DataError
from milescli.core.files import read_json
from milescli.core.types import Image
from milescli.models import parse_facts
from milescli.models.base import read_config

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image as Picture

CONFIG_NAME = "preprocessor_config.json"
_WHOLE_NAME = "processor_config.json"
"""File in newer folders; its `image_processor` has the settings."""
MAX_FILE_BYTES = 64 * 2**20
MAX_PIXELS = 64 * 10**6
"""Largest number of pixels of a file before it is resized; a larger picture would only fill the
memory."""
_MAX_ASPECT = 200
"""Ratio of the longest side to the shortest beyond which transformers' processor refuses a picture.
"""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
"""Formats that Pillow reads by itself; for others it starts programs."""
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class ImageProcessor:
    """Reproduces `Qwen2VLImageProcessor` of transformers with its PIL backend, bit for bit."""

    def __init__(self, folder: Path) -> None:
        """Read the settings of a model's folder. Raises CheckpointError for a folder without a
        processor, or with one of another kind."""
        import numpy as np

        settings = _settings(folder, kind="Qwen2VLImageProcessor")
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
        """Normalise a picture: rotated by EXIF, its first frame, RGB, alpha on white. Raises
        DataError for a file that is no picture, or too large."""
        picture = normalised(data)
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

    def _numbers(self, pixels: np.ndarray) -> np.ndarray:
        """Scale [rows, columns, channels] of pixels -> [channels, rows, columns] float32."""
        import numpy as np

        scaled = (pixels.astype(np.float64) * self._scale).astype(np.float32)
        return ((scaled - self._mean) / self._std).transpose(2, 0, 1)

    def patches(self, png: bytes) -> np.ndarray:
        """Return [patches, numbers of a patch] float32 of a file that `read` made."""
        import numpy as np
        from PIL import Image as Pillow

        with Pillow.open(io.BytesIO(png)) as picture:
            rows, columns = self._grid(*picture.size)
            size = (columns * self._patch, rows * self._patch)
            pixels = np.asarray(picture.resize(size, Pillow.Resampling.BICUBIC))
        frame = self._numbers(pixels)
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
        """Return (rows, columns) of patches: a whole number of tokens, within the limits on pixels,
        close to the picture's own proportions."""
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


class SquareProcessor(ImageProcessor):
    """Reproduces `Gemma3ImageProcessor` of transformers with its PIL backend, bit for bit, without
    pan and scan: every picture becomes a square of the same size."""

    def __init__(self, folder: Path) -> None:
        """Read the settings of a model's folder. Raises CheckpointError for a folder without a
        processor, with one of another kind, or with one that is not the model's."""
        import numpy as np

        settings = _settings(folder, kind="Gemma3ImageProcessor")
        vision = parse_facts(read_config(folder)).vision
        assert vision is not None and vision.tower == "siglip", folder
        self._patch, self._merge = vision.patch_shape[2], vision.merge_size
        self._rows = math.isqrt(vision.num_positions)
        self._scale = float(settings.get("rescale_factor", 1 / 255))
        self._mean = np.array(settings.get("image_mean", (0.5, 0.5, 0.5)), np.float32)
        self._std = np.array(settings.get("image_std", (0.5, 0.5, 0.5)), np.float32)
        self._resample = int(settings.get("resample", 2))
        side, sizes = self._rows * self._patch, settings.get("size") or {}
        found = [sizes.get(name, 224) for name in ("height", "width")]
        for name, wanted, value in (
            ("do_pan_and_scan", False, bool(settings.get("do_pan_and_scan"))),
            ("size", [side, side], found),
        ):
            if value != wanted:
                raise CheckpointError(
                    f"the image processor of `{folder}` cannot be used: `{name}` is {value}",
                    why="miles shows a picture of this family once and as a whole, as a square "
                    f"of {side} x {side} pixels, which is the size that the model's tower "
                    "accepts",
                    fix=f"set `{name}` to {json.dumps(wanted)} in {CONFIG_NAME}",
                )

    def patches(self, png: bytes) -> np.ndarray:
        """Return [patches, numbers of a patch] float32 of a file that `read` made."""
        import numpy as np
        from PIL import Image as Pillow

        side = self._rows * self._patch
        with Pillow.open(io.BytesIO(png)) as picture:
            resized = picture.resize((side, side), Pillow.Resampling(self._resample))
        frame = self._numbers(np.asarray(resized))
        cut = frame.reshape(len(frame), self._rows, self._patch, self._rows, self._patch)
        return np.ascontiguousarray(cut.transpose(1, 3, 0, 2, 4).reshape(self._rows**2, -1))

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        return self._rows, self._rows


def load_processor(folder: Path) -> ImageProcessor:
    """Return the processor of a model that sees images. Raises CheckpointError as its class."""
    vision = parse_facts(read_config(folder)).vision
    is_square = vision is not None and vision.tower == "siglip"
    return SquareProcessor(folder) if is_square else ImageProcessor(folder)


def normalised(data: bytes) -> Picture:
    """Return a picture rotated by EXIF, its first frame, RGB, alpha on white. Raises DataError if
    `data` is not a picture, or too large."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    if len(data) > MAX_FILE_BYTES:
        raise _too_large(f"{len(data)} bytes", f"{MAX_FILE_BYTES} bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Pillow.DecompressionBombWarning)
            file = Pillow.open(io.BytesIO(data), formats=_FORMATS)
        with file:
            _require_size(*file.size)
            return _in_rgb(ImageOps.exif_transpose(file))
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning):
        raise _too_large("far too many pixels", f"{MAX_PIXELS} pixels") from None
    except DataError:
        raise
    except (OSError, ValueError, SyntaxError) as error:
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, Pillow.UnidentifiedImageError):
            what = f"its {len(data)} bytes are not one of {', '.join(_FORMATS)}"
        raise DataError(
            "an image file cannot be read",
            why=what,
            fix="remove its row, or save the picture as PNG or JPEG",
        ) from error


def _require_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise _too_large(f"{width} x {height} pixels", f"{MAX_PIXELS} pixels")
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise DataError(
            f"a picture of {width} x {height} pixels is too long",
            why=f"models of this kind accept at most {_MAX_ASPECT} to 1",
            fix="cut the picture into parts, or remove its row",
        )


def _in_rgb(picture: Picture) -> Picture:
    import numpy as np
    from PIL import Image as Pillow

    if picture.mode.startswith("I;16"):  # Pillow would cut what is above 255
        return Pillow.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode in ("I", "F"):
        raise DataError(
            "a picture has 32 bits per pixel",
            why="the file does not say which numbers are black and white",
            fix="save it with 8 or 16 bits",
        )
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        ground = Pillow.new("RGBA", picture.size, "white")
        picture = Pillow.alpha_composite(ground, picture)
    return picture.convert("RGB")


def _too_large(size: str, bound: str) -> DataError:
    return DataError(
        f"a picture of {size} is too large",
        why=f"the limit is {bound}; a model sees far fewer pixels",
        fix="make the picture smaller, or remove its row",
    )


def _settings(folder: Path, *, kind: str) -> dict:
    path = folder / CONFIG_NAME
    whole = not path.is_file() and (folder / _WHOLE_NAME).is_file()
    path = folder / _WHOLE_NAME if whole else path
    try:
        settings = read_json(path)
        settings = settings["image_processor"] if whole else settings
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise CheckpointError(
            f"`{folder}` has no image processor",
            why=f"{path.name}: {error}",
            fix="download the model again: a vision-language model needs this file",
        ) from error
    found = str(settings.get("image_processor_type", ""))
    if not found.startswith(kind):
        raise CheckpointError(
            f"the image processor `{found}` of `{folder}` is not supported",
            why=f"miles only implements {kind} for this family",
            fix="download the model again, or use one of Gemma 3, Qwen2.5-VL or Qwen3-VL",
        )
    return settings
