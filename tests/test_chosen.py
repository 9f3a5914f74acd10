"""`make test` covers each capability; the table of what it leaves out names tests that exist."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.chosen import CHOSEN, ROOT

RUNS, LAYERS = "tests/end_to_end", "tests/backends/megatron"
COVERED = {
    "launch, resume, bit for bit": f"{RUNS}/test_life_of_a_run.py::"
    "test_a_run_that_was_killed_and_resumed_is_bit_for_bit_the_run_that_was_not",
    "eval": f"{RUNS}/test_eval_and_export.py::"
    "test_eval_of_a_checkpoint_gives_the_samples_of_the_run",
    "export": f"{RUNS}/test_eval_and_export.py::"
    "test_an_exported_folder_loads_in_transformers_and_gives_the_greedy_samples_of_the_run",
    "convert": "tests/conversion/test_stock.py::"
    "test_stock_megatron_loads_the_checkpoint_and_computes_what_transformers_does",
    "doctor": "tests/doctor/test_run.py::"
    "test_this_machine_is_ready_for_ray_an_engine_a_trainer_and_new_weights",
    "a real pretrained model": f"{RUNS}/real_models/test_smoke.py::"
    "test_it_is_checked_trained_saved_and_exported",
    "SFT, DPO, reward models": f"{RUNS}/test_learning_from_rows.py::test_a_run_learns_and_measures",
    "distillation": f"{RUNS}/test_distillation.py::"
    "test_a_run_that_learns_from_a_teacher_is_resumed_bit_for_bit",
    "PPO": f"{RUNS}/test_critic.py::"
    "test_a_resumed_run_has_the_critic_that_it_had_and_gives_it_away",
    "agents": f"{RUNS}/test_agents.py::test_a_dialogue_is_trained_on_token_by_token_and_resumes",
    "LoRA": f"{RUNS}/test_adapter.py::test_an_export_is_what_peft_puts_beside_the_base",
    "rollout beside training": f"{RUNS}/test_layouts.py::"
    "test_rollout_runs_ahead_within_the_bound_and_a_kill_loses_nothing_that_was_sampled",
    "plug-ins": f"{RUNS}/test_pieces.py::"
    "test_pieces_of_every_kind_are_called_and_a_resumed_run_is_the_same",
    "speculation": "tests/backends/sglang/inside/cpu/test_drafts.py::"
    "test_tokens_and_logprobs_are_those_of_an_engine_that_guesses_nothing",
    "exact on-policy": "tests/backends/sglang/test_exact.py::"
    "test_engine_and_trainer_are_equal_bit_for_bit",
    "deaths, hangs and Ctrl-C": f"{RUNS}/test_faults.py::"
    "test_what_dies_or_hangs_is_replaced_and_the_run_is_the_one_that_was_not_hurt",
    "several nodes": "tests/end_to_end/cluster/test_everywhere.py::"
    "test_every_node_answers_the_driver_first",
    "model families in the trainer": "tests/families/test_families.py::"
    "test_logits_equal_those_of_transformers",
    "model families in engines": "tests/backends/sglang/test_families.py::"
    "test_logprobs_and_experts_are_those_of_transformers_also_after_new_weights",
    "weights in pieces to several engines": "tests/backends/sglang/weights/test_shards.py::"
    "test_engines_of_two_ranks_hold_what_they_would_of_whole_tensors",
    "layouts": f"{LAYERS}/test_layouts.py::test_losses_over_three_steps_equal_those_of_one_process",
    "checkpoints under another layout": f"{LAYERS}/state/test_checkpoint.py::"
    "test_a_checkpoint_of_one_rank_goes_on_under_another_layout",
    "the live page": "tests/web/browser/test_walk.py::test_every_page_is_reached_by_mouse",
    "the sandbox": "tests/sandbox/test_local.py::test_whatever_was_written_is_removed",
}
"""Capability -> a test of it that `make test` runs."""


def _exists(key: str) -> bool:
    file, _, test = key.partition("::")
    path = ROOT / file
    if not test:
        return path.exists()
    return path.exists() and test in {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("key", CHOSEN)
def test_a_row_of_the_table_names_a_test(key: str) -> None:
    assert _exists(key)


@pytest.mark.parametrize("capability", COVERED)
def test_each_capability_has_a_test_each_time(capability: str) -> None:
    test = COVERED[capability]
    file = test.partition("::")[0]
    assert _exists(test)
    keys = (test, file, *(parent.as_posix() for parent in Path(file).parents))
    rows = [CHOSEN[key] for key in keys if key in CHOSEN]
    assert not rows or rows[0] != 0


def _sets(target: str) -> list[list[str]]:
    """Arguments of each pytest that a target of the Makefile begins."""
    command = ["make", "-n", target, "TESTS=", "SHELL=bash"]
    made = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
    )
    lines = [line for line in made.stdout.splitlines() if "-m pytest" in line]
    begun = [each for line in lines for each in re.findall(r"(?<=begin )\w+ (tests[^;]*);", line)]
    alone = [line.split(" -m thorough ")[1] for line in lines if "begin()" not in line]
    return [words.split() for words in [*begun, *alone]]


def _runs(file: Path, words: list[str]) -> bool:
    """Whether these arguments run a file: for pytest, what is ignored outweighs what is named."""
    above = {file.as_posix(), *(folder.as_posix() for folder in file.parents)}
    ignored = {word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")}
    return not ignored & above and bool({*words} & above)


def test_each_file_is_in_one_set_of_make_test_and_of_what_it_leaves_out() -> None:
    every, each_time = _sets("test-all"), _sets("test")
    assert len(each_time) == 3 and every[: len(each_time)] == each_time
    for path in (ROOT / "tests").rglob("test_*.py"):
        file = path.relative_to(ROOT)
        for sets in (each_time, every[len(each_time) :]):
            assert sum(_runs(file, words) for words in sets) == 1, (file, sets)
