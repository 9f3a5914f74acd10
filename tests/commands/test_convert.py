"""`miles convert`: options reach the runtime, results are shown, refusals have their codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.conversion.report import Conversion, Preview, Proof
from milescli.conversion.to_hf import ToHf
from milescli.conversion.to_megatron import ToMegatron
from milescli.conversion.verify import Verify
from tests.commands.conftest import Miles

PROOF = Proof(
    num_source_tensors=36,
    num_target_tensors=43,
    dtypes={"BF16": 42, "F32": 1},
    checksums="every file read back",
    logits="29 tokens: 3.6e-07 of the largest logit (bound 1e-04)",
    logits_difference=3.6e-07,
)
DONE = Conversion(
    direction="hf-to-megatron",
    path="/models/out",
    family="qwen3",
    num_parameters=596_000_000,
    size_bytes=3 * 2**30,
    seconds=75.0,
    bytes_per_s=2**29,
    resumed_bytes=2**30,
    proof=PROOF,
    notes=[],
)
PREVIEW = Preview(
    source="in",
    target="/models/out",
    family="qwen3",
    num_parameters=596_000_000,
    size_bytes=3 * 2**30,
    num_files=3,
    free_bytes=2**30,
    finished_bytes=0,
    disk_bytes_per_s=2**29,
    seconds=6.0,
    mapping=[
        ("model.layers.*.mlp.up_proj.weight", "decoder.layers.*.mlp.linear_fc1.weight", "20x48", 28)
    ],
    notes=["1 MTP layer converted"],
)


def test_the_bare_group_shows_its_page_and_is_no_error(miles: Miles) -> None:
    said = miles("convert")
    assert said.code == 0 and "hf-to-megatron" in said.out and "megatron-to-hf" in said.out


def test_a_conversion_to_megatron_is_handed_on_and_its_proof_shown(
    miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _replace_convert(monkeypatch)
    options = ["--revision", "v1", "--dtype", "bf16", "--verify", "tensors"]
    said = miles("convert", "hf-to-megatron", "Qwen/Qwen3-0.6B", "out", *options)
    assert said.code == 0
    assert seen["direction"] == ToMegatron(source="Qwen/Qwen3-0.6B", revision="v1", dtype="bf16")
    assert seen["target"] == Path("out") and seen["verify"] is Verify.TENSORS
    for words in (
        "36 tensors, each used exactly once",
        "43 tensors",
        "BF16 42, F32 1",
        "3.6e-07",
        "1.0 GiB of it from an earlier",
    ):
        assert words in said.out, words
    assert "megatron-to-hf" in said.err
    line = miles("convert", "hf-to-megatron", "x", "y", "--json").out
    assert json.loads(line)["proof"]["num_source_tensors"] == 36


def test_a_conversion_to_hugging_face_is_handed_on(
    miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _replace_convert(monkeypatch)
    options = ["--model", "base", "--step", "20", "--max-shard-size", "2GB"]
    arguments = ("convert", "megatron-to-hf", "runs/a", "out", *options)
    assert miles(*arguments).code == 0
    assert seen["direction"] == ToHf(source="runs/a", model="base", step=20, shard_bytes=2 * 10**9)
    assert seen["target"] == Path("out") and seen["verify"] is None
    shown = miles(*arguments, "--dry-run")
    assert shown.code == 0 and "28" in shown.out
    assert "decoder.layers.*.mlp.linear_fc1.weight" in shown.out
    assert "2.0 GiB are missing" in shown.out
    assert "nothing was written" in shown.err and "1 MTP layer" in shown.err


def _replace_convert(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Nothing is converted; what would have been is here."""
    seen: dict[str, object] = {}

    def convert(direction: object, target: Path, **options: object) -> Conversion:
        seen.update(direction=direction, target=target, **options)
        return DONE

    monkeypatch.setattr("milescli.conversion.convert.convert", convert)
    monkeypatch.setattr("milescli.conversion.report.preview", lambda *args, **options: PREVIEW)
    return seen


@pytest.mark.parametrize("size", ["big", "-1GB", "0", "3XB", ""])
def test_a_size_that_is_none_is_a_usage_error(miles: Miles, size: str) -> None:
    said = miles("convert", "megatron-to-hf", "a", "b", "--max-shard-size", size)
    assert said.code == 2 and "5GB or 512MiB" in said.err


def test_a_source_that_is_not_there_ends_with_6(miles: Miles) -> None:
    assert miles("convert", "megatron-to-hf", "nowhere", "out").code == 6
    assert miles("convert", "hf-to-megatron", "./nowhere", "out").code == 6
    assert list(Path().iterdir()) == []
