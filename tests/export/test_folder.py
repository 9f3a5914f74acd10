"""Exported folders: every format and several families, read back; what is copied, carried over and
told; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from milescli.checkpoint import hf_folder
from milescli.checkpoint.formats import fp4, fp8_block, int4, mxfp8
from milescli.checkpoint.source import QuantisedReader, open_source
from milescli.checkpoint.weight_files import INDEX_NAME
from milescli.core.errors import CheckpointError, MachineError
from milescli.export import folder as exporting
from milescli.export.folder import WrittenFolder, atomic_folder, write_folder
from tests.export.models import (
    DEEPSEEK_V3,
    GPT_OSS,
    QWEN3,
    QWEN3_MOE,
    make_base,
    reader_of,
    table_of,
    trained,
    weights_of,
)

CODECS = {
    "fp8": fp8_block.codec(),
    "mxfp8": mxfp8.CODEC,
    "int4": int4.codec(32),
    "nvfp4": fp4.NVFP4,
    "mxfp4": fp4.MXFP4,
}
MODELS = {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK_V3, "gpt_oss": GPT_OSS}


def export(
    tmp_path: Path,
    config: dict,
    format: str,
    *,
    base: Path | None = None,
    weights: dict | None = None,
) -> WrittenFolder:
    """Export other weights than the base's, with a card that says nothing."""
    folder = base or tmp_path / "base"
    held = weights or trained(make_base(folder, config))
    return write_folder(
        tmp_path / "out",
        table=table_of(config),
        read=reader_of(held),
        base=folder,
        format=format,
        card=lambda done: {"README.md": "card"},
    )


