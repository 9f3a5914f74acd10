"""What people get wrong: each case is a refusal in three parts that names the place, with the right
exit code, and no traceback."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from milescli.core.errors import ExitCode, RecipeError
from tests.recipe.conftest import SMALL, Place


@dataclass(frozen=True, kw_only=True)
class Case:
    """One mistake. `says` must be in what or why; `fix` in one of the fixes."""

    text: str = SMALL
    sets: list[str] = field(default_factory=list)
    environ: Mapping[str, str] = field(default_factory=dict)
    local: str = ""
    config: str = ""
    says: tuple[str, ...] = ()
    fix: str


MOE = "model: {scratch: {family: qwen3_moe, num_experts: 8}}\ndata: {prompts: task:sums}\n"

CASES = {
    # the file as text
    "not yaml": Case(
        text="model: [\n", says=("my.yaml:2", "not valid YAML"), fix="correct my.yaml:2"
    ),
    "a tab": Case(text="model:\n\tpath: x\n", says=("my.yaml:2",), fix="correct my.yaml:2"),
    "a control character": Case(
        text="model: \x07\n", says=("not valid YAML",), fix="correct my.yaml"
    ),
    "a list": Case(text="- model\n- data\n", says=("is not a recipe",), fix="miles recipes show"),
    "a word": Case(
        text="quickstart\n", says=("is not a recipe", "`quickstart`"), fix="miles recipes show"
    ),
    "empty": Case(text="", says=("does not name a model",), fix="--set model.path="),
    "two documents": Case(
        text=SMALL + "---\n" + SMALL, says=("my.yaml:3",), fix="correct my.yaml:3"
    ),
    "duplicate key": Case(
        text=SMALL + "train:\n  steps: 1\n  steps: 2\n",
        says=("`steps` is set twice", "line 4"),
        fix="lines 4 and 5",
    ),
    "duplicate section": Case(
        text=SMALL + "data: {eval: x}\n", says=("`data` is set twice",), fix="remove one"
    ),
    "alias": Case(
        text="model: &m {scratch: {}}\ndata: *m\n",
        says=("my.yaml:2", "aliases"),
        fix="write the value itself",
    ),
    "python object": Case(
        text="model: !!python/object/apply:os.system [ls]\n",
        says=("tags are not read",),
        fix="my.yaml:1",
    ),
    "too deep": Case(
        text="model: " + "[" * 60 + "]" * 60 + "\n",
        says=("nested too deeply",),
        fix="miles help recipe",
    ),
    "absurdly deep": Case(
        text="model: " + "[" * 5000 + "]" * 5000 + "\n",
        says=("nested too deeply",),
        fix="miles help recipe",
    ),
    "a list as key": Case(text="? [a, b]\n: 1\n", says=("a key must be a word",), fix="key: value"),
    # unknown keys
    "unknown section": Case(
        text=SMALL + "trian: {steps: 1}\n",
        says=("`trian`", "my.yaml:3", "`train`"),
        fix="write `train` at my.yaml:3",
    ),
    "unknown key": Case(
        text=SMALL + "train:\n  stps: 1\n",
        says=("`train.stps`", "my.yaml:4"),
        fix="`train.steps` at my.yaml:4",
    ),
    "unknown deep key": Case(
        text=SMALL + "train: {optimizer: {Lr: 1}}\n",
        says=("`train.optimizer.Lr`",),
        fix="`train.optimizer.lr`",
    ),
    "key in the wrong section": Case(
        text=SMALL + "train: {lr: 1e-6}\n", says=("`train.lr`",), fix="`train.optimizer.lr`"
    ),
    "dotted key in a file": Case(text=SMALL + "train.steps: 5\n", says=("nested",), fix="train:"),
    "unknown --set": Case(
        sets=["rollout.temprature=1"],
        says=("--set rollout.temprature=1",),
        fix="--set rollout.temperature=1",
    ),
    "hopeless --set": Case(sets=["zzzz=1"], says=("`zzzz`",), fix="miles help recipe"),
    # types and ranges
    "text for a number": Case(
        sets=["train.steps=many"],
        says=("a whole number >= 1", "`many`"),
        fix="--set train.steps=100",
    ),
    "fraction for a count": Case(
        sets=["train.steps=1.5"], says=("`1.5`", "a whole number"), fix="--set train.steps="
    ),
    "zero steps": Case(
        sets=["train.steps=0"], says=("a whole number >= 1",), fix="--set train.steps="
    ),
    "true for a number": Case(
        sets=["train.steps=true"], says=("`true`",), fix="--set train.steps="
    ),
    "quoted number": Case(
        text=SMALL + 'train: {steps: "5"}\n',
        says=('`"5"`', "my.yaml:3"),
        fix="write `steps: 5` at my.yaml:3",
    ),
    "number for a flag": Case(
        sets=["weights.verify=1"], says=("true or false",), fix="--set weights.verify=false"
    ),
    "yes for a flag": Case(
        sets=["weights.verify=yes"], says=("true or false", "`yes`"), fix="--set weights.verify="
    ),
    "nan": Case(
        sets=["train.kl_coef=.nan"], says=("a number >= 0",), fix="--set train.kl_coef=0.0"
    ),
    "infinite": Case(
        sets=["train.optimizer.lr=1e999"], says=("`1e999`",), fix="--set train.optimizer.lr="
    ),
    "astronomic": Case(
        sets=["train.steps=" + "9" * 5000], says=("a whole number",), fix="--set train.steps="
    ),
    "wrong choice": Case(
        sets=["data.long_prompts=eror"],
        says=("drop, error",),
        fix="long_prompts=error",
    ),
    "null for a number": Case(
        sets=["train.steps=null"], says=("`null`",), fix="--set train.steps=100"
    ),
    "did not respond for a number": Case(
        sets=["train.steps="], says=("nothing",), fix="--set train.steps=100"
    ),
    "list for a number": Case(
        text=SMALL + "train: {steps: [1, 2]}\n", says=("`[1, 2]`",), fix="`steps: 100` at my.yaml:3"
    ),
    "mapping for a number": Case(
        text=SMALL + "train: {steps: {a: 1}}\n", says=("`train.steps`",), fix="my.yaml:3"
    ),
    "value for a section": Case(
        text=SMALL + "train: 5\n", says=("`train` is a section",), fix="miles help recipe"
    ),
    "text for a list": Case(
        sets=["rollout.stop=END"], says=("a list of texts",), fix="'rollout.stop=[END]'"
    ),
    "open list": Case(
        sets=["rollout.stop=[a"],
        says=("cannot be parsed", "a list of texts"),
        fix="--set 'rollout.stop=[TEXT]'",
    ),
    "no equals sign": Case(
        sets=["train.steps"], says=("is not a valid override",), fix="--set train.steps=VALUE"
    ),
    "no key": Case(sets=["=5"], says=("is not a valid override",), fix="--set train.steps=5"),
    # two voices
    "null and inside": Case(
        sets=["model.scratch=null", "model.scratch.topk=1"], says=("two different",), fix="keep"
    ),
    # who may say what
    "hyperparameter in env": Case(
        environ={"MILES_TRAIN__STEPS": "5"},
        says=("machine", "MILES_TRAIN__STEPS"),
        fix="unset MILES_TRAIN__STEPS",
    ),
    "unknown key in env": Case(
        environ={"MILES_MACHINE__GPU": "5"},
        says=("machine.gpu",),
        fix="export MILES_MACHINE__GPUS=5",
    ),
    "one underscore in env": Case(
        environ={"MILES_MACHINE_GPUS": "5"},
        says=("two underscores",),
        fix="export MILES_MACHINE__GPUS=5",
    ),
    "bad value in env": Case(
        environ={"MILES_MACHINE__GPUS": "all"},
        says=("MILES_MACHINE__GPUS", "`all`"),
        fix="export MILES_MACHINE__GPUS=",
    ),
    "hyperparameter in ./miles.yaml": Case(
        local="train: {steps: 5}\n", says=("`train`", "miles.yaml:1"), fix="miles.yaml"
    ),
    "hyperparameter in the home": Case(
        config="rollout: {}\n",
        says=("`rollout`", "~/.config/miles/config.yaml:1"),
        fix="config.yaml",
    ),
    "unknown key in ./miles.yaml": Case(
        local="machine: {gpu: 5}\n", says=("machine.gpu",), fix="`machine.gpus`"
    ),
    # rules over several keys
    "no model": Case(
        sets=["model.scratch=null"], says=("does not name a model",), fix="--set model.path="
    ),
    "two models": Case(
        sets=["model.path=Qwen/Qwen3-0.6B"],
        says=("two models",),
        fix="--set model.scratch=null --set warmup.steps=0 --set train.optimizer.lr=1e-6",
    ),
    "revision of nothing": Case(
        sets=["model.revision=main"], says=("revision",), fix="--set model.revision=null"
    ),
    "no prompts": Case(
        text="model: {scratch: {}}\n", says=("no prompts",), fix="--set data.prompts="
    ),
    "task without a name": Case(
        sets=["data.prompts=task:"], says=("does not name a task",), fix="task:sums"
    ),
    "experts missing": Case(
        sets=["model.scratch.family=qwen3_moe"], says=("needs experts",), fix="num_experts=8"
    ),
    "experts unwanted": Case(
        sets=["model.scratch.num_experts=8"], says=("dense",), fix="family=qwen3_moe"
    ),
    "more experts than there are": Case(
        text=MOE,
        sets=["model.scratch.topk=9", "model.scratch.tie_embeddings=false"],
        says=("9 of 8",),
        fix="topk=8",
    ),
    "heads": Case(
        sets=["model.scratch.num_kv_heads=3"],
        says=("4 heads cannot share 3",),
        fix="num_kv_heads=2",
    ),
    "odd head": Case(sets=["model.scratch.head_dim=31"], says=("even",), fix="head_dim=32"),
    "tiny vocabulary": Case(
        sets=["model.scratch.vocab_size=100"], says=("256 bytes",), fix="vocab_size=512"
    ),
    "too long": Case(
        sets=["rollout.max_response_tokens=4000"],
        says=("4256",),
        fix="max_position_embeddings=4256",
    ),
    "warm-up without answers": Case(
        sets=["warmup.steps=5"], says=("demonstrations",), fix="data.demonstrations=task:sums"
    ),
    "eval without prompts": Case(
        sets=["eval.every=5"], says=("held-out",), fix="--set eval.every=0"
    ),
    "top_k 0": Case(
        sets=["rollout.top_k=0"], says=("rollout.top_k",), fix="--set rollout.top_k=-1"
    ),
    "empty stop": Case(sets=["rollout.stop=['']"], says=("empty string",), fix="rollout.stop=[]"),
    "group of one": Case(
        sets=["rollout.samples_per_prompt=1"],
        says=("every advantage is 0",),
        fix="samples_per_prompt=8",
    ),
    "uneven updates": Case(
        sets=["train.updates_per_step=3"], says=("32 prompts",), fix="updates_per_step=2"
    ),
    "more updates than anybody counts": Case(
        sets=[f"rollout.prompts_per_step={10**30}", f"train.updates_per_step={10**30 - 1}"],
        says=("prompts",),
        fix="updates_per_step=1048576",
    ),
    "clip of one": Case(sets=["train.clip_low=1.0"], says=("clip_low",), fix="clip_low=0.2"),
    "endless lr warm-up": Case(
        sets=["train.optimizer.warmup_steps=100"], says=("never reach",), fix="warmup_steps=10"
    ),
    "rising lr": Case(sets=["train.optimizer.min_lr=1"], says=("min_lr 1",), fix="min_lr=0"),
    "beta of one": Case(sets=["train.optimizer.beta2=1.0"], says=("beta2",), fix="beta2=0.98"),
    "replay without experts": Case(
        sets=["train.routing_replay=true"], says=("no routing",), fix="routing_replay=false"
    ),
    "run name with a slash": Case(sets=["run.name=../x"], says=("`../x`",), fix="run.name=my-run"),
    "recipe name with a slash": Case(
        text=SMALL + "name: a/b\n", says=("`a/b`",), fix="--set name="
    ),
    "address without a port": Case(
        sets=["machine.address=host"], says=("HOST:PORT",), fix="address=host:6379"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_refused_in_three_parts(place: Place, name: str) -> None:
    case = CASES[name]
    if case.local:
        place.local(case.local)
    if case.config:
        place.config(case.config)
    with pytest.raises(RecipeError) as refusal:
        place.load(case.text, sets=case.sets, environ=case.environ)
    error = refusal.value
    assert error.exit_code is ExitCode.INVALID
    for words in case.says:
        assert words in f"{error.what}\n{error.why}", (words, error.what, error.why)
    assert any(case.fix in fix for fix in error.fixes), error.fixes
    assert "pydantic" not in str(error) and "Input should" not in str(error)
    assert error.__cause__ is None or error.__suppress_context__


def _with_fix(sets: list[str], fix: str, what: str) -> list[str]:
    """Return the texts of `--set` after a fix, which takes the place of one that it corrects: of
    the same key, or of the text that was refused."""
    words = shlex.split(fix, comments=True)
    new = [word for option, word in itertools.pairwise(words) if option == "--set"]
    names = {text.partition("=")[0] for text in new}
    names |= {text.partition("=")[0] for text in sets if f"`{text.partition('=')[0]}`" in what}
    kept = [text for text in sets if text.partition("=")[0] not in names]
    return [*(text for text in kept if f"--set {text}`" not in what), *new]


@pytest.mark.parametrize("name", CASES)
def test_each_setting_that_a_fix_names_mends_it(place: Place, name: str) -> None:
    case = CASES[name]
    if case.local or case.config or case.environ:
        return  # what those files and variables say is mended there
    with pytest.raises(RecipeError) as refusal:
        place.load(case.text, sets=case.sets)
    for fix in refusal.value.fixes:
        if fix.startswith("--set ") and not re.search(r"\b[A-Z]{4,}\b", fix.split("   #")[0]):
            try:
                place.load(case.text, sets=_with_fix(case.sets, fix, refusal.value.what))
            except RecipeError as again:
                assert again.what != refusal.value.what, fix


FILES = {
    "missing": (lambda path: None, "no file is there"),
    "a directory": (lambda path: path.mkdir(), "it is a directory"),
    "latin-1": (lambda path: path.write_bytes(b"name: caf\xe9\n"), "not UTF-8"),
    "binary": (lambda path: path.write_bytes(bytes(range(256))), "not UTF-8"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_refused(place: Place, name: str) -> None:
    from milescli.recipe.load import load

    make, why = FILES[name]
    make(place.cwd / "bad.yaml")
    with pytest.raises(RecipeError) as refusal:
        load("bad.yaml", environ={}, cwd=place.cwd, home=place.home)
    assert "bad.yaml" in refusal.value.what and why in refusal.value.why and refusal.value.fixes


def test_a_recipe_name_with_a_slip_finds_its_neighbour(place: Place) -> None:
    from milescli.recipe.load import load

    place.recipe()
    for name, fix in (
        ("quikstart", "miles launch --recipe quickstart"),
        ("my", "miles launch --recipe my.yaml"),
        ("", "miles recipes"),
    ):
        with pytest.raises(RecipeError) as refusal:
            load(name, environ={}, cwd=place.cwd, home=place.home)
        assert any(fix in item for item in refusal.value.fixes), refusal.value.fixes


@pytest.mark.parametrize(
    "name",
    [
        "not yaml",
        "unknown key",
        "null and inside",
        "hyperparameter in env",
        "top_k 0",
        "astronomic",
    ],
)
def test_the_program_says_so_and_ends_with_3(place: Place, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    command = [
        sys.executable,
        "-m",
        "milescli",
        "launch",
        "--recipe",
        place.recipe(case.text),
        "--dry-run",
    ]
    for text in case.sets:
        command += ["--set", text]
    environment = {**os.environ, **case.environ, "HOME": str(place.home)}
    done = subprocess.run(
        command, cwd=place.cwd, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 3
    assert done.stdout == ""
    assert (
        done.stderr.startswith("error: ")
        and "\n  why: " in done.stderr
        and "\n  fix: " in done.stderr
    )
    assert "Traceback" not in done.stderr
