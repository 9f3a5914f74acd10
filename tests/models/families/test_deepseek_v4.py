"""DeepSeek-V4: what a release holds, and every tensor by name and bits against transformers' own
model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from milescli import models
from milescli.checkpoint.source import open_source
from milescli.core.errors import CheckpointError, RecipeError
from milescli.export.folder import write_folder
from milescli.export.stored import read_folder
from milescli.models.adapter import LoraShape, adapter_table
from milescli.plan.legal import faults
from milescli.plan.types import TrainerLayout
from tests.conversion.making import to_hf, to_megatron
from tests.families.cases import ALL
from tests.models.families.v4_release import QUANTISED, write_release

ROOT = Path(__file__).resolve().parents[3]
FLASH = ROOT.parent / "shared" / "configs" / "deepseek-ai--DeepSeek-V4-Flash.json"
WITNESS = """
import json, sys, torch
from pathlib import Path
from milescli.checkpoint.hf_folder import (HfReader)
from milescli.models import load_facts, table
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
root, config = Path(sys.argv[1]), json.loads(sys.argv[2])
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
for tensor in model.state_dict().values():
    whole = tensor.dtype == torch.int64
    tensor.copy_(torch.randint(0, 5, tensor.shape) if whole else torch.randn(tensor.shape))
model.save_pretrained(root / "saved")
facts = load_facts(root / "saved")
released, megatron = {}, {}
with HfReader(root / "saved") as reader:
    for entry in table(facts).as_on_disk(reader.names()).entries:
        parts = entry.rule.to_parts([reader.read(name) for name in entry.hf], entry.facts)
        megatron[entry.megatron] = entry.rule.fuse(parts, entry.facts)
for entry in table(facts).entries:
    if entry.mtp is None:
        parts = entry.rule.split(megatron.pop(entry.megatron), entry.facts)
        disk = [part.clone() for part in entry.rule.to_disk(parts, entry.facts)]
        released |= dict(zip(entry.hf, disk, strict=True))
assert not megatron, megatron.keys()
(root / "released").mkdir()
(root / "released" / "config.json").write_text((root / "saved" / "config.json").read_text())
save_file(released, root / "released" / "model.safetensors", metadata={"format": "pt"})
read, info = AutoModelForCausalLM.from_pretrained(root / "released", output_loading_info=True)
own, theirs = model.state_dict(), read.state_dict()
different = [name for name in own if not torch.equal(own[name], theirs[name])]
missing = sorted(info["missing_keys"])
report = {"tensors": len(own), "different": different, "missing": missing, "names": [*released]}
print(json.dumps(report))
"""


def test_the_flash_release_is_named_to_the_last_tensor() -> None:
    if not FLASH.exists():
        pytest.skip("the published configs are not beside this repository")
    table = models.table(models.parse_facts(json.loads(FLASH.read_text())))
    copies = {name for entry in table.entries if entry.rule.optional for name in entry.hf}
    names = table.hf_shapes().keys() - copies
    scales = [name for name in names if any(part in name for part in QUANTISED)]
    assert len(names) + len(scales) == 69_187  # tensors of the published release
    assert table.hf_shapes()["layers.2.attn.compressor.ape"] == (4, 1024)
    assert table.hf_shapes()["layers.3.attn.compressor.ape"] == (128, 512)
    assert table.hf_shapes()["mtp.0.hc_head_fn"] == (4, 16_384)


def test_transformers_reads_the_same_bits_from_a_folder_with_the_names_of_the_releases(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            WITNESS,
            str(tmp_path),
            json.dumps(ALL["deepseek-v4"].config),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["tensors"] > 100
    assert (report["different"], report["missing"]) == ([], [])
    assert {
        "embed.weight",
        "layers.0.ffn.gate.tid2eid",
        "layers.1.attn.indexer.compressor.ape",
    } <= set(report["names"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"moe_intermediate_size": 100, "hidden_size": 164}, {"expert_dtype": "fp8"}],
    ids=["fp4", "fp4, odd", "fp8"],
)
def test_a_release_in_fp8_and_fp4_keeps_each_number_through_conversion_and_export(
    changes: dict, tmp_path: Path
) -> None:
    plain, folder = write_release(tmp_path / "released", **changes), tmp_path / "released"
    table = models.table(models.load_facts(folder))
    to_megatron(folder, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    with open_source(folder) as source:
        assert [name for name in source.names() if name not in plain] == []
        on_disk = table.as_on_disk(source.names())
        written = write_folder(
            tmp_path / "exported",
            table=table,
            read=lambda weights: read_folder(source, weights, on_disk=on_disk),
            base=folder,
            format="bf16",
            card=lambda _: {},
            plain_format="bf16",
        )
        ways = {"read": {name: source.read(name) for name in plain}}
    ways |= {
        way: load_file(path / "model.safetensors")
        for way, path in (("converted", tmp_path / "back"), ("exported", written.path))
    }
    for way, tensors in ways.items():
        assert tensors.keys() == plain.keys(), way
        for name, tensor in plain.items():
            wide = tensors[name].dtype == torch.float32
            assert wide == (tensor.dtype == torch.float32 and not _is_quantised(name)), name
            assert torch.equal(tensors[name].float(), tensor.float()), f"{way}: {name}"
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert not {"quantization_config", "expert_dtype"} & config.keys()


def _is_quantised(name: str) -> bool:
    return any(part in name for part in QUANTISED)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("layers.1.ffn.experts.2.w3.scale", None),
        ("layers.1.attn.wq_b.scale", None),
        ("layers.1.ffn.experts.2.w3.scale", (96, 4)),
        ("layers.1.attn.wq_b.scale", (1, 2)),
    ],
)
def test_scales_that_are_missing_or_misshapen_are_named(
    name: str, instead: tuple[int, int] | None, tmp_path: Path
) -> None:
    write_release(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    scale = tensors.pop(name)
    if instead is not None:
        tensors[name] = torch.ones(instead).to(scale.dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught, open_source(tmp_path):
        pass
    assert f"`{name}`" in caught.value.why


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"tp": 2, "sequence_parallel": True}, None),
        ({"tp": 3, "sequence_parallel": True}, "groups of the output"),
        ({"cp": 2}, "sparse attention chooses among the positions of one rank"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(layout: dict, says: str | None) -> None:
    facts = models.parse_facts(ALL["deepseek-v4"].config)
    found = [fault.why for fault in faults(TrainerLayout(**layout), facts)]
    assert any(says in why for why in found) if says else found == []


def test_an_adapter_is_refused_by_name() -> None:
    base = models.table(models.parse_facts(ALL["deepseek-v4"].config))
    with pytest.raises(RecipeError, match="adapters of `deepseek_v4` models"):
        adapter_table(base, LoraShape(rank=4, alpha=8.0, targets=("all-linear",)))