def test_a_trained_mtp_layer_is_written_with_the_ends_of_the_model(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", DEEPSEEK_V3)
    weights, lines = trained(base), table_of(DEEPSEEK_V3)
    copies = {name for entry in lines.entries if entry.rule.optional for name in entry.hf}
    assert {name.rpartition("layers.")[2].partition(".")[2] for name in copies} == {
        "embed_tokens.weight",
        "shared_head.head.weight",
    }

    def read(table):
        yield from ((name, weights[name]) for name in table.hf_shapes() if name not in copies)

    done = write_folder(
        tmp_path / "out",
        table=lines,
        read=read,
        base=tmp_path / "base",
        format="bf16",
        card=lambda done: {"README.md": "card"},
    )
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert not done.copied
    for name, tensor in written.items():
        end = "lm_head.weight" if "head.head" in name else "model.embed_tokens.weight"
        assert torch.equal(tensor, weights[end if name in copies else name]), name


@pytest.mark.parametrize("format", ["fp8", "mxfp8", "int4", "nvfp4"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_a_quantised_folder_reads_back_as_its_weights(
    tmp_path: Path, name: str, format: str
) -> None:
    base = make_base(tmp_path / "base", MODELS[name])
    weights = trained(base)
    done = export(tmp_path, MODELS[name], format, base=tmp_path / "base", weights=weights)
    mtp = {
        hf for entry in table_of(MODELS[name]).entries if entry.mtp is not None for hf in entry.hf
    }
    with open_source(tmp_path / "out") as source:
        assert isinstance(source, QuantisedReader) and set(source.names()) == set(weights)
        assert done.measured.num_quantised == len(source.quantised_names()) > 0
        for plain in source.names():
            wanted = base[plain] if plain in mtp else weights[plain]
            if plain not in source.quantised_names():
                assert source.read(plain).dtype == wanted.dtype and torch.equal(
                    source.read(plain), wanted
                ), plain
                continue
            parts = source.parts(plain)
            stored = CODECS[format].dequantise(parts)[:, : wanted.shape[1]]
            difference = (stored - wanted.float()).abs()
            assert bool((difference <= CODECS[format].bound(wanted, parts)).all()), plain
    assert (
        0.01 < done.measured.relative_error < 0.15 and 0.5 < done.measured.worst_share_of_bound <= 1
    )


def test_gpt_oss_goes_back_to_mxfp4(tmp_path: Path) -> None:
    weights = trained(make_base(tmp_path / "base", GPT_OSS))
    export(tmp_path, GPT_OSS, "mxfp4", base=tmp_path / "base", weights=weights)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape == (3, 64, 2, 16)
    assert tensors["model.layers.0.mlp.experts.gate_up_proj_scales"].shape == (3, 64, 2)
    name = "model.layers.1.mlp.experts.down_proj"
    with open_source(tmp_path / "out") as source:
        assert source.shape(name) == tuple(weights[name].shape)
        parts = CODECS["mxfp4"].quantise(weights[name].transpose(1, 2), None)
        assert torch.equal(
            source.read(name), CODECS["mxfp4"].dequantise(parts).transpose(1, 2).to(torch.bfloat16)
        )


@pytest.mark.parametrize(
    ("format", "dtype"),
    [("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)],
)
def test_plain_folders_hold_the_weights_to_the_bit(
    tmp_path: Path, format: str, dtype: torch.dtype
) -> None:
    weights = trained(make_base(tmp_path / "base", DEEPSEEK_V3))
    done = export(tmp_path, DEEPSEEK_V3, format, base=tmp_path / "base", weights=weights)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert tensors[bias].dtype == torch.float32 and torch.equal(tensors[bias], weights[bias]), (
        "rounding it would change choices"
    )
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert torch.equal(tensors[name], weights[name].to(dtype))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        config["torch_dtype"] == {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}[format]
    )
    assert "quantization_config" not in config and done.measured.num_quantised == 0


def test_what_was_not_trained_is_copied_and_told_of(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", DEEPSEEK_V3)
    done = export(tmp_path, DEEPSEEK_V3, "bf16", base=tmp_path / "base", weights=trained(base))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(
        tensors["model.layers.2.eh_proj.weight"], base["model.layers.2.eh_proj.weight"]
    )
    assert done.copied == (
        "multi-token-prediction layers "
        f"({sum(name.startswith('model.layers.2.') for name in base)} tensors)",
    )


def test_towers_pass_through_untouched(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_5_moe",
        "vision_config": {"depth": 1},
        "text_config": {
            **QWEN3_MOE,
            "model_type": "qwen3_5_moe_text",
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "partial_rotary_factor": 0.25,
            "mlp_only_layers": [],
        },
    }
    tower = {
        "model.visual.blocks.0.attn.qkv.weight": torch.randn(6, 4),
        "model.visual.norm.weight": torch.ones(4),
    }
    weights = trained(make_base(tmp_path / "base", config, extra=tower))
    table = table_of(config)
    single = {name: 0.08 * torch.randn(shape) for name, shape in _single(table).hf_shapes().items()}
    done = export(tmp_path, config, "fp8", base=tmp_path / "base", weights={**single, **weights})
    with open_source(tmp_path / "out") as source:
        assert all(torch.equal(source.read(name), tensor) for name, tensor in tower.items())
        assert (
            "model.language_model.layers.0.mlp.experts.2.down_proj.weight"
            in source.quantised_names()
        ), "experts are single"
        assert (
            "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
            in source.quantised_names()
        )
        assert (
            "model.language_model.layers.0.linear_attn.in_proj_a.weight"
            not in source.quantised_names()
        )
    quantised = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.visual" in quantised["modules_to_not_convert"]
    assert done.copied == ("visual (2 tensors)",)


def _single(lines):
    from milescli.models.precision import with_single_experts

    return with_single_experts(lines)


def test_everything_but_weights_is_carried_over(tmp_path: Path) -> None:
    make_base(tmp_path / "base", QWEN3)
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ x }}")
    (tmp_path / "base" / "pytorch_model.bin").write_bytes(b"pickle")
    (tmp_path / "base" / "hf_quant_config.json").write_text("{}")
    weights = trained(load_file(tmp_path / "base" / "model.safetensors"))
    export(tmp_path, QWEN3, "int4", base=tmp_path / "base", weights=weights)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert (tmp_path / "out" / "README.md").read_text() == "card"


def test_a_base_that_is_quantised_itself_becomes_plain(tmp_path: Path) -> None:
    first = export(tmp_path, QWEN3, "fp8").path
    weights = trained(load_file(tmp_path / "base" / "model.safetensors"))
    (tmp_path / "base").rename(tmp_path / "plain")
    first.rename(tmp_path / "base")
    done = export(tmp_path, QWEN3, "bf16", base=tmp_path / "base", weights=weights)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert any("stored as fp8" in note for note in done.notes)
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"],
        weights["model.norm.weight"],
    )


def test_scales_of_deepseek_v32_stay_powers_of_two(tmp_path: Path) -> None:
    make_base(tmp_path / "base", QWEN3)
    plain = load_file(tmp_path / "base" / "model.safetensors")
    quantised = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    name = "model.layers.0.self_attn.o_proj.weight"
    parts = fp8_block.codec(powers=True).quantise(plain[name], None)
    save_file(
        {**plain, name: parts["values"], name + "_scale_inv": parts["scale"]},
        tmp_path / "base" / "model.safetensors",
    )
    (tmp_path / "base" / "config.json").write_text(
        json.dumps({**QWEN3, "quantization_config": quantised})
    )
    export(tmp_path, QWEN3, "fp8", base=tmp_path / "base", weights=trained(plain))
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
            "scale_fmt"
        ]
        == "ue8m0"
    )
    scale = load_file(tmp_path / "out" / "model.safetensors")[
        "model.layers.1.mlp.down_proj.weight_scale_inv"
    ]
    assert bool((torch.frexp(scale)[0] == 0.5).all())


