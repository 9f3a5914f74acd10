"""The mapping of a preview, in few lines."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from milescli.conversion.report import merge_numbered_lines, preview
from milescli.conversion.to_hf import ToHf
from milescli.conversion.to_megatron import ToMegatron
from tests.conversion.making import make, nothing_but, quiet, to_megatron


def test_lines_that_differ_in_numbers_alone_are_one() -> None:
    pairs = [
        (f"model.layers.{layer}.a.weight", f"decoder.layers.{layer}.a", "2x2")
        for layer in range(12)
    ]
    assert merge_numbered_lines([*pairs, ("b", "c", "1")]) == [
        ("model.layers.*.a.weight", "decoder.layers.*.a", "2x2", 12),
        ("b", "c", "1", 1),
    ]


def test_a_preview_shows_mapping_room_and_time_and_leaves_nothing(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", "qwen3-moe")
    direction = ToMegatron(source=str(source))
    shown = preview(direction, tmp_path / "megatron", output=quiet())
    counts = {(left, right): count for left, right, _, count in shown.mapping}
    experts = (
        "model.layers.*.mlp.experts.*.gate_proj.weight",
        "decoder.layers.*.mlp.experts.experts.linear_fc1.weight",
    )
    assert counts[experts] == 2 * 6  # layers x experts
    assert sum(counts.values()) == len(load_file(source / "model.safetensors"))
    nothing_but(tmp_path, "hf")
    to_megatron(source, tmp_path / "megatron", file_bytes=direction.file_bytes)
    written = (tmp_path / "megatron" / "release" / "__0_0.distcp").stat().st_size
    assert shown.size_bytes == written and shown.seconds > 0 and shown.disk_bytes_per_s > 0


def test_the_way_back_is_previewed_too(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", "qwen3-moe")
    to_megatron(source, tmp_path / "megatron")
    direction = ToHf(source=str(tmp_path / "megatron"))
    shown = preview(direction, tmp_path / "back", output=quiet())
    assert shown.size_bytes == (source / "model.safetensors").stat().st_size
    nothing_but(tmp_path, "hf", "megatron")
