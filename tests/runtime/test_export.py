"""What can be exported: a run, one of its checkpoints, a converted model, a Hugging Face folder, an
adapter; and what the door says of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from milescli.checkpoint.hf_to_megatron import FILE_BYTES
from milescli.checkpoint.source import open_source
from milescli.console.output import Mode, Output
from milescli.conversion.verify import Verify
from milescli.core.errors import CheckpointError, MachineError, MilesError
from milescli.export.adapter import Adapter, write_adapter
from milescli.runtime.export import ExportSummary, export_weights
from tests.checkpoint.making import add_checkpoint, make_run
from tests.conversion.making import to_megatron
from tests.export.models import DEEPSEEK_V3, GPT_OSS, QWEN3, QWEN3_MOE, make_base
from tests.loopback_hub import WRITE_TOKEN, loopback_hub

ROWS = [[5, 9, 100, 3, 77, 42, 8], [17, 4, 4, 90, 12, 60, 61, 62]]
SERVED = (
    ("qwen3", "fp8"),
    ("qwen3", "int4"),
    ("qwen3_moe", "bf16"),
    ("qwen3_moe", "fp8"),
    ("qwen3_moe", "mxfp8"),
    ("deepseek_v3", "fp8"),
)


def export(source: Path, to: Path, **options: object) -> ExportSummary:
    """With the command's defaults."""
    defaults = {
        "format": None,
        "step": None,
        "base": None,
        "merge": False,
        "push": None,
        "private": True,
    }
    return export_weights(source, to=to, output=Output(Mode.QUIET), **{**defaults, **options})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A Hugging Face folder."""
    make_base(tmp_path / "base", DEEPSEEK_V3)
    return tmp_path / "base"


@pytest.fixture
def converted(base: Path, tmp_path: Path) -> Path:
    """As `miles convert` leaves it."""
    to_megatron(base, tmp_path / "converted", verify=Verify.NONE, file_bytes=FILE_BYTES)
    return tmp_path / "converted"


@pytest.fixture
def run(base: Path, converted: Path, tmp_path: Path) -> Path:
    """A run with a checkpoint of 2 steps: of the base's weights, which is as good as any."""
    made = make_run(tmp_path / "runs" / "mine", model_dir=base)
    steps = [
        {"event": "StepDone", "step": step, "rollout": {"reward_mean": step / 4}}
        for step in (1, 2, 3)
    ]
    made.events_file.write_text("\n".join(json.dumps(step) for step in steps))
    add_checkpoint(made, 2, tensors=converted / "release")
    return made.path


def test_a_run_and_its_checkpoint_are_one_and_the_same(
    run: Path, base: Path, tmp_path: Path
) -> None:
    whole = export(run, tmp_path / "a")
    step = export(run / "checkpoints" / "step_2", tmp_path / "b")
    assert whole.step == step.step == 2 and whole.format == "bf16" and whole.num_quantised is None
    weights = load_file(base / "model.safetensors")
    for folder in ("a", "b"):
        written = load_file(tmp_path / folder / "model.safetensors")
        assert written.keys() == weights.keys() and all(
            torch.equal(written[name], weights[name]) for name in weights
        )
    card = (tmp_path / "a" / "README.md").read_text()
    assert "`quickstart`" in card and "2 of 32 prompts" in card and str(tmp_path) not in card
    assert (tmp_path / "a" / "reward.svg").read_text().count(",") >= 2


def test_the_chat_template_that_the_run_chose_goes_with_its_weights(
    run: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}!")
    recipe = run / "recipe.yaml"
    auto = 'chat_template: "auto"'
    assert auto in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(auto, f"chat_template: {own}"))
    export(run, tmp_path / "a")
    assert (tmp_path / "a" / "chat_template.jinja").read_text() == own.read_text()
    own.unlink()
    export(run, tmp_path / "b")
    assert not (tmp_path / "b" / "chat_template.jinja").exists(), "it is gone, and that is told"


def test_a_converted_model_is_exported_with_its_mtp_layer(
    converted: Path, base: Path, tmp_path: Path
) -> None:
    shutil.rmtree(base)
    done = export(converted, tmp_path / "out", format="fp8")
    assert done.step is None and done.copied == [] and done.relative_error < 0.05
    with open_source(tmp_path / "out") as source:
        assert (
            "model.layers.2.eh_proj.weight" in source
            and "model.layers.2.self_attn.o_proj.weight" in source.quantised_names()
        )


def test_a_hugging_face_folder_is_quantised(base: Path, tmp_path: Path) -> None:
    done = export(base, tmp_path / "out", format="int4")
    assert done.num_quantised == 3 * 4 * 2 and (tmp_path / "out" / "tokenizer.json").exists(), (
        "experts of one layer and of the MTP layer"
    )
    again = export(tmp_path / "out", tmp_path / "again", format="int4")
    assert again.num_quantised == done.num_quantised and again.relative_error < 0.02, (
        "most groups return to their grid"
    )
    assert not any("tokenizer" in note for note in again.notes)
    (tmp_path / "out" / "tokenizer.json").unlink()
    bare = export(tmp_path / "out", tmp_path / "bare", format="int4")
    assert any("the export has no tokenizer" in note for note in bare.notes)


