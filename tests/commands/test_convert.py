"""`miles convert`: options reach the runtime, results are shown, refusals have their codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.runtime.convert_report import Conversion, Preview, Proof, collapsed
from milescli.runtime.convert_verify import Verify
from tests.commands.conftest import Miles, Replace

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
    miles: Miles, replace: Replace
) -> None:
    seen: dict[str, object] = {}
    replace(
        "milescli.runtime.convert",
        IntakeOptions=lambda **options: options,
        convert_to_megatron=lambda source, target, *, options, output: (
            seen.update(source=source, target=target, **options) or DONE
        ),
        preview_to_megatron=None,
    )
    said = miles(
        "convert",
        "hf-to-megatron",
        "Qwen/Qwen3-0.6B",
        "out",
        "--revision",
        "v1",
        "--dtype",
        "bf16",
        "--verify",
        "tensors",
    )
    assert said.code == 0
    assert seen == {
        "source": "Qwen/Qwen3-0.6B",
        "target": Path("out"),
        "revision": "v1",
        "dtype": "bf16",
        "verify": Verify.TENSORS,
    }
    for words in (
        "36 tensors, each used exactly once",
        "43 tensors",
        "BF16 42, F32 1",
        "3.6e-07",
        "1.0 GiB of it from an earlier",
    ):
        assert words in said.out, words
    assert "megatron-to-hf" in said.err
    assert (
        json.loads(miles("convert", "hf-to-megatron", "x", "y", "--json").out)["proof"][
            "num_source_tensors"
        ]
        == 36
    )


def test_a_conversion_to_hugging_face_is_handed_on(miles: Miles, replace: Replace) -> None:
    seen: dict[str, object] = {}
    replace(
        "milescli.runtime.convert_back",
        OutletOptions=lambda **options: options,
        convert_to_hf=lambda source, target, *, options, output: (
            seen.update(source=source, target=target, **options) or DONE
        ),
        preview_to_hf=lambda source, target, *, options, output: PREVIEW,
    )
    arguments = (
        "convert",
        "megatron-to-hf",
        "runs/a",
        "out",
        "--model",
        "base",
        "--step",
        "20",
        "--max-shard-size",
        "2GB",
    )
    assert miles(*arguments).code == 0
    assert seen == {
        "source": Path("runs/a"),
        "target": Path("out"),
        "model": "base",
        "step": 20,
        "dtype": None,
        "verify": None,
        "shard_bytes": 2 * 10**9,
    }
    shown = miles(*arguments, "--dry-run")
    assert (
        shown.code == 0
        and "decoder.layers.*.mlp.linear_fc1.weight" in shown.out
        and "28" in shown.out
    )
    assert (
        "2.0 GiB are missing" in shown.out
        and "nothing was written" in shown.err
        and "1 MTP layer" in shown.err
    )


@pytest.mark.parametrize("size", ["big", "-1GB", "0", "3XB", ""])
def test_a_size_that_is_none_is_a_usage_error(miles: Miles, size: str) -> None:
    said = miles("convert", "megatron-to-hf", "a", "b", "--max-shard-size", size)
    assert said.code == 2 and "5GB or 512MiB" in said.err


def test_a_source_that_is_not_there_ends_with_6(miles: Miles) -> None:
    assert miles("convert", "megatron-to-hf", "nowhere", "out").code == 6
    assert miles("convert", "hf-to-megatron", "./nowhere", "out").code == 6
    assert list(Path().iterdir()) == []


def test_lines_that_differ_in_numbers_alone_are_one() -> None:
    pairs = [
        (f"model.layers.{layer}.a.weight", f"decoder.layers.{layer}.a", "2x2")
        for layer in range(12)
    ]
    assert collapsed([*pairs, ("b", "c", "1")]) == [
        ("model.layers.*.a.weight", "decoder.layers.*.a", "2x2", 12),
        ("b", "c", "1", 1),
    ]