@pytest.mark.parametrize("format", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_what_the_disk_spoils_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, name: str
) -> None:
    def spoil(part: Path, job: object, **options: object) -> int:
        size = plain(part, job, **options)
        tensors = load_file(part / "model.safetensors")
        on_disk = next(
            key for key in (name, name.replace(".weight", ".weight_packed")) if key in tensors
        )
        flat = tensors[on_disk].view(torch.uint8).reshape(-1)
        flat[len(flat) // 2] ^= 0x48
        save_file(tensors, part / "model.safetensors")
        return size

    plain = exporting._write
    monkeypatch.setattr(exporting, "_write", spoil)
    with pytest.raises(CheckpointError) as caught:
        export(tmp_path, QWEN3, format)
    assert name in caught.value.what
    assert {path.name for path in tmp_path.iterdir()} == {"base"}


def test_a_scale_that_is_off_by_little_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(part: Path, job: object, **options: object) -> int:
        size = plain(part, job, **options)
        tensors = load_file(part / "model.safetensors")
        tensors["model.layers.0.mlp.down_proj.weight_scale_inv"] *= 1.02
        save_file(tensors, part / "model.safetensors")
        return size

    plain = exporting._write
    monkeypatch.setattr(exporting, "_write", spoil)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj") as caught:
        export(tmp_path, QWEN3, "fp8")
    assert "times what its rounding allows" in caught.value.why


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, wrong: float) -> None:
    weights = trained(make_base(tmp_path / "base", QWEN3))
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = wrong
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        export(tmp_path, QWEN3, "fp8", base=tmp_path / "base", weights=weights)
    assert not (tmp_path / "out").exists()


def test_numbers_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    weights = trained(make_base(tmp_path / "base", QWEN3))
    weights["model.norm.weight"][0] = 1e6
    with pytest.raises(CheckpointError, match=r"model\.norm"):
        export(tmp_path, QWEN3, "fp16", base=tmp_path / "base", weights=weights)


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("to", [".", "there"])
def test_an_empty_folder_stays_and_is_filled(
    to: str, is_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "there").symlink_to(target) if is_link else target.rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there" if to == "." else tmp_path)
    place = Path(to).stat().st_ino
    with pytest.raises(KeyboardInterrupt), atomic_folder(Path(to)) as part:
        (part / "config.json").write_text("{}")
        raise KeyboardInterrupt
    assert not [*Path(to).iterdir()]
    with atomic_folder(Path(to)) as part:
        for name in ("config.json", "a.safetensors"):
            (part / name).write_text(name)
    assert sorted(one.name for one in Path(to).iterdir()) == ["a.safetensors", "config.json"]
    assert Path(to).stat().st_ino == place, "a disk may be mounted there"
    assert (tmp_path / "there").is_symlink() == is_link


@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_killed_export_left_is_removed_and_that_of_another_is_not(
    is_there: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if is_there:
        out.mkdir()
    left = out / ".part-1" if is_there else tmp_path / ".out.part-1"
    left.mkdir()
    with pytest.raises(CheckpointError, match="already exists"), atomic_folder(out) as part:
        assert not left.exists()
        (part / "config.json").write_text("first")
        with atomic_folder(out) as other:
            assert part.exists(), "it is being written"
            (other / "config.json").write_text("second")
    assert [one.relative_to(tmp_path) for one in tmp_path.rglob("*")] == [
        Path("out"),
        Path("out/config.json"),
    ]
    assert (out / "config.json").read_text() == "second"


def test_a_target_that_is_used_and_a_disk_that_is_small_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="already exists"):
        export(tmp_path, QWEN3, "bf16")
    (tmp_path / "out" / "mine").rename(tmp_path / "out" / "lost+found")
    with atomic_folder(tmp_path / "out") as part:  # as an empty disk has it
        (part / "config.json").touch()
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(10, 9, 1)
    )
    with pytest.raises(CheckpointError, match="too small"):
        export(tmp_path, QWEN3, "bf16", base=tmp_path / "base")
    assert {path.name for path in tmp_path.iterdir()} == {"base"}


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(MachineError, match="/proc/exported cannot be created"),
        atomic_folder(Path("/proc/exported")),
    ):
        pass


