"""Quantised folders read as plain ones: names, slices, and every way in which config.json and
tensors contradict each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from milescli.checkpoint.formats import fp4, fp8_block, int4, mxfp8
from milescli.checkpoint.formats.base import Codec
from milescli.checkpoint.hf_folder import HfReader
from milescli.checkpoint.source import QuantisedReader, open_source
from milescli.core.errors import CheckpointError

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32, "strategy": "group"}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": _INT4}},
}
_CHANNEL = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": _CHANNEL}},
}
NORM = torch.ones(7, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Form:
    """A plain weight, and how a folder stores it."""

    config: dict[str, object]
    codec: Codec
    shape: tuple[int, ...]
    store: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    """parts -> tensors by name"""
    plain: str = "a.weight"
    turned: bool = False

    def write(self, folder: Path, **changes: torch.Tensor | None) -> torch.Tensor:
        """Write the folder and return the plain weight that it stands for. `changes`: other
        tensors, None for none."""
        weight = torch.randn(self.shape, generator=torch.Generator().manual_seed(0))
        parts = self.codec.quantise(weight, None)
        tensors: dict[str, torch.Tensor | None] = {
            **self.store(parts),
            "norm.weight": NORM,
            **changes,
        }
        folder.mkdir(exist_ok=True)
        save_file(
            {name: tensor for name, tensor in tensors.items() if tensor is not None},
            folder / "model.safetensors",
        )
        (folder / "config.json").write_text(json.dumps(self.config))
        plain = self.codec.dequantise(parts)[..., : self.shape[-1]]
        return plain.transpose(-1, -2) if self.turned else plain


FORMS = {
    "fp8": Form(
        {"quantization_config": FP8},
        fp8_block.codec(),
        (300, 200),
        lambda parts: {"a.weight": parts["values"], "a.weight_scale_inv": parts["scale"]},
    ),
    "fp8, nested config": Form(
        {"text_config": {"quantization_config": FP8}},
        fp8_block.codec(),
        (130, 7),
        lambda parts: {"a.weight": parts["values"], "a.weight_scale_inv": parts["scale"]},
    ),
    "fp8, stacked": Form(
        {"quantization_config": FP8},
        fp8_block.codec(),
        (3, 130, 140),
        lambda parts: {
            "a.gate_up_proj": parts["values"],
            "a.gate_up_proj_scale_inv": parts["scale"],
        },
        plain="a.gate_up_proj",
    ),
    "fp8, ue8m0 as DeepSeek-V4": Form(
        {"quantization_config": {**FP8, "scale_fmt": "ue8m0"}, "expert_dtype": "fp4"},
        fp8_block.codec(powers=True),
        (140, 260),
        lambda parts: {
            "a.weight": parts["values"],
            "a.scale": parts["scale"].to(torch.float8_e8m0fnu),
        },
    ),
    "fp4 experts of DeepSeek-V4": Form(
        {"quantization_config": {**FP8, "scale_fmt": "ue8m0"}, "expert_dtype": "fp4"},
        fp4.MXFP4,
        (12, 96),
        lambda parts: {
            "a.weight": parts["values"].view(torch.int8),
            "a.scale": parts["scale"].view(torch.float8_e8m0fnu),
        },
    ),
    "fp8 by rows": Form(
        {"quantization_config": CHANNEL},
        fp8_block.codec((1, 0)),
        (9, 20),
        lambda parts: {"a.weight": parts["values"], "a.weight_scale": parts["scale"]},
    ),
    "fp8 whole": Form(
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
        fp8_block.codec((0, 0)),
        (9, 20),
        lambda parts: {
            "a.weight": parts["values"],
            "a.weight_scale": parts["scale"].reshape(()),
            "a.input_scale": torch.ones(()),
        },
    ),
    "mxfp8": Form(
        {"quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]}},
        mxfp8.CODEC,
        (9, 96),
        lambda parts: {"a.weight": parts["values"], "a.weight_scale_inv": parts["scale"]},
    ),
    "int4": Form(
        {"quantization_config": INT4},
        int4.codec(32),
        (9, 96),
        lambda parts: {
            "a.weight_packed": parts["values"],
            "a.weight_scale": parts["scale"],
            "a.weight_shape": torch.tensor([9, 96]),
        },
    ),
    "nvfp4": Form(
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head"],
            }
        },
        fp4.NVFP4,
        (9, 48),
        lambda parts: {
            "a.weight": parts["values"],
            "a.weight_scale": parts["scale"],
            "a.weight_scale_2": parts["global_scale"],
            "a.input_scale": torch.ones(()),
        },
    ),
    "mxfp4 of gpt-oss": Form(
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
        fp4.MXFP4,
        (3, 10, 64),
        lambda parts: {
            "a.gate_up_proj_blocks": parts["values"].unflatten(-1, (-1, 16)),
            "a.gate_up_proj_scales": parts["scale"],
        },
        plain="a.gate_up_proj",
        turned=True,
    ),
}
FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@FORM
def test_a_quantised_folder_reads_as_a_plain_one(form: Form, tmp_path: Path) -> None:
    plain = form.write(tmp_path).to(torch.bfloat16)
    with open_source(tmp_path) as source:
        assert isinstance(source, QuantisedReader)
        assert (
            source.names() == sorted([form.plain, "norm.weight"])
            and form.plain in source
            and "a.weight_scale" not in source
        )
        assert (
            source.shape(form.plain) == tuple(plain.shape)
            and source.dtype(form.plain) == torch.bfloat16
        )
        assert torch.equal(source.read(form.plain), plain)
        assert torch.equal(source.read("norm.weight"), NORM) and source.quantised_names() == [
            form.plain
        ]


@FORM
def test_a_slice_is_what_the_whole_has_there(form: Form, tmp_path: Path) -> None:
    plain = form.write(tmp_path).to(torch.bfloat16)
    with open_source(tmp_path) as source:
        for dim in range(2):
            length = plain.shape[dim]
            for start, end in (
                (0, 1),
                (1, length - 1),
                (length // 2, length),
                (length - 1, length),
                (length // 2, None),
            ):
                wanted = plain[start:end] if dim == 0 else plain[:, start:end]
                assert torch.equal(
                    source.read(form.plain, dim=dim, start=start, end=end), wanted
                ), (dim, start, end)
        assert torch.equal(source.read_row(form.plain, row=2), plain[2])
        inner = tuple((length // 3, length // 3 + 2) for length in plain.shape)
        assert torch.equal(
            source.read_region(form.plain, *inner), plain[tuple(slice(*bounds) for bounds in inner)]
        )


def test_a_slice_reads_only_the_blocks_that_it_touches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FORMS["fp8"].write(tmp_path)
    asked: list[tuple[tuple[int, int], ...]] = []
    plain = HfReader.read_region
    monkeypatch.setattr(
        HfReader,
        "read_region",
        lambda self, name, *ranges: asked.append(ranges) or plain(self, name, *ranges),
    )
    with open_source(tmp_path) as source:
        source.read("a.weight", dim=0, start=130, end=140)
    assert asked == [((130, 140), (0, 200)), ((1, 2), (0, 2))]


def test_a_plain_folder_is_read_as_it_is(tmp_path: Path) -> None:
    save_file({"a.weight": NORM}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with open_source(tmp_path) as source:
        assert isinstance(source, HfReader) and source.dtype("a.weight") == torch.bfloat16


def _refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught, open_source(folder):
        pass
    return caught.value.why


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ("fp8", "a.weight_scale_inv"),
        ("fp8, stacked", "a.gate_up_proj_scale_inv"),
        ("mxfp8", "a.weight_scale_inv"),
        ("int4", "a.weight_scale"),
        ("int4", "a.weight_shape"),
        ("nvfp4", "a.weight_scale_2"),
        ("mxfp4 of gpt-oss", "a.gate_up_proj_scales"),
    ],
)
def test_a_part_that_is_missing_is_named(form: str, part: str, tmp_path: Path) -> None:
    FORMS[form].write(tmp_path, **{part: None})
    assert f"`{part}` is missing" in _refused(tmp_path)


@pytest.mark.parametrize(
    ("form", "part", "instead"),
    [
        ("fp8", "a.weight_scale_inv", torch.ones(2, 2)),
        ("fp8", "a.weight_scale_inv", torch.ones(3, 2, dtype=torch.int32)),
        ("mxfp8", "a.weight_scale_inv", torch.ones(9, 2, dtype=torch.uint8)),
        ("int4", "a.weight_scale", torch.ones(9, 2, dtype=torch.bfloat16)),
        ("int4", "a.weight_shape", torch.tensor([8, 96])),
        ("int4", "a.weight_shape", torch.tensor([9, 196])),
        ("nvfp4", "a.weight_scale", torch.ones(9, 4).to(torch.float8_e4m3fn)),
        ("mxfp4 of gpt-oss", "a.gate_up_proj_scales", torch.ones(3, 10, 1, dtype=torch.uint8)),
    ],
)
def test_a_part_of_another_shape_is_named(
    form: str, part: str, instead: torch.Tensor, tmp_path: Path
) -> None:
    FORMS[form].write(tmp_path, **{part: instead})
    assert f"`{part}`" in _refused(tmp_path)


def test_what_contradicts_the_config_is_named(tmp_path: Path) -> None:
    lonely = {"b.weight_scale_inv": torch.ones(1, 1)}
    FORMS["fp8"].write(tmp_path, **lonely)
    assert "`b.weight_scale_inv` does not belong to any tensor" in _refused(tmp_path)
    FORMS["int4"].write(tmp_path, **{"a.weight_zero_point": torch.ones(1, dtype=torch.int32)})
    assert "`a.weight_zero_point`" in _refused(tmp_path)
    FORMS["int4"].write(tmp_path, **{"b.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)})
    assert "`b.weight` is stored as" in _refused(tmp_path)
    FORMS["fp8"].write(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "`a.weight` is stored as" in _refused(tmp_path)
    save_file({"a.weight": NORM}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    assert "no tensor is" in _refused(tmp_path)


@pytest.mark.parametrize(
    ("quantised", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        (
            {**INT4, "config_groups": {"group_0": {"weights": {**_INT4, "symmetric": False}}}},
            "zero points",
        ),
        (
            {**INT4, "config_groups": {"group_0": {"weights": {**_INT4, "actorder": "group"}}}},
            "actorder",
        ),
        ({**INT4, "config_groups": {"group_0": {"weights": {**_INT4, "num_bits": 8}}}}, "8 bits"),
        ({**INT4, "config_groups": {}}, "config_groups"),
    ],
)
def test_a_quantisation_that_cannot_be_read_is_refused(
    quantised: dict[str, object], says: str, tmp_path: Path
) -> None:
    FORMS["fp8"].write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    with pytest.raises(CheckpointError) as caught:
        open_source(tmp_path)
    assert says in f"{caught.value.what} {caught.value.why}"
