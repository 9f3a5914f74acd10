"""What is loaded when: help, completion and refusals load none of the heavy libraries. Each case is
a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from milescli.data.scratch_tokenizer import make_scratch_tokenizer

pytestmark = pytest.mark.slow

HEAVY = ("torch", "ray", "sglang", "megatron", "transformers", "numpy", "huggingface_hub")
VERBS = (
    "launch",
    "resume",
    "eval",
    "export",
    "convert",
    "models",
    "data",
    "doctor",
    "recipes",
    "runs",
    "ui",
    "mcp",
    "help",
)

PROBE = """
import json, sys
from milescli.commands.app import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
loaded = [name for name in {heavy!r} if name in sys.modules]
sys.stderr.write("\\nLOADED " + json.dumps([code, loaded]))
"""


def loaded_after(*argv: str, **environment: str) -> tuple[int, list[str], str]:
    """(exit code, heavy libraries that are loaded, stdout) of one command line."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(heavy=HEAVY), *argv],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )
    assert "LOADED " in done.stderr, done.stderr
    code, heavy = json.loads(done.stderr.rpartition("LOADED ")[2])
    return code or 0, heavy, done.stdout


@pytest.mark.parametrize(
    "verb", [[], *([name] for name in VERBS)], ids=lambda verb: " ".join(verb) or "miles"
)
def test_help_loads_nothing_heavy(verb: list[str]) -> None:
    code, heavy, stdout = loaded_after(*verb, "--help")
    assert (code, heavy) == (0, [])
    assert "Usage" in stdout


@pytest.mark.parametrize(
    "argv",
    [[], ["recipes"], ["help", "recipe"], ["recipes", "show", "quickstart"], ["--version"]],
    ids=" ".join,
)
def test_pages_load_nothing_heavy(argv: list[str]) -> None:
    assert loaded_after(*argv)[:2] == (0, [])


DRIVER = """
import sys
import milescli.runtime.resume, milescli.runtime.train
from milescli.data.tokenizer import load_tokenizer
from milescli.recipe.schema import Recipe
from milescli.train.objectives import load_objective
for name in ("policy", "supervised", "preference", "reward_model"):
    load_objective(name, Recipe())
assert load_tokenizer(sys.argv[1]).decode([260])
loaded = "torch" in sys.modules
from milescli.train.kl import torch
assert torch.zeros(1).exp().item() == 1.0
sys.exit(loaded)
"""


def test_a_driver_loads_no_torch(tmp_path: Path) -> None:
    """Neither for an objective, of which it asks what it needs, nor for a tokenizer; and what
    computes finds it afterwards."""
    folder = make_scratch_tokenizer(["7 + 5 = 12"] * 8, 512, tmp_path)
    subprocess.run([sys.executable, "-c", DRIVER, folder], timeout=200, check=True)


