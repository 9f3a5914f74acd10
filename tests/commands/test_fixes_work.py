"""The fixes of refusals that people meet most: each is typed as it is shown, and the refusal is
gone."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.models import scratch
from milescli.recipe.model import ScratchModel
from milescli.runtime.inputs import model_facts
from tests.commands.conftest import Miles

pytestmark = pytest.mark.slow

OWN = (
    "launch -r own.yaml --set data.prompts=sums.jsonl --set data.eval=null --set eval.every=0 "
    "--set rollout.reward=gsm8k --dry-run"
)
RECIPE = """
model: {path: Tiny-Model}
data: {prompts: sums.jsonl, max_prompt_tokens: 512}
rollout: {reward: gsm8k, max_response_tokens: 64}
"""
REWARDS = "def strict(*, prompt, response, label): return 1.0\n"
QUICK = "launch -r quickstart --dry-run"
TO_TINY = f"{QUICK} --set model.scratch=null --set warmup.steps=0 --set model.path="


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command line that is refused."""

    argv: str
    says: str
    number: int = 0
    """Of the fix that is typed."""
    code: int = 0
    """With which the command ends then."""


CASES = {
    "recipe misspelt": Case(argv="launch -r quickstrat --dry-run", says="no recipe is called"),
    "recipe without suffix": Case(argv="launch -r own --dry-run", says="no recipe is called"),
    "recipe to show misspelt": Case(argv="recipes show quickstrat", says="no recipe is called"),
    "recipe file misspelt": Case(argv="launch -r ./owm.yaml --dry-run", says="own.yaml"),
    "key misspelt": Case(argv=f"{QUICK} --set train.stps=3", says="train.stps"),
    "no key": Case(argv=f"{QUICK} --set =3", says="is not an override"),
    "algorithm misspelt": Case(argv=f"{QUICK} --set train.algorithm=gsppo", says="gsppo"),
    "filter misspelt": Case(argv=f"{QUICK} --set rollout.filter=zero_varianc", says="zero_v"),
    "reward misspelt": Case(argv=f"{QUICK} --set rollout.reward=gms8k", says="no reward is called"),
    "reward with a dot": Case(
        argv=f"{QUICK} --set rollout.reward=mine.strict", says="no reward is called"
    ),
    "reward's function misspelt": Case(
        argv=f"{QUICK} --set rollout.reward=mine:strct", says="has no `strct`"
    ),
    "tracker misspelt": Case(
        argv=f"{QUICK} --set run.trackers=[tensorbord]", says="no run_tracker is called"
    ),
    "uneven updates": Case(argv=f"{QUICK} --set train.updates_per_step=3", says="32 prompts"),
    "group of one": Case(argv=f"{QUICK} --set rollout.samples_per_prompt=1", says="advantage"),
    "two models": Case(
        argv=f"{QUICK} --set model.path=Tiny-Model --set data.prompts=sums.jsonl",
        says="names two models",
        number=1,
    ),
    "model misspelt": Case(argv=f"{TO_TINY}./Tiny-Modl", says="the model ./Tiny-Modl is not there"),
    "model of a recipe from scratch": Case(
        argv=f"{TO_TINY}Tiny-Model", says="made for a model from scratch", number=1
    ),
    "no chat template": Case(argv=f"{OWN} --set model.path=No-Template", says="no chat template"),
    "file misspelt": Case(argv=OWN.replace("sums.jsonl", "sum.jsonl"), says="there is no file"),
    "label column misspelt": Case(argv=f"{OWN} --set data.label_key=anser", says="no column"),
    "prompts too long": Case(argv=f"{OWN} --set data.max_prompt_tokens=2", says="longer than 2"),
    "positions": Case(
        argv=f"{OWN} --set rollout.max_response_tokens=1000", says="model's positions"
    ),
    "evaluation of training prompts": Case(
        argv=OWN.replace("data.eval=null", "data.eval=sums.jsonl"), says="are training prompts"
    ),
    "name taken": Case(argv=f"{QUICK} --name taken", says="is in use", number=1),
    "data file misspelt": Case(argv="data check sum.jsonl", says="there is no file"),
    "column of a data file misspelt": Case(
        argv="data check sums.jsonl --prompt-key qestion", says="no column `qestion`"
    ),
    "run misspelt": Case(argv="status nosuch", says="no run is called"),
    "plug-in misspelt": Case(argv="plugins check mine:strct", says="has no `strct`"),
}


@pytest.fixture
def place(miles: Miles, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Data, a recipe, two models and a reward in the working directory."""
    here = Path.cwd()
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(8)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("own.yaml").write_text(RECIPE)
    Path("mine.py").write_text(REWARDS)
    taken = here / "runs/taken"
    taken.mkdir(parents=True)
    (taken / "recipe.yaml").write_text("name: taken\n")
    shape = ScratchModel(vocab_size=300, max_position_embeddings=1024)
    for name in ("Tiny-Model", "No-Template"):
        folder = make_scratch_tokenizer([str(row) for row in rows], 300, here / name)
        scratch.make_model(shape, folder, 0)
    config = here / "No-Template/tokenizer_config.json"
    told = json.loads(config.read_text())
    told.pop("chat_template", None)
    config.write_text(json.dumps(told))
    (here / "No-Template/chat_template.jinja").unlink(missing_ok=True)
    if "from scratch" in request.node.name:
        monkeypatch.setattr(model_facts, "REAL", 0.1)
    monkeypatch.syspath_prepend(str(here))
    sys.modules.pop("mine", None)
    return here


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


@pytest.mark.parametrize("name", CASES)
def test_what_is_typed_as_shown_ends_the_refusal(miles: Miles, place: Path, name: str) -> None:
    case = CASES[name]
    refused = miles(*shlex.split(case.argv), "--json")
    assert refused.code in (2, 3, 5, 6), refused.err
    error = json.loads(refused.err.splitlines()[-1])
    assert case.says in f"{error['error']} {error['why']} {error['fix']}", error
    mended = miles(*_typed(shlex.split(case.argv), error["fix"][case.number]), "--json")
    assert mended.code == case.code, (error["fix"], mended.err)
