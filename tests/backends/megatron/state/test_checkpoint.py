"""Saving, resuming bit for bit, resuming under another layout, exporting: with real ranks and real
files."""

from __future__ import annotations

import hashlib
import math
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from milescli.backends.megatron.state.checkpoint import boxes, pieces
from milescli.checkpoint.torch_dist.metadata import read_metadata
from milescli.core.errors import CheckpointError
from tests.backends.megatron.conftest import Worlds
from tests.conversion.making import to_hf


@pytest.mark.parametrize("model", ["dense", "moe", "muon"])
def test_six_steps_equal_three_and_three_in_a_new_process_bit_for_bit(
    worlds: Worlds, model: str
) -> None:
    whole = worlds.get("one")[f"{model} six"]
    rest = worlds.get("again")[f"{model} rest"]
    assert rest["checksums"] == whole["checksums"]
    assert [report.loss for report in rest["reports"]] == [
        report.loss for report in whole["reports"][3:]
    ]


@pytest.mark.parametrize(
    "name", ["dense tp2 rest", "dense pp2 rest", "dense dp2 rest", "moe ep2 rest"]
)
def test_a_checkpoint_of_one_rank_goes_on_under_another_layout(worlds: Worlds, name: str) -> None:
    whole = worlds.get("one")[f"{name.split()[0]} six"]["reports"][3]
    rest = worlds.get("two")[name]["reports"][0]
    assert rest.loss == pytest.approx(whole.loss, abs=2e-6)
    assert rest.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)


def test_a_float32_checkpoint_goes_on_in_bfloat16(worlds: Worlds) -> None:
    whole = worlds.get("one")["dense six"]["reports"][3]
    rest = worlds.get("again")["dense bf16"]["reports"][0]
    assert rest.loss == pytest.approx(whole.loss, abs=2e-2)
    assert rest.grad_norm == pytest.approx(whole.grad_norm, rel=5e-2)


def test_where_one_rank_cannot_write_all_ranks_say_so_and_the_next_save_works(
    worlds: Worlds,
) -> None:
    result = worlds.get("two")["saves fail"]
    first, second = result["told"]
    assert first.startswith("trainer rank 1: OSError") and "File too large" in first
    assert second.startswith("trainer rank 0: OSError")
    folder = Path(worlds.checkpoint("saves-fail")) / "whole"
    assert result["is_whole"] and set(result["sha256"]) == {"__0_0.distcp", "__1_0.distcp"}
    for name, sha256 in result["sha256"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256


def test_what_would_change_the_state_waits_for_the_save_that_reads_it(worlds: Worlds) -> None:
    told = worlds.get("two")["changes wait"]
    assert told["waits"] == {
        "an update": (True, True),
        "the reference in its place": (False, True),  # the weights stay where they are
        "a copy put back": (True, True),
        "silent layers": (True, True),
    }
    assert told["is_counted_apart"]


def test_ranks_save_and_load_their_own_pieces_with_no_second_copy(worlds: Worlds) -> None:
    ranks = worlds.get("two")["memory of a save"]
    for rank in ranks:
        assert max(rank["save"], rank["load"]) < rank["state"] / 4, ranks
    assert ranks[0]["file"] == pytest.approx(ranks[1]["file"], rel=0.01)


def test_the_correction_of_the_router_is_saved_and_never_trained(worlds: Worlds) -> None:
    first, trained = (worlds.get("one")[name]["checksums"] for name in ("glm", "glm three"))
    unchanged = {name for name in first if first[name] == trained[name]}
    assert unchanged == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)
    }
    assert worlds.get("two")["glm pp2 rest"]["checksums"] == trained


def test_a_checkpoint_of_mamba_layers_is_the_same_model_under_tensor_parallelism(
    worlds: Worlds,
) -> None:
    assert (
        worlds.get("two")["nemotron tp2 rest"]["checksums"]
        == worlds.get("one")["nemotron three"]["checksums"]
    )


def test_indexers_are_saved_and_never_trained(worlds: Worlds, models: dict[str, str]) -> None:
    trained, untouched = (
        worlds.get("one")["sparse three"]["checksums"],
        worlds.get("one")["sparse"]["checksums"],
    )
    moved = {name for name in trained if trained[name] != untouched[name]}
    assert {name for name in trained.keys() - moved if "correction_bias" not in name} == {
        name for name in trained if ".indexer." in name
    }
    assert worlds.get("two")["sparse tp2 rest"]["checksums"] == trained


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_a_checkpoint_of_four_ranks_goes_on_in_one(worlds: Worlds, model: str) -> None:
    saved = worlds.get("four")[f"{model} wide three"]
    rest = worlds.get("back")[f"{model} wide rest"]["reports"][0]
    whole = worlds.get("one")[f"{model} six"]["reports"]
    assert [report.loss for report in saved["reports"]] == pytest.approx(
        [report.loss for report in whole[:3]], abs=1e-4
    )
    assert rest.loss == pytest.approx(whole[3].loss, abs=1e-4)