def test_a_full_disk_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_tensors", full)
    with pytest.raises(CheckpointError, match="is full"):
        export(tmp_path, QWEN3, "bf16")
    assert not (tmp_path / "out").exists()


def test_shards_are_read_back_too(tmp_path: Path) -> None:
    weights = trained(make_base(tmp_path / "base", QWEN3))
    write_folder(
        tmp_path / "out",
        table=table_of(QWEN3),
        read=reader_of(weights),
        base=tmp_path / "base",
        format="nvfp4",
        card=lambda done: {},
        max_shard_bytes=20_000,
    )
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "W4A16_NVFP4" and "lm_head" in config["ignore"]
    with open_source(tmp_path / "out") as source:
        gate, up = (
            source.parts(f"model.layers.0.mlp.{name}_proj.weight") for name in ("gate", "up")
        )
        assert torch.equal(gate["global_scale"], up["global_scale"]), (
            "engines hold them in one tensor with one scale"
        )


@pytest.mark.parametrize(
    ("config", "format"),
    [
        *((DEEPSEEK_V3, form) for form in ("bf16", "fp8", "mxfp8", "int4", "nvfp4")),
        (QWEN3_MOE, "nvfp4"),
        (GPT_OSS, "mxfp4"),
    ],
)
def test_files_that_are_taken_away_one_by_one_are_the_same_model(
    tmp_path: Path, config: dict, format: str
) -> None:
    base = tmp_path / "base"
    held = trained(make_base(base, config))
    taken, told = tmp_path / "taken", []
    taken.mkdir()

    def deliver(file: Path, name: str, progress) -> None:  # type: ignore[no-untyped-def]
        assert [one.name for one in file.parent.iterdir() if one.suffix != ".json"] == [file.name]
        assert not list(file.parents[1].glob("*.part")), "one file is there at a time"
        shutil.copyfile(file, taken / name)
        told.append(name)

    def write(out: Path, **more: object) -> WrittenFolder:
        return write_folder(
            out,
            table=table_of(config),
            read=reader_of(held),
            base=base,
            format=format,
            card=lambda done: {"README.md": "card"},
            max_shard_bytes=20_000,
            **more,
        )

    whole, streamed = write(tmp_path / "whole"), write(tmp_path / "rest", deliver=deliver)
    assert len(told) > 3 and told == sorted(set(told))
    assert asdict(streamed.measured) == pytest.approx(asdict(whole.measured))
    assert replace(streamed, path=whole.path, measured=whole.measured) == whole
    assert not list((tmp_path / "rest").glob("*.safetensors"))
    for file in (tmp_path / "rest").iterdir():
        shutil.copyfile(file, taken / file.name)
    with open_source(tmp_path / "whole") as one, open_source(taken) as other:
        assert one.names() == other.names()
    ours, theirs = (weights_of(place) for place in (tmp_path / "whole", taken))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_single_file_has_the_plain_name_and_a_wrong_one_is_not_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, told = tmp_path / "base", []
    held = trained(make_base(base, QWEN3))
    common = {
        "table": table_of(QWEN3),
        "read": reader_of(held),
        "base": base,
        "format": "bf16",
        "card": lambda done: {},
        "deliver": lambda file, name, progress: told.append(name),
    }
    write_folder(tmp_path / "one", **common)
    assert told == ["model.safetensors"] and not (tmp_path / "one" / INDEX_NAME).exists()
    save = hf_folder.save_file

    def spoiled(tensors, file, metadata):  # type: ignore[no-untyped-def]
        save({name: tensor + 1 for name, tensor in tensors.items()}, file, metadata=metadata)

    monkeypatch.setattr(hf_folder, "save_file", spoiled)
    told.clear()
    with pytest.raises(CheckpointError, match="was exported incorrectly"):
        write_folder(tmp_path / "two", **common)
    assert not told and not (tmp_path / "two").exists()