def test_an_adapter_is_merged_or_copied(tmp_path: Path) -> None:
    weights = make_base(tmp_path / "base", QWEN3)
    module = "model.layers.1.mlp.down_proj"
    first, second = torch.randn(2, 96), torch.randn(128, 2)
    write_adapter(
        tmp_path / "adapter",
        Adapter(
            pairs={module: (first, second)}, alpha=4, rank=2, base_model=str(tmp_path / "base")
        ),
    )
    done = export(tmp_path / "adapter", tmp_path / "merged", merge=True)
    assert done.format == "bf16"
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    expected = (weights[f"{module}.weight"].float() + 2 * second @ first).to(torch.bfloat16)
    assert torch.equal(merged.pop(f"{module}.weight"), expected)
    assert all(torch.equal(merged[name], weights[name]) for name in merged)
    copied = export(tmp_path / "adapter", tmp_path / "copy")
    assert copied.format == "adapter" and any(
        "folder of this machine" in note for note in copied.notes
    )
    with pytest.raises(CheckpointError, match="is not an adapter"):
        export(tmp_path / "base", tmp_path / "x", merge=True)
    with pytest.raises(CheckpointError) as caught:
        export(tmp_path / "adapter", tmp_path / "x", format="fp8")
    assert any("--merge" in fix for fix in caught.value.fixes)


def test_a_run_whose_model_is_gone_needs_it_named(run: Path, base: Path, tmp_path: Path) -> None:
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="no longer exists") as caught:
        export(run, tmp_path / "out")
    assert caught.value.fixes[0].startswith("--base DIR")
    assert export(run, tmp_path / "out", base=moved).step == 2


def test_an_adapter_is_merged_into_a_converted_model(tmp_path: Path) -> None:
    weights = make_base(tmp_path / "base", QWEN3)
    to_megatron(tmp_path / "base", tmp_path / "converted", verify=Verify.NONE)
    module = "model.layers.0.mlp.up_proj"
    first, second = torch.randn(2, 128), torch.randn(96, 2)
    write_adapter(
        tmp_path / "adapter",
        Adapter(pairs={module: (first, second)}, alpha=2, rank=2, base_model="org/gone"),
    )
    before = sorted((tmp_path / "adapter").iterdir())
    export(tmp_path / "adapter", tmp_path / "out", merge=True, base=tmp_path / "converted")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    expected = (weights[f"{module}.weight"].float() + second @ first).to(torch.bfloat16)
    assert torch.equal(merged[f"{module}.weight"], expected)
    assert sorted((tmp_path / "adapter").iterdir()) == before


def test_what_has_no_weights_is_refused(tmp_path: Path, base: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "empty", tmp_path / "nothing"):
        with pytest.raises(CheckpointError):
            export(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="no steps"):
        export(base, tmp_path / "out", step=3)
    assert not (tmp_path / "out").exists()


def test_a_push_is_refused_before_the_work_and_done_after_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    from milescli.backends.hub.push import Hub
    from milescli.runtime import export as module

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(MachineError):
        export(base, tmp_path / "out", push="my-org/my-model")
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    with loopback_hub() as hub:
        monkeypatch.setattr(module, "Hub", lambda repo: Hub(repo, endpoint=hub.url))
        done = export(base, tmp_path / "out", push="my-org/my-model", format="fp8")
        assert done.pushed == f"{hub.url}/my-org/my-model"
        pushed = hub.files["models/my-org/my-model"]
        assert set(pushed) == {file.name for file in (tmp_path / "out").iterdir()}
        assert (
            yaml.safe_load(pushed["README.md"].decode().split("---")[1])["license"] == "apache-2.0"
        )
        hub.fails["/commit/"] = 500
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        with pytest.raises(MilesError):
            export(base, tmp_path / "again", push="my-org/my-model")
    assert (tmp_path / "again" / "model.safetensors").exists(), "what was exported stays"


def test_transformers_reads_exported_folders_as_we_do(tmp_path: Path) -> None:
    """Logits of the folder as transformers loads it (on a CPU it dequantises), and of the plain
    folder that our reader makes of it."""
    jobs, places = [], {}
    for name, format in SERVED:
        config = {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK_V3}[name]
        place = tmp_path / f"{name}-{format}"
        make_base(
            place / "base",
            {**config, "num_nextn_predict_layers": 0} if name == "deepseek_v3" else config,
        )
        export(place / "base", place / "out", format=format)
        export(place / "out", place / "plain", format="bf16")
        places[name, format] = place
    place = places["gpt_oss", "mxfp4"] = tmp_path / "gpt_oss-mxfp4"
    make_base(place / "base", GPT_OSS)
    export(place / "base", place / "out", format="mxfp4")
    export(place / "out", place / "plain", format="bf16")
    for place in places.values():
        for kind in ("base", "out", "plain"):
            jobs.append(
                {
                    "folder": str(place / kind),
                    "rows": ROWS,
                    "dtype": "bfloat16",
                    "out": str(place / f"{kind}.logits"),
                }
            )
    (tmp_path / "request.json").write_text(json.dumps({"threads": 1, "jobs": jobs}))
    worker = [
        sys.executable,
        "-m",
        "milescli.backends.transformers.logits",
        str(tmp_path / "request.json"),
    ]
    done = subprocess.run(worker, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    for (name, format), place in places.items():
        base, out, plain = (
            load_file(place / f"{kind}.logits") for kind in ("base", "out", "plain")
        )
        largest = max(float(row.abs().max()) for row in base.values())
        apart = max(float((out[key] - plain[key]).abs().max()) for key in out) / largest
        rounded = max(float((out[key] - base[key]).abs().max()) for key in out) / largest
        print(
            f"{name} {format}: {apart:.1e} from ours, {rounded:.1e} from bfloat16, of {largest:.2f}"
        )
        assert apart == 0.0, (name, format, apart)
        assert (rounded == 0.0) is (format == "bf16") and rounded < 0.5, (name, format, rounded)
