"""What an engine that guesses ahead is started with, and what is refused before it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.backends.sglang.client.reply import PartialResponse, read_reply
from milescli.backends.sglang.launch.command import engine_command, engine_environment
from milescli.backends.sglang.launch.server import EngineServer
from milescli.backends.sglang.launch.spec import EngineSpec, check_speculates
from milescli.backends.sglang.launch.speculation import Speculation
from milescli.backends.sglang.plugin import PIECES_VARIABLE
from milescli.core.errors import MachineError, MilesError, RecipeError
from milescli.core.types import Guesses
from milescli.rollout.base import GenerateRequest
from tests.backends.sglang.launch.test_server import spec
from tests.families.cases import ALL


def _spec(folder: Path, kind: str, *, case: str | None = None, **options) -> EngineSpec:
    draft = folder / "draft"
    if kind == "draft":
        draft.mkdir(exist_ok=True)
        vocab = {"vocab_size": options.pop("draft_vocab", 131)}
        spec(draft, model_type=options.pop("draft_type", "qwen3"), config=vocab)
    wanted = Speculation(kind=kind, num_guesses=3, draft_dir=draft if kind == "draft" else None)
    made = spec(folder, speculation=wanted, **options)
    if case is not None:
        (folder / "config.json").write_text(json.dumps(ALL[case].config))
    return made


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("ngram", ["NGRAM", "--speculative-num-draft-tokens 4"]),
        ("draft", ["STANDALONE", "--speculative-num-steps 3", "--speculative-eagle-topk 1"]),
        ("mtp", ["EAGLE", "--speculative-num-steps 3", "--speculative-num-draft-tokens 4"]),
    ],
)
def test_each_kind_is_an_algorithm_of_sglang(tmp_path: Path, kind: str, flags: list[str]) -> None:
    made = _spec(tmp_path, kind, case="deepseek-v3-nextn" if kind == "mtp" else None)
    command = " ".join(engine_command(made))
    assert f"--speculative-algorithm {flags[0]}" in command
    assert all(flag in command for flag in flags[1:])
    assert ("--speculative-draft-model-path" in command) == (kind == "draft")
    environment = engine_environment(made)
    assert "drafts" in environment[PIECES_VARIABLE].split(",")
    others = environment["SGLANG_DISABLED_MODEL_ARCHS"].split(",")
    assert ("deepseek_nextn" in others) == (kind != "mtp")


def test_weights_that_guess_survive_the_sleep_of_an_engine_on_a_gpu(tmp_path: Path) -> None:
    kept = "--enable-draft-weights-cpu-backup"
    assert kept in engine_command(_spec(tmp_path, "draft", device_kind="cuda"))
    assert kept not in engine_command(_spec(tmp_path, "ngram", device_kind="cuda"))


@pytest.mark.parametrize(
    ("kind", "options", "error", "what"),
    [
        ("ngram", {"device_kind": "rocm"}, MachineError, "engines on ROCm cannot speculate"),
        ("ngram", {"model_type": "gpt_oss"}, MachineError, "`gpt_oss` cannot speculate"),
        ("ngram", {"model_type": "gemma3_text"}, MachineError, "`gemma3_text` cannot speculate"),
        ("draft", {"draft_type": "gpt_oss"}, MachineError, "draft model of type `gpt_oss`"),
        ("draft", {"draft_type": "qwen3_5"}, RecipeError, "draft model of type `qwen3_5`"),
        ("draft", {"draft_type": "qwen3_moe"}, RecipeError, "draft model of type `qwen3_moe`"),
        (
            "ngram",
            {"return_routed_experts": True, "device_kind": "cuda"},
            MachineError,
            "replayed for tokens that were guessed on CUDA",
        ),
        (
            "mtp",
            {"return_routed_experts": True, "device_kind": "cuda"},
            MachineError,
            "replayed for tokens that were guessed on CUDA",
        ),
        ("draft", {"draft_vocab": 7}, RecipeError, "another vocabulary"),
        ("mtp", {}, RecipeError, "has no multi-token-prediction layer"),
        ("mtp", {"config": {"num_nextn_predict_layers": 1}}, RecipeError, "has no multi-token"),
        ("mtp", {"model_type": "mimo"}, RecipeError, "this `mimo` model has no multi-token"),
    ],
)
def test_what_would_not_be_right_is_refused_by_name(
    tmp_path: Path, kind: str, options: dict, error: type[MilesError], what: str
) -> None:
    with pytest.raises(error, match=what):
        check_speculates(_spec(tmp_path, kind, **options))


def test_on_a_gpu_what_was_not_tried_on_a_cpu_is_left_to_sglang(tmp_path: Path) -> None:
    check_speculates(_spec(tmp_path, "ngram", model_type="gpt_oss", device_kind="cuda"))


@pytest.mark.parametrize("kind", ["ngram", "mtp"])
def test_states_of_layers_are_kept_for_each_guess(tmp_path: Path, kind: str) -> None:
    made = _spec(tmp_path, kind, case="qwen3-5")
    check_speculates(made)
    environment = engine_environment(made)
    assert {"delta", "drafts", "states"} <= set(environment[PIECES_VARIABLE].split(","))
    others = environment["SGLANG_DISABLED_MODEL_ARCHS"].split(",")
    assert ("qwen3_5_mtp" in others) == (kind != "mtp")


def test_a_machine_that_cannot_build_the_table_of_ngrams_is_told_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match=r"engine 0 cannot use n-grams") as caught:
        EngineServer(_spec(tmp_path, "ngram"))
    assert "no `c++` and no `ninja`" in caught.value.why
    EngineServer(_spec(tmp_path, "draft"))


def test_what_was_guessed_is_summed_over_the_parts_of_a_response() -> None:
    response = PartialResponse(request=GenerateRequest(prompt_ids=[1], max_new_tokens=9))
    meta = {
        "finish_reason": {"type": "abort"},
        "weight_version": "0",
        "output_token_logprobs": [[-1.0, 5, None]],
        "spec_verify_ct": 2,
        "spec_num_proposed_drafts": 6,
        "spec_num_correct_drafts": 1,
    }
    for _ in range(2):
        response.extend(read_reply({"output_ids": [5], "meta_info": meta}))
    done = response.completion(read_reply({"meta_info": meta | {"output_token_logprobs": []}})
                               .stop_reason, routing_shape=None)  # fmt: skip
    assert done.guesses == Guesses(num_passes=4, num_guessed=12, num_right=2)
