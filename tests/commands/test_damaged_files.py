"""Whatever is in a user's small files, each verb ends, with an error of its own or without one, and
never with an internal error. `MILES_DAMAGES=2000 pytest ...` tries more."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import ExitCode
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.models.scratch import make_from_config
from tests.checkpoint.making import add_checkpoint, make_run
from tests.commands.conftest import Miles
from tests.conversion.making import to_megatron
from tests.damage import DAMAGES, within
from tests.recipe.imports.cases import CASES
from tests.report.run_folders import make_planted

KEPT = Path(__file__).parents[1] / "web" / "browser" / "kept" / "quickstart-1"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
}
RECIPE = """\
model: {path: model}
data: {prompts: rows.jsonl}
rollout: {reward: exact_match, prompts_per_step: 4, max_response_tokens: 16}
train: {steps: 10, optimizer: {lr: 1.0e-6}}
"""
VERBS: dict[str, list[list[str]]] = {
    "runs/run": [
        ["runs"],
        ["status", "run"],
        ["why", "run"],
        ["report", "run"],
        ["compare", "run", "other"],
        ["compare", "--json", "run", "--", "other"],
        ["logs", "run"],
        ["note", "run"],
        ["export", "run", "--to", "out"],
        ["convert", "megatron-to-hf", "runs/run", "hf"],
        ["fork", "run", "--name", "branch"],
        ["rewards", "try", "run", "--reward", "exact_match"],
        ["resume", "run", "--set", "train.optimizer.lr=1"],
    ],
    "model": [
        ["launch", "recipe.yaml", "--dry-run"],
        ["launch", "recipe.yaml", "--dry-run", "-v"],
        ["convert", "hf-to-megatron", "model", "out", "--dry-run"],
        ["convert", "hf-to-megatron", "model", "out"],
    ],
    "megatron": [
        ["convert", "megatron-to-hf", "megatron", "out", "--dry-run"],
        ["convert", "megatron-to-hf", "megatron", "out"],
        ["launch", "recipe.yaml", "--dry-run", "--set", "model.path=megatron"],
    ],
    "recipe.yaml": [
        ["launch", "recipe.yaml", "--dry-run", "--json"],
        ["recipes", "show", "recipe.yaml"],
    ],
    "rows.jsonl": [["data", "check", "rows.jsonl"], ["launch", "recipe.yaml", "--dry-run"]],
    "foreign": [["import", "FILE"], ["import", "--layout", "FILE"]],
}
"""Path -> command lines that read it; FILE is the damaged file."""
BOUND_S = 300
"""Of one command line: many times what it takes."""
NUM_DAMAGES = int(os.environ.get("MILES_DAMAGES", "24"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one with a checkpoint, a model, data and a recipe, as they were written."""
    folder = tmp_path_factory.mktemp("whole")
    run = shutil.copytree(KEPT, folder / "runs" / "run")
    make_planted(folder / "runs" / "other", seed=2)
    make_from_config(CONFIG, folder / "model", seed=0)
    make_scratch_tokenizer(["What is 1 + 1?"], CONFIG["vocab_size"], folder / "model")
    to_megatron(folder / "model", folder / "megatron")
    [metadata] = (folder / "megatron").rglob(".metadata")
    for name in ("recipe.yaml", "manifest.json"):
        (run / name).unlink()
    made = make_run(folder / "made", model_dir=folder / "model")
    for file in (made.recipe_file, made.manifest_file):
        shutil.copy(file, run)
    add_checkpoint(RunDir(run), 24, tensors=metadata.parent)
    for name, (_, texts, *_) in CASES.items():
        for number, (file, text) in enumerate(texts.items()):
            at = folder / "foreign" / f"{name.replace(' ', '-')}-{number}{Path(file).suffix}"
            at.parent.mkdir(exist_ok=True)
            at.write_text(text)
    (folder / "recipe.yaml").write_text(RECIPE)
    rows = [{"prompt": f"What is {n} + {n}?", "label": str(2 * n)} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_nothing_that_is_whole_is_refused(miles: Miles, whole: Path) -> None:
    shutil.copytree(whole, Path.cwd(), dirs_exist_ok=True)
    refused = {}
    for argv in (argv for listed in VERBS.values() for argv in listed if "FILE" not in argv):
        said = miles(*argv)
        if said.code:
            refused[" ".join(argv)] = said.err
        shutil.rmtree("out", ignore_errors=True)
    assert set(refused) == {"compare --json run -- other", "resume run --set train.optimizer.lr=1"}


@pytest.mark.parametrize("seed", range(NUM_DAMAGES))
def test_a_damaged_file_is_never_an_internal_error(miles: Miles, whole: Path, seed: int) -> None:
    shutil.copytree(whole, Path.cwd(), dirs_exist_ok=True)
    draw = random.Random(seed)
    place = draw.choice(list(VERBS))
    files = [Path(place)] if Path(place).is_file() else sorted(Path(place).rglob("*"))
    file = draw.choice([one for one in files if one.is_file()])
    damage = draw.choice(DAMAGES)
    damage(file, draw)
    for words in VERBS[place]:
        argv = [str(file) if word == "FILE" else word for word in words]
        with within(BOUND_S):
            said = miles(*argv)
        what = f"{damage.__name__} of {file}: {argv}: {said.err[-3000:]}"
        assert said.code != ExitCode.INTERNAL and said.code in set(ExitCode), what
