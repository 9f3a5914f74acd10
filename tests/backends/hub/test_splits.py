"""One split out of many files: by the card, by the names, or a refusal that lists what is there."""

from __future__ import annotations

import pytest

from milescli.backends.hub.datasets import choose_files
from milescli.core.errors import DataError, RecipeError
from milescli.recipe.data_files import HubData, parse_hub

GSM8K = [
    f"{subset}/{split}-00000-of-00001.parquet"
    for subset in ("main", "socratic")
    for split in ("train", "test")
]
CARD = "---\nconfigs:\n- config_name: easy\n  data_files: {files}\n---\ntext\n"


def _choose(spelling: str, paths: list[str], card: str = "") -> list[str]:
    return choose_files(parse_hub(spelling, key="data.prompts"), paths, card=card, key="prompts")


@pytest.mark.parametrize(
    ("spelling", "data"),
    [
        (
            "hf:openai/gsm8k:main:train",
            HubData(name="openai/gsm8k", revision=None, subset="main", split="train"),
        ),
        (
            "hf:a/b-c.d@refs/convert/parquet:test",
            HubData(name="a/b-c.d", revision="refs/convert/parquet", subset=None, split="test"),
        ),
        ("hf:squad", HubData(name="squad", revision=None, subset=None, split=None)),
    ],
)
def test_a_spelling_says_name_revision_subset_and_split_and_is_written_back(
    spelling: str, data: HubData
) -> None:
    assert parse_hub(spelling, key="data.prompts") == data
    assert data.spelled() == spelling


@pytest.mark.parametrize(
    "spelling",
    ["hf:", "hf:a/b/c", "hf:a/b:x:y:z", "hf://datasets/a/b", "hf:a b", "hf:../up", "hf:a/b:"],
)
def test_another_spelling_is_refused_by_the_recipes_key(spelling: str) -> None:
    with pytest.raises(RecipeError, match=r"`data\.eval` cannot be"):
        parse_hub(spelling, key="data.eval")


@pytest.mark.parametrize(
    ("spelling", "paths", "chosen"),
    [
        ("hf:o/n:main:test", GSM8K, ["main/test-00000-of-00001.parquet"]),
        ("hf:o/n", ["README.md", "aime-2024.jsonl"], ["aime-2024.jsonl"]),
        ("hf:o/n",
         ["data/train-1-of-2.parquet", "data/train-0-of-2.parquet", "data/test-0.parquet"],
         ["data/train-0-of-2.parquet", "data/train-1-of-2.parquet"]),
        ("hf:o/n:default:train", ["default/train/0000.parquet", "default/test/0000.parquet"],
         ["default/train/0000.parquet"]),
        ("hf:o/n:validation", ["dev.jsonl", "train.jsonl"], ["dev.jsonl"]),
        ("hf:o/n", ["train.jsonl", "train.parquet"], ["train.parquet"]),
        ("hf:o/n", ["part-0.parquet", "part-1.parquet"], ["part-0.parquet", "part-1.parquet"]),
        ("hf:o/n:aime-25", ["aime-24.jsonl", "aime-25.jsonl"], ["aime-25.jsonl"]),
    ],
)  # fmt: skip
def test_names_of_files_tell_the_split(spelling: str, paths: list[str], chosen: list[str]) -> None:
    assert _choose(spelling, paths) == chosen


@pytest.mark.parametrize(
    "files",
    [
        '"a/*.jsonl"',
        '["a/*.jsonl"]',
        "[{split: train, path: a/*.jsonl}]",
        "[{split: train, path: [a/*]}]",
    ],
)
def test_the_card_counts_more_than_names(files: str) -> None:
    assert _choose("hf:o/n", ["a/test.jsonl", "b/train.jsonl"], CARD.format(files=files)) == [
        "a/test.jsonl"
    ]


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("*.jsonl", ["top.jsonl"]),
        ("**/*.jsonl", ["a/b/deep.jsonl", "a/old.jsonl", "top.jsonl"]),
        ("a/**/*.jsonl", ["a/b/deep.jsonl", "a/old.jsonl"]),
        ("a/*", ["a/old.jsonl"]),
    ],
)
def test_a_star_of_a_card_stays_in_its_folder(pattern: str, chosen: list[str]) -> None:
    paths = ["a/b/deep.jsonl", "a/old.jsonl", "top.jsonl"]
    assert _choose("hf:o/n", paths, CARD.format(files=f'"{pattern}"')) == chosen


@pytest.mark.parametrize(
    "card",
    ["---\n: {\n---\n", "---\nconfigs: 3\n---\n", "---\nconfigs: [3]\n---\n", "no front matter"],
)
def test_a_spoilt_card_is_passed_over(card: str) -> None:
    assert _choose("hf:o/n", ["train.jsonl"], card) == ["train.jsonl"]


def test_what_was_not_said_is_asked_with_what_can_be_pasted() -> None:
    with pytest.raises(DataError, match="choose a subset") as caught:
        _choose("hf:openai/gsm8k", GSM8K)
    assert caught.value.fixes == [
        "--set data.prompts=hf:openai/gsm8k:main:train",
        "--set data.prompts=hf:openai/gsm8k:socratic:train",
    ]
    with pytest.raises(DataError, match="has no split `trian`") as caught:
        _choose("hf:openai/gsm8k:main:trian", GSM8K)
    assert caught.value.fixes == ["--set data.prompts=hf:openai/gsm8k:main:train"]
    with pytest.raises(DataError, match=r"has no \.parquet, \.jsonl, ") as caught:
        _choose("hf:o/n", ["data.json", "load.py"])
    assert "hf:o/n@refs/convert/parquet " in caught.value.fixes[0]


def test_a_format_that_is_likelier_the_data_goes_before_the_others() -> None:
    assert _choose("hf:o/n", ["train.csv", "load.py"]) == ["train.csv"]
    assert _choose("hf:o/n", ["train.csv", "train.parquet"]) == ["train.parquet"]