def test_conversion_and_export_load_no_megatron() -> None:
    probe = (
        "import sys, milescli.conversion.convert, milescli.runtime.export; sys.exit('megatron' "
        "in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe], timeout=200, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "offers"),
    [
        ("miles la", "launch"),
        ("miles launch --recipe quick", "quickstart-moe"),
        ("miles launch --set train.optimizer.l", "train.optimizer.lr="),
        ("miles resume ", ""),
    ],
)
def test_completion_loads_nothing_heavy(words: str, offers: str) -> None:
    typed = words.split(" ")
    code, heavy, stdout = loaded_after(
        _MILES_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(typed) - 1)
    )
    assert (code, heavy) == (0, [])
    assert offers in stdout


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["launch", "--recipe", "nothing"], 3),
        (["launch", "--recipe", "quickstart", "--set", "train.stps=3"], 3),
        (["launch", "--recipe", "quickstart", "--set", "train.steps=many"], 3),
        (["launch", "--recipe", "quickstart", "--set", "train.surrogate=ppo_clop"], 3),
        (["launch", "--recipe", "quickstart", "--set", "data.prompts=nothing.jsonl"], 3),
        (["launch"], 2),
        (["eval", "no-such-run"], 6),
        (["data", "check", "nothing.jsonl"], 3),
        (["data", "check", os.devnull], 3),
        (["data", "check", "quickstart", "--set", "data.eval=nothing.jsonl"], 3),
        (["doctor", "--recipe", "nothing"], 3),
        (["convert", "hf-to-megatron", "somewhere"], 2),
        (["convert", "megatron-to-hf", "a", "b", "--max-shard-size", "big"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_refusals_come_before_anything_heavy(argv: list[str], code: int) -> None:
    assert loaded_after(*argv)[:2] == (code, [])


def test_a_dry_run_loads_nothing_heavy() -> None:
    assert loaded_after("launch", "--recipe", "quickstart", "--dry-run")[:2] == (0, [])


TRAP = """
import os
from pathlib import Path
Path(os.environ["TORCH_WAS_ASKED"]).touch()
raise ImportError("the trap of a test")
"""
OWN = (
    "launch --recipe quickstart --dry-run --set model.scratch=null --set warmup.steps=0 "
    "--set data.eval=null --set eval.every=0 --set train.optimizer.lr=1e-4 --set model.path="
)
PROMPTS = "--set data.prompts=prompts.jsonl"
ROWS = "--set data.prompts=null --set data.train=rows.jsonl --set train.objective="


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a model, a run, an adapter and a `torch` that no process may import."""
    from milescli.data.scratch_tokenizer import make_scratch_tokenizer
    from milescli.export.adapter import adapter_of, write_adapter
    from milescli.models import adapter, load_facts, scratch, table
    from milescli.recipe.model import ScratchModel
    from tests.checkpoint.making import add_checkpoint, make_run
    from tests.conversion.making import to_megatron

    place = tmp_path_factory.mktemp("inputs")
    rows = [
        {"prompt": f"What is {n} + 1?", "chosen": str(n + 1), "rejected": "none"} for n in range(8)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"question": row["prompt"], "answer": row["chosen"]} for row in rows]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    model = make_scratch_tokenizer([str(row) for row in rows], 300, place / "model")
    scratch.make_model(ScratchModel(vocab_size=300, max_position_embeddings=1024), model, 0)
    to_megatron(model, place / "converted")
    run = make_run(place / "runs" / "mine", model_dir=model)
    add_checkpoint(run, 2, tensors=place / "converted" / "release")
    shape = adapter.LoraShape(rank=4, alpha=8, targets=("q_proj", "v_proj"))
    of_adapter = adapter.adapter_table(table(load_facts(model)), shape)
    import torch

    zeros = {name: torch.zeros(size) for name, size in of_adapter.hf_shapes().items()}
    made = adapter_of(zeros, of_adapter, shape, base_model=model)
    write_adapter(place / "adapter", made)
    (place / "trap" / "torch").mkdir(parents=True)
    (place / "trap" / "torch" / "__init__.py").write_text(TRAP)
    return place


@pytest.mark.parametrize(
    "sets",
    [
        f"model {PROMPTS} --set model.adapter=adapter --lora 4 --set train.lora.alpha=8 "
        "--set train.lora.targets=[q_proj,v_proj]",
        f"runs/mine {PROMPTS}",
        f"model {PROMPTS} --set rollout.reward=math --set train.algorithm=ppo",
        f"model {PROMPTS} --set rollout.agent=tools --set rollout.tools=[calculator]",
        f"model {ROWS}preference",
        f"model {ROWS}supervised --set data.response_key=chosen",
    ],
)
def test_no_process_of_a_dry_run_imports_torch(
    inputs: Path, sets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs)
    marker = tmp_path / "asked"
    path = os.pathsep.join([str(inputs / "trap"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "milescli", *(OWN + sets).split()],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": path, "TORCH_WAS_ASKED": str(marker)},
    )
    assert done.returncode == 0, done.stderr
    assert "nothing was started" in done.stderr
    assert not marker.exists()


def test_a_worker_of_a_reward_loads_no_schema() -> None:
    probe = "import sys, milescli.rollout.rewards.forms; print('pydantic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout == "False\n"
