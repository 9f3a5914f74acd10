"""Published benchmarks, on copies made here in the columns of their data sets."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.errors import DataError
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.tokenizer import load_tokenizer
from milescli.recipe.schema import Recipe
from milescli.rollout.evaluation.benchmarks import BENCHMARKS
from milescli.rollout.rewards import load_rewards
from milescli.runtime.evaluation.sets import EvalOptions, LoadedSet, load_set, sets_of


def _options(right: str) -> dict[str, object]:
    return {"options": ["one", right, "three"], "answer": "B", "answer_index": 1}


ROWS: dict[str, dict[str, list[dict[str, object]]]] = {
    "gsm8k": {
        "main/test-00000-of-00001.parquet": [
            {"question": "2 dozen?", "answer": "2 * 12 = <<2*12=24>>24\n#### 24"}
        ],
        "main/train-00000-of-00001.parquet": [{"question": "no", "answer": "#### 0"}],
    },
    "math-500": {
        "test.jsonl": [
            {
                "problem": "Half of $x$ is $1$.",
                "solution": r"\boxed{2}",
                "answer": "2",
                "subject": "Algebra",
                "level": 1,
                "unique_id": "test/algebra/1.json",
            }
        ]
    },
    "aime-2024": {
        "data/train-00000-of-00001.parquet": [
            {"id": 60, "problem": "Find n.", "solution": "...", "answer": "204", "year": "2024"}
        ]
    },
    "gpqa-diamond": {
        "gpqa_diamond.csv": [
            {
                "Question": f"Which? {at}",
                "Correct Answer": "right\n",
                "Incorrect Answer 1": "wrong",
                "Incorrect Answer 2": "bad",
                "Incorrect Answer 3": "worse",
                "High-level domain": "Physics",
            }
            for at in range(12)
        ],
    },
    "mmlu-pro": {
        "data/test-00000-of-00001.parquet": [
            {"question_id": 1, "question": "Q?", **_options("two"), "cot_content": ""}
            | {"category": "law"}
        ],
        "data/validation-00000-of-00001.parquet": [
            {"question_id": 9, "question": f"{kind}?", **_options("x"), "category": kind}
            | {"cot_content": f"A: Think {kind}. The answer is (B)."}
            for kind in ("law", "math", "law")
        ],
    },
    "ifeval": {
        "ifeval_input_data.jsonl": [
            {
                "key": 1000,
                "prompt": "Write without commas.",
                "instruction_id_list": ["punctuation:no_comma"],
                "kwargs": [{"num_words": None}],
            }
        ]
    },
}
"""Files as the hub has them."""
CARDS = {
    "gpqa-diamond": """---
configs:
- config_name: gpqa_main
  data_files: gpqa_main.csv
- config_name: gpqa_diamond
  data_files: gpqa_diamond.csv
