"""The model card: what it tells, what it never tells, and the curve beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from milescli.core.events import to_record
from milescli.export.card import CARD_NAME, CURVE_NAME, model_card
from milescli.export.folder import WrittenFolder
from milescli.export.provenance import Provenance, read_provenance
from milescli.export.stored import ReadBackErrors
from milescli.recipe.data import Data
from milescli.recipe.model import Model, ScratchModel
from milescli.recipe.schema import Recipe, Rollout
from tests.export.models import QWEN3_MOE, make_base, table_of
from tests.fake_run import events
from tests.families.cases import ALL

MEASURED = ReadBackErrors(
    num_plain=12,
    num_quantised=30,
    worst_share_of_bound=0.998,
    squared_difference=0.0009,
    squared_weight=1.0,
)


def recipe(tmp_path: Path, **model: object) -> Recipe:
    """As a user writes it, with paths of a machine."""
    return Recipe(
        name="gsm8k",
        description="Learns | to count",
        model=Model(**model),
        data=Data(prompts=str(tmp_path / "private" / "train.jsonl"), eval="task:sums-heldout"),
        rollout=Rollout(reward="mypkg.rewards:strict"),
    )


def provenance(tmp_path: Path, *, step: int = 40, **model: object) -> Provenance:
    """Of a run that never was."""
    manifest = {
        "miles": "0.1.0",
        "packages": {"torch": "2.13.0", "sglang": "0.5.20"},
        "data": {
            "prompts": {
                "path": str(tmp_path / "train.jsonl"),
                "num_rows": 7473,
                "sha256": "ab" * 32,
            }
        },
        "created": "2026-11-21T09:46:14Z",
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    lines = [json.dumps({"time": "now", **to_record(event)}) for event in events()]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, '{"event": "StepDone", "step": 4']))
    return read_provenance(
        recipe=recipe(tmp_path, **model),
        step=step,
        manifest=tmp_path / "manifest.json",
        events=tmp_path / "events.jsonl",
    )


def card(
    tmp_path: Path,
    of: Provenance | None,
    *,
    format: str = "fp8",
    config: dict = QWEN3_MOE,
    **fields: object,
) -> dict[str, str]:
    """Of a folder that was measured."""
    make_base(tmp_path / "base", config)
    done = WrittenFolder(
        path=tmp_path / "out", format=format, size_bytes=2**30, measured=MEASURED, **fields
    )
    return model_card(
        done, table=table_of(config), base=tmp_path / "base", name="my-model", provenance=of
    )


def test_a_card_tells_what_was_trained_and_measured(tmp_path: Path) -> None:
    known = provenance(tmp_path, path="Qwen/Qwen3-30B-A3B")
    files = card(tmp_path, known, copied=("visual (2 tensors)",), notes=("something to know",))
    text = files[CARD_NAME]
    head = yaml.safe_load(text.split("---")[1])
    assert (
        head["base_model"] == "Qwen/Qwen3-30B-A3B"
        and head["license"] == "apache-2.0"
        and head["pipeline_tag"] == "text-generation"
    )
    assert {"miles", "grpo", "fp8", "reinforcement-learning"} <= set(head["tags"])
    for word in (
        "`gsm8k`",
        "Learns | to count",
        "7,473 rows",
        "40.5%",
        "mypkg.rewards:strict",
        "3.00%",
        "0.998",
        "torch 2.13.0",
    ):
        assert word in text, word
    for word in (
        "visual (2 tensors)",
        "- something to know",
        "sglang.launch_server --model-path my-model",
        f"]({CURVE_NAME})",
    ):
        assert word in text, word
    assert files[CURVE_NAME].count("<circle") == len(known.evals) == 5


def test_a_card_tells_the_steps_up_to_its_own_and_the_last_word_on_each(tmp_path: Path) -> None:
    known = provenance(tmp_path, step=20, path="Qwen/Qwen3-30B-A3B")
    assert [step for step, _ in known.rewards] == list(range(1, 21)) and known.evals[-1].step == 20
    again = json.dumps({"event": "StepDone", "step": 20, "rollout": {"reward_mean": 0.125}})
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("\n" + again + "\n")
    resumed = read_provenance(
        recipe=known.recipe,
        step=20,
        manifest=tmp_path / "nothing",
        events=tmp_path / "events.jsonl",
    )
    assert resumed.rewards[-1] == (20, 0.125) and resumed.versions == {}


def test_a_card_tells_no_place_of_the_machine_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 30)
    (tmp_path / "model").mkdir()
    known = provenance(tmp_path, path=str(tmp_path / "model"))
    files = card(tmp_path, known, notes=("do not tell hf_" + "b" * 30,))
    for text in files.values():
        assert str(tmp_path) not in text and "hf_a" not in text and "hf_b" not in text
    assert "base_model" not in yaml.safe_load(files[CARD_NAME].split("---")[1])
    assert "`train.jsonl`" in files[CARD_NAME]


def test_a_card_without_a_run_tells_of_the_weights_alone(tmp_path: Path) -> None:
    files = card(tmp_path, None, format="bf16")
    assert (
        set(files) == {CARD_NAME}
        and "## Training" not in files[CARD_NAME]
        and "## Weights" in files[CARD_NAME]
    )


def test_a_card_tells_how_the_model_is_loaded(tmp_path: Path) -> None:
    assert "AutoModelForCausalLM" in card(tmp_path, None)[CARD_NAME]
    text = card(tmp_path / "seeing", None, config=ALL["qwen3-vl"].config)[CARD_NAME]
    assert "AutoModelForImageTextToText" in text and "processor = AutoProcessor" in text


def test_a_model_made_from_a_seed_has_no_base(tmp_path: Path) -> None:
    text = card(tmp_path, provenance(tmp_path, scratch=ScratchModel()))[CARD_NAME]
    assert "made from a seed" in text and "base_model:" not in text
