"""Pictures are made alike, and cut as transformers cuts them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from milescli.core.errors import CheckpointError, DataError
from milescli.data import image_processor
from milescli.data.image_processor import ImageProcessor

QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 4096, "longest_edge": 65536},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
QWEN2_5 = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "min_pixels": 3136,
    "max_pixels": 50176,
}


def processor(folder: Path, config: dict) -> ImageProcessor:
    """Of a folder with these settings."""
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return ImageProcessor(folder)


def picture(width: int, height: int, *, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Noise."""
    channels = len(mode) if mode in ("RGB", "RGBA", "LA") else 1
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(noise.squeeze(-1) if channels == 1 else noise, mode)


def written(image: Image.Image, *, form: str = "PNG", **options: object) -> bytes:
    """A file of it."""
    buffer = io.BytesIO()
    image.save(buffer, format=form, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("config", [QWEN3, QWEN2_5])
@settings(max_examples=25, deadline=None)
@given(width=st.integers(1, 700), height=st.integers(1, 700))
def test_patches_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, config: dict, width: int, height: int
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    ours = processor(tmp_path_factory.mktemp("model"), config)
    if max(width, height) > 200 * min(width, height):
        width = height
    image = ours.read(written(picture(width, height)))
    given_too = {key: value for key, value in config.items() if key != "image_processor_type"}
    theirs = Qwen2VLImageProcessorPil(**json.loads(json.dumps(given_too)))
    made = theirs(Image.open(io.BytesIO(image.png)), return_tensors="np")
    np.testing.assert_array_equal(ours.patches(image.png), made["pixel_values"])
    assert [list(image.grid)] == made["image_grid_thw"].tolist()
    assert image.num_tokens == image.grid[1] * image.grid[2] // 4


def test_equal_pictures_are_one_whatever_they_were_written_as(tmp_path: Path) -> None:
    ours, plain = processor(tmp_path, QWEN3), picture(40, 30)
    first = ours.read(written(plain))
    assert first.sha256 == ours.read(written(plain, form="BMP")).sha256
    assert first.sha256 == ours.read(written(plain, form="TIFF")).sha256
    assert first.sha256 != ours.read(written(picture(40, 30, seed=1))).sha256
    assert (first.width, first.height) == (40, 30)


def test_a_picture_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = processor(tmp_path, QWEN3).read(written(picture(40, 30), form="TIFF", exif=exif))
    assert (turned.width, turned.height) == (30, 40)


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    hidden = picture(20, 20, mode="RGBA")
    hidden.putalpha(0)
    image = processor(tmp_path, QWEN3).read(written(hidden))
    assert np.asarray(Image.open(io.BytesIO(image.png))).min() == 255


def test_of_an_animation_the_first_frame_is_seen(tmp_path: Path) -> None:
    ours, still = processor(tmp_path, QWEN3), Image.new("RGB", (20, 20), "red")
    later = [Image.new("RGB", (20, 20), "blue")]
    moving = written(still, form="GIF", save_all=True, append_images=later)
    assert ours.read(moving).sha256 == ours.read(written(still)).sha256


@pytest.mark.parametrize("mode", ["L", "1", "LA", "I;16", "CMYK", "P"])
def test_every_kind_of_pixels_becomes_rgb(tmp_path: Path, mode: str) -> None:
    made = Image.new("I;16", (20, 20), 900) if mode == "I;16" else picture(20, 20).convert(mode)
    image = processor(tmp_path, QWEN3).read(written(made, form="TIFF"))
    assert processor(tmp_path, QWEN3).patches(image.png).shape == (16, 3 * 2 * 16 * 16)


def test_sixteen_bits_of_a_pixel_become_eight(tmp_path: Path) -> None:
    deep = Image.fromarray(np.array([[0, 900], [32768, 65535]], np.uint16))
    image = processor(tmp_path, QWEN3).read(written(deep))
    with Image.open(io.BytesIO(image.png)) as seen:
        assert np.asarray(seen)[..., 0].tolist() == [[0, 3], [128, 255]]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "cannot be read"),
        (b"GIF89a, says the file", "cannot be read"),
        (written(picture(64, 64))[:900], "cannot be read"),
        (written(Image.new("1", (5000, 20))), "too long"),
        (written(Image.new("1", (9000, 9000))), "too large"),
        (written(Image.new("F", (20, 20)), form="TIFF"), "32 bits per pixel"),
        (written(picture(20, 20), form="EPS"), "cannot be read"),
    ],
)
def test_files_that_no_model_sees_are_refused(tmp_path: Path, data: bytes, what: str) -> None:
    with pytest.raises(DataError, match=what):
        processor(tmp_path, QWEN3).read(data)


def test_a_file_that_is_too_large_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_processor, "MAX_FILE_BYTES", 10)
    with pytest.raises(DataError, match="too large"):
        processor(tmp_path, QWEN3).read(written(picture(20, 20)))


def test_a_folder_without_a_processor_of_this_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no image processor"):
        ImageProcessor(tmp_path)
    with pytest.raises(CheckpointError, match="SiglipImageProcessor"):
        processor(tmp_path, {"image_processor_type": "SiglipImageProcessor"})