---
"""
}


def _copy(folder: Path, name: str) -> Path:
    for path, rows in ROWS[name].items():
        file = folder / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        elif file.suffix == ".csv":
            with file.open("w", newline="") as lines:
                table = csv.DictWriter(lines, list(rows[0]))
                table.writeheader()
                table.writerows(rows)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if name in CARDS:
        (folder / name / "README.md").write_text(CARDS[name])
    return folder / name


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    make_scratch_tokenizer(["few words"], 300, folder)
    return load_tokenizer(folder)


def _loaded(folder: Path, tokenizer: Any, data: str) -> LoadedSet:
    (one,) = sets_of(Recipe(), EvalOptions(data=[data]))
    inputs: Any = SimpleNamespace(tokenizer=tokenizer, prompts=None)
    return load_set(one, RunDir(folder), inputs, output=Output(stderr=io.StringIO()))


RIGHT = {
    "gsm8k": (r"so \boxed{24}", "so 25"),
    "math-500": (r"\boxed{2}", r"\boxed{3}"),
    "aime-2024": (r"\boxed{204}", r"\boxed{24}"),
    "mmlu-pro": ("Thus the answer is (B).", "the answer is (A)"),
    "ifeval": ("Here is text", "Here, text"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_local_copy_is_asked_and_scored(tmp_path: Path, tokenizer: Any, name: str) -> None:
    loaded = _loaded(tmp_path, tokenizer, f"{name}={_copy(tmp_path, name)}")
    (prompt,), recipe = loaded.prompts, loaded.set.recipe
    (reward,) = load_rewards(recipe.rollout).values()
    right, wrong = RIGHT[name]
    ask: Any = reward
    assert ask(prompt=prompt.text, response=right, label=prompt.label) == 1.0
    assert ask(prompt=prompt.text, response=wrong, label=prompt.label) == 0.0


def test_gpqa_mixes_its_answers_the_same_way_each_time(tmp_path: Path, tokenizer: Any) -> None:
    data = f"gpqa-diamond={_copy(tmp_path, 'gpqa-diamond')}"
    one, other = (_loaded(tmp_path, tokenizer, data).prompts for _ in range(2))
    assert one == other and {prompt.label for prompt in one} == set("ABCD")
    for prompt in one:
        assert f"{prompt.label}) right\n" in prompt.text + "\n"
    assert set(_loaded(tmp_path, tokenizer, data).domains.values()) == {"Physics"}


def test_mmlu_pro_shows_worked_examples_of_the_questions_category(
    tmp_path: Path, tokenizer: Any
) -> None:
    loaded = _loaded(tmp_path, tokenizer, f"mmlu-pro={_copy(tmp_path, 'mmlu-pro')}")
    text = loaded.prompts[0].text
    assert text.count("Think law") == 2 and "math" not in text
    assert text.endswith("Answer: Let's think step by step.")
    assert loaded.domains == {0: "law"}
    alone = tmp_path / "mmlu-pro" / "data" / "test-00000-of-00001.parquet"
    with pytest.raises(DataError, match="the worked examples of the benchmark"):
        _loaded(tmp_path, tokenizer, f"mmlu-pro={alone}")


def test_what_is_published_holds_unless_the_user_sets_it(tmp_path: Path, tokenizer: Any) -> None:
    data = f"aime-2024={_copy(tmp_path, 'aime-2024')}"
    published = _loaded(tmp_path, tokenizer, data).set.recipe.eval
    assert (published.samples_per_prompt, published.temperature, published.top_p) == (64, 0.6, 0.95)
    recipe = Recipe.model_validate({"eval": {"samples_per_prompt": 4, "temperature": 0.3}})
    eval_options = EvalOptions(data=[data], flags={"eval.samples_per_prompt": "--samples 4"})
    (own,) = sets_of(recipe, eval_options)
    assert (own.recipe.eval.samples_per_prompt, own.recipe.eval.temperature) == (4, 0.6)


def test_another_number_of_questions_than_published_is_told(tmp_path: Path, tokenizer: Any) -> None:
    (one,) = sets_of(Recipe(), EvalOptions(data=[f"gsm8k={_copy(tmp_path, 'gsm8k')}"]))
    inputs: Any = SimpleNamespace(tokenizer=tokenizer, prompts=None)
    said = io.StringIO()
    load_set(one, RunDir(tmp_path), inputs, output=Output(stderr=said))
    assert "gsm8k: 1 questions are available, but 1,319 were published" in said.getvalue()


def test_a_file_of_other_columns_is_no_copy(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "?", "label": "1"}\n')
    with pytest.raises(DataError, match="is not a copy of the benchmark `gsm8k`") as refused:
        _loaded(tmp_path, tokenizer, f"gsm8k={tmp_path / 'mine.jsonl'}")
    assert "lacks `question`, `answer`" in refused.value.why
    assert "--data my-gsm8k=" in refused.value.fixes[0]
    with pytest.raises(DataError, match="there is no copy of `ifeval`"):
        sets_of(Recipe(), EvalOptions(data=["ifeval=nowhere"]))


def test_a_folder_may_hold_the_one_subset_alone(tmp_path: Path, tokenizer: Any) -> None:
    for split in ("train", "test"):
        row = {"question": f"{split}?", "answer": "#### 1"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row))
    loaded = _loaded(tmp_path / "run", tokenizer, f"gsm8k={tmp_path}")
    assert loaded.prompts[0].text.startswith("test?")


def test_a_bare_name_is_the_hubs() -> None:
    sets = sets_of(Recipe(), EvalOptions(data=list(BENCHMARKS)))
    assert [one.recipe.data.eval for one in sets] == [one.hub for one in BENCHMARKS.values()]
    assert all(one.source and one.num_prompts for one in BENCHMARKS.values())
