"""The fixes of refusals, of the table in `fix_cases`: each is typed as it is shown, and the refusal
is gone."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.tasks import TASKS
from milescli.models import ModelFacts, scratch
from milescli.recipe.model import ScratchModel
from milescli.recipe.schema import Recipe
from milescli.runtime.inputs import model_facts
from milescli.runtime.inputs.checks import Outcome
from milescli.runtime.inputs.input_check_process import check_inputs
from tests.commands.conftest import Miles
from tests.commands.fix_cases import COMMANDS, THEN

pytestmark = pytest.mark.slow

RECIPE = """
model: {path: Tiny-Model}
data: {prompts: sums.jsonl, max_prompt_tokens: 512}
rollout: {reward: gsm8k, max_response_tokens: 64}
"""
PYTHON = "def strict(*, prompt, response, label): return 1.0\n\nclass Format: ...\n"
_HOLE = re.compile(r"\b(?:[A-Z]{2,}|N)\b")
"""What the user is to fill in."""
_QUICK_VERBS = ("launch", "recipes", "runs", "help", "algorithms", "data", "plugins", "envs")
"""The other verbs take long, or begin what they do."""


class LookHere:
    """The look of a dry run, in this process: a hundred of its own would take minutes."""

    def __init__(self, recipe: Recipe, facts: ModelFacts) -> None:
        self._of = (recipe, facts)

    def outcomes(self) -> list[Outcome]:
        """Look, and return what was found."""
        return check_inputs(*self._of)

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, one without a chat template."""
    place = tmp_path_factory.mktemp("models")
    shape = ScratchModel(vocab_size=300, max_position_embeddings=1024)
    for name in ("Tiny-Model", "No-Template"):
        folder = make_scratch_tokenizer([f"What is {n} + 1?" for n in range(8)], 300, place / name)
        scratch.make_model(shape, folder, 0)
    config = place / "No-Template/tokenizer_config.json"
    told = json.loads(config.read_text())
    told.pop("chat_template", None)
    config.write_text(json.dumps(told))
    (place / "No-Template/chat_template.jinja").unlink(missing_ok=True)
    return place


@pytest.fixture
def place(miles: Miles, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data, a recipe, two models, a run and plug-ins in the working directory."""
    here = Path.cwd()
    sums = [(f"What is {n} + 1?", str(n + 1)) for n in range(8)]
    files = {
        "sums": [{"question": asked, "answer": told} for asked, told in sums],
        "train": [{"question": f"What is {n} - 9?", "answer": str(n - 9)} for n in range(8)],
        "test": [{"question": f"What is {n} - 1?", "answer": str(n - 1)} for n in range(8)],
        "chats": [{"prompt": asked, "response": told} for asked, told in sums],
        "pairs": [{"prompt": asked, "chosen": told, "rejected": "no"} for asked, told in sums],
        "images": [{"prompt": "Who?", "images": ["a.jpg"], "label": "she"}],
    }
    for name, rows in files.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("own.yaml").write_text(RECIPE)
    Path("mine.py").write_text(PYTHON)
    taken = here / "runs/taken"
    taken.mkdir(parents=True)
    (taken / "recipe.yaml").write_text("name: taken\n")
    for model in models.iterdir():
        (here / model.name).symlink_to(model)
    monkeypatch.setattr("milescli.runtime.dry_run.InputCheckProcess", LookHere)
    for name, task in TASKS.items():
        monkeypatch.setitem(TASKS, name, replace(task, num_rows=min(task.num_rows, 64)))
    # the client reads the variable when it is imported, and would stay offline for later tests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(here))
    sys.modules.pop("mine", None)
    return here


def _is_command(fix: str, argv: list[str]) -> bool:
    """Return whether a fix is a command, or options, that is typed as it stands here."""
    text = fix.partition("   #")[0]
    if _HOLE.search(text):
        return False
    return text.startswith("--") or (
        text.startswith("miles ") and text.split()[1] in _QUICK_VERBS and argv[0] != "plugins"
    )


def _typed(argv: list[str], fix: str) -> list[str]:
    """Return the command line of a fix: a command, or options that take the place of others."""
    words = shlex.split(fix, comments=True)
    if words[0] == "miles":
        is_dry = "--dry-run" in argv and words[1] == "launch"
        return [*words[1:], *["--dry-run"] * is_dry]
    given = [(argv[0], ""), *zip(argv[1:], [*argv[2:], ""], strict=True)]
    kept, skip = list[str](), False
    new = dict(zip(words[::2], words[1::2], strict=False))
    keys = {value.partition("=")[0] for value in words[1::2]}
    if "train.lora.rank" in keys:
        new["--lora"] = ""
    for word, value in given:
        if skip:
            skip = False
        elif word in new and (word != "--set" or value.partition("=")[0] in keys):
            skip = True
        elif word != "--set" or not _is_corrected(value, keys):
            kept.append(word)
        else:
            skip = True
    return [*kept, *words]


def _is_corrected(value: str, keys: set[str]) -> bool:
    """Return True for an override whose key is none: the fix corrects it."""
    from milescli.recipe.keys import nearest_key

    key = value.partition("=")[0]
    return not key or nearest_key(key) in keys


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_typed_as_shown_ends_the_refusal(
    miles: Miles, place: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says, then = COMMANDS[command], THEN.get(command, ())
    if says == "designed for a model from scratch":
        monkeypatch.setattr(model_facts, "REAL", 0.1)
    argv = shlex.split(command)
    refused = miles(*argv, "--json")
    assert refused.code in (1, 2, 3, 5, 6), refused.err
    error = json.loads(refused.err.splitlines()[-1])
    assert says in f"{error['error']} {error['why']} {error['fix']}", error
    for fix in (one for one in error["fix"] if _is_command(one, argv)):
        mended = miles(*_typed(argv, fix), "--json")
        assert not mended.code or any(text in mended.err for text in then), (fix, mended.err)


def test_a_hundred_fixes_are_typed() -> None:
    assert len(COMMANDS) > 100