@pytest.mark.parametrize(
    ("size", "case", "checkpoint"),
    [
        ("one", "dense three", "dense3"),
        ("one", "glm three", "glm3"),
        ("one", "nemotron three", "nemotron3"),
        ("one", "sparse three", "sparse3"),
        ("four", "moe wide three", "moewide3"),
    ],
)
def test_an_export_holds_the_weights_of_the_checkpoint(
    worlds: Worlds, models: dict[str, str], tmp_path: Path, size: str, case: str, checkpoint: str
) -> None:
    expected = worlds.get(size)[case]["checksums"]
    out = tmp_path / "export"
    model_dir = Path(models[case.split()[0]])
    to_hf(
        worlds.checkpoint(checkpoint), out, model=str(model_dir), dtype="fp32", shard_bytes=50_000
    )
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    } == expected
    assert (out / "config.json").exists()


def test_an_export_in_bfloat16_leaves_the_correction_of_the_router_in_float32(
    worlds: Worlds, models: dict[str, str], tmp_path: Path
) -> None:
    to_hf(worlds.checkpoint("glm3"), tmp_path / "out", model=str(models["glm"]), dtype="bf16")
    tensors = {
        name: tensor
        for file in (tmp_path / "out").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    wide = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert wide == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}


def test_an_export_overwrites_nothing(
    worlds: Worlds, models: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="already exists"):
        to_hf(worlds.checkpoint("dense3"), tmp_path, model=str(models["dense"]))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_export_with_another_models_config_is_refused_and_leaves_nothing(
    worlds: Worlds, models: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"another model|lacks"):
        to_hf(worlds.checkpoint("dense3"), tmp_path / "out", model=str(models["moe"]))
    assert list(tmp_path.iterdir()) == []


def test_a_torn_tensor_file_is_named(
    worlds: Worlds, models: dict[str, str], tmp_path: Path
) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(worlds.checkpoint("dense3"), torn)
    data = next(torn.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="corrupt"):
        to_hf(torn, tmp_path / "out", model=str(models["dense"]))


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("this must never be printed",)


@pytest.mark.parametrize(
    "content", [pickle.dumps(_Evil()), pickle.dumps({"a": _Evil()}), b"not a pickle", b""]
)
def test_metadata_that_could_run_code_is_refused_unread(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError):
        read_metadata(tmp_path)
    assert "printed" not in capsys.readouterr().out


def test_metadata_of_the_trainer_is_accepted(worlds: Worlds) -> None:
    read_metadata(Path(worlds.checkpoint("moe3")))


def test_a_folder_without_metadata_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        read_metadata(tmp_path)


def test_a_bfloat16_model_with_weights_in_float32_is_saved_and_loaded(
    worlds: Worlds, models: dict[str, str]
) -> None:
    checksums = worlds.get("two")["delta bfloat16"]
    assert checksums["loaded"] == checksums["saved"]
    assert all(
        checksums["saved"][name] not in (checksums["first"][name], checksums["later"][name])
        for name in checksums["saved"]
    )
    for name, tensor in load_file(f"{models['delta']}/model.safetensors").items():
        if name.endswith((".A_log", "linear_attn.norm.weight")):
            expected = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            assert checksums["first"][name] == expected, name


@given(st.data())
def test_boxes_are_the_range_in_order_and_none_is_larger_than_asked(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    end = data.draw(st.integers(start, count))
    limit = data.draw(st.integers(1, count))
    numbers = torch.arange(count).view(shape)
    found = []
    for offsets, sizes in boxes(shape, start, end, limit=limit):
        box = numbers[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
        assert box.numel() <= limit
        found += box.flatten().tolist()
    assert found == list(range(start, end))


def test_the_halves_of_a_fused_projection_go_where_megatron_stores_them() -> None:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    # [gate; up] of the second of two tensor-parallel ranks, the third layer of four
    local = torch.arange(6 * 5, dtype=torch.float32).view(6, 5)
    whole = ShardedTensor.from_rank_offsets(
        "fc1", local, (0, 2, 4), (1, 1, 2), replica_id=(0, 0, 1), prepend_axis_num=1
    )
    fused = apply_swiglu_sharded_factory(whole, [(0, 2, 4)])
    out = torch.full((4, 12, 5), -1.0)
    for start, end in ((0, 7), (7, 22), (22, 30)):
        for piece in pieces(fused, local.view(-1)[start:end], start=start, prefixes=["state."]):
            assert piece.key == "state.fc1" and piece.replica_id == (0, 0, 0)
            assert piece.data.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            out[piece.global_slice()] = piece.data
    assert torch.equal(out[2, 3:6], local[:3]) and torch.equal(out[2, 9:], local[3:])
    assert int((out == -1).sum()) == out.numel() - local.numel()
