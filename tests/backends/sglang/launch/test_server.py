"""What an engine's process is given, what is refused before it starts, and what is left when it
ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from milescli.backends.sglang.client.http import EngineDied
from milescli.backends.sglang.launch.command import (
    PREFILL_TOKENS,
    engine_command,
    engine_environment,
    own_environment,
)
from milescli.backends.sglang.launch.server import PER_SECOND, EngineServer, Recorder
from milescli.backends.sglang.launch.spec import EngineSpec, check_servable
from milescli.backends.sglang.plugin import PIECES_VARIABLE
from milescli.core.errors import MachineError, RecipeError, WorkerDied
from milescli.models.scratch import make_model
from milescli.platform.environment import KERNEL_CACHES, NUM_KERNELS
from milescli.profiling.summary import LOOP, read_stacks, split
from milescli.recipe.model import ScratchModel
from milescli.rollout.base import Completion, GenerateRequest
from tests.backends.sglang.conftest import make_qwen3, start_service
from tests.backends.sglang.warm_engines import engine_of

CONFIG = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}


def spec(
    folder: Path,
    *,
    model_type: str = "qwen3",
    tied: bool = False,
    config: dict | None = None,
    **options,
) -> EngineSpec:
    whole = {**CONFIG, "model_type": model_type, "tie_word_embeddings": tied, **(config or {})}
    (folder / "config.json").write_text(json.dumps(whole))
    defaults = {
        "device_kind": "cpu",
        "precision": "fp32",
        "tokenizer_dir": None,
        "port": 1,
        "log_path": folder / "engine.log",
    }
    return EngineSpec(model_dir=folder, **(defaults | options))


def words_of(command: list[str], flag: str) -> str | None:
    return command[command.index(flag) + 1] if flag in command else None


def test_an_accelerator_gets_the_attention_and_the_graphs_that_the_recipe_names(tmp_path):
    pinned = spec(
        tmp_path, device_kind="cuda", attention_backend="triton", extra_args=("--tool=x",)
    )
    command = engine_command(pinned)
    assert words_of(command, "--attention-backend") == "triton"
    assert command[-1] == "--tool=x" and "--disable-cuda-graph" not in command
    assert "--disable-prefill-cuda-graph" in command
    bare = engine_command(spec(tmp_path, device_kind="cuda", cuda_graphs=False))
    assert "--attention-backend" not in bare and "--disable-cuda-graph" in bare
    # deterministic inference would take CUDA's there
    rocm = engine_command(spec(tmp_path, device_kind="rocm"))
    assert words_of(rocm, "--attention-backend") == "triton"
    on_cpu = engine_command(spec(tmp_path, attention_backend="triton"))
    assert words_of(on_cpu, "--attention-backend") == "torch_native"


def test_an_accelerator_that_records_experts_takes_kernels_that_tell_them(tmp_path):
    recorded = engine_command(spec(tmp_path, device_kind="cuda", return_routed_experts=True))
    assert words_of(recorded, "--moe-runner-backend") == "triton"
    assert "--enable-return-routed-experts" in recorded
    assert "--moe-runner-backend" not in engine_command(spec(tmp_path, device_kind="cuda"))


def test_on_a_cpu_no_prompt_is_cut_where_the_context_is_as_short_as_a_prefill(tmp_path):
    short = engine_command(spec(tmp_path, context_length=PREFILL_TOKENS))
    assert int(words_of(short, "--max-prefill-tokens")) == PREFILL_TOKENS
    assert int(words_of(short, "--chunked-prefill-size")) > PREFILL_TOKENS
    for other in ({"context_length": PREFILL_TOKENS + 1}, {"device_kind": "cuda"}):
        command = engine_command(spec(tmp_path, **other))
        assert "--max-prefill-tokens" not in command and "--chunked-prefill-size" not in command


def test_kernels_without_flash_attention_are_not_asked_for_it(tmp_path, monkeypatch):
    package = tmp_path / "site/sgl_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)
    command = engine_command(spec(tmp_path, device_kind="cuda"))
    assert words_of(command, "--attention-backend") == "triton"
    (package / "flash_ops.abi3.so").touch()
    command = engine_command(spec(tmp_path, device_kind="cuda"))
    assert words_of(command, "--attention-backend") is None


def test_a_model_that_is_not_proven_on_a_cpu_is_refused_there_and_only_there(tmp_path):
    with pytest.raises(MachineError, match="nemotron_h"):
        EngineServer(spec(tmp_path, model_type="nemotron_h"))
    assert (
        check_servable(spec(tmp_path, model_type="nemotron_h", device_kind="cuda")) == "nemotron_h"
    )


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_experts_with_a_tied_output_layer_are_refused(tmp_path, device_kind):
    with pytest.raises(RecipeError, match="qwen3_moe") as caught:
        EngineServer(spec(tmp_path, model_type="qwen3_moe", tied=True, device_kind=device_kind))
    assert "tied" in caught.value.why
    EngineServer(spec(tmp_path, model_type="qwen3", tied=True))


def test_quantised_weights_are_computed_on_a_cpu_by_a_piece_or_refused(tmp_path):
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for config, is_there in ((quantised, True), ({}, False)):
        pieces = own_environment(spec(tmp_path, config=config))[PIECES_VARIABLE].split(",")
        assert ("quantised" in pieces) == is_there
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(MachineError, match="quantised"):
        EngineServer(spec(tmp_path, config=quantised))
    EngineServer(spec(tmp_path, config=quantised, device_kind="cuda"))


def test_an_engine_that_sees_images_keeps_few_kernels(tmp_path):
    make_model(ScratchModel(family="qwen2_5_vl"), tmp_path / "seeing", 0)
    seeing = replace(spec(tmp_path), model_dir=tmp_path / "seeing")
    for one, expected in ((seeing, {NUM_KERNELS}), (spec(tmp_path), {None})):
        environment = own_environment(one)
        assert {environment.get(name) for name in KERNEL_CACHES} == expected


def test_a_window_that_sglang_does_not_heed_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="mistral") as caught:
        EngineServer(spec(tmp_path, model_type="mistral", config={"sliding_window": 6}))
    assert "window" in caught.value.why
    EngineServer(spec(tmp_path, model_type="mistral", config={"sliding_window": None}))


def test_what_transformers_leaves_out_of_config_json_is_told_to_sglang(tmp_path):
    command = engine_command(
        spec(
            tmp_path,
            model_type="deepseek_v3",
            device_kind="cuda",
            config={"scoring_func": "sigmoid"},
        )
    )
    fields = json.loads(command[command.index("--json-model-override-args") + 1])
    assert fields == {
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "architectures": ["DeepseekV3ForCausalLM"],
    }
    named = {"architectures": ["Qwen3ForCausalLM"]}
    assert "--json-model-override-args" not in engine_command(spec(tmp_path, config=named))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="not a Hugging Face model folder"):
        check_servable(
            EngineSpec(
                model_dir=tmp_path,
                tokenizer_dir=None,
                device_kind="cpu",
                precision="fp32",
                port=1,
                log_path=tmp_path,
            )
        )


def test_threads_of_a_cpu_engine_sleep_while_they_wait_and_nothing_is_compiled(tmp_path):
    env = engine_environment(spec(tmp_path, cpu_threads=2))
    assert (env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"], env["TORCH_COMPILE_DISABLE"]) == (
        "2",
        "PASSIVE",
        "1",
    )
    assert "--sleep-on-idle" in engine_command(spec(tmp_path))


def test_a_server_waits_for_no_core_dump_that_nobody_makes(tmp_path, monkeypatch):
    name = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
    assert engine_environment(spec(tmp_path))[name] == "0"
    monkeypatch.setenv("CUDA_ENABLE_USER_TRIGGERED_COREDUMP", "1")
    assert name not in engine_environment(spec(tmp_path))


def test_only_the_needed_part_of_the_model_zoo_is_loaded(tmp_path):
    skipped = engine_environment(spec(tmp_path))["SGLANG_DISABLED_MODEL_ARCHS"].split(",")
    assert "qwen3" not in skipped
    assert len(skipped) > 100


def test_each_engine_rank_on_a_cpu_is_given_cores(tmp_path):
    shares = engine_environment(spec(tmp_path, tp=2))["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert len(shares) == 2
    assert {int(core) for share in shares for core in share.split(",")} <= os.sched_getaffinity(0)


def test_an_engine_over_several_nodes_is_told_where_its_ranks_meet(tmp_path):
    command = engine_command(
        spec(tmp_path, tp=4, num_nodes=2, node_rank=1, init_address="10.0.0.1:23000")
    )
    flags = {
        command[index]: command[index + 1]
        for index, word in enumerate(command)
        if word in ("--nnodes", "--node-rank", "--dist-init-addr")
    }
    assert flags == {"--nnodes": "2", "--node-rank": "1", "--dist-init-addr": "10.0.0.1:23000"}
    assert "--nnodes" not in engine_command(spec(tmp_path))
    with pytest.raises(AssertionError, match="2 nodes without an address"):
        engine_command(spec(tmp_path, tp=4, num_nodes=2))


def test_each_node_of_an_engine_deals_its_cores_to_its_own_ranks(tmp_path):
    env = engine_environment(
        spec(tmp_path, tp=4, num_nodes=2, node_rank=1, init_address="10.0.0.1:23000")
    )
    assert len(env["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2


@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        ("cuda", {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ("rocm", {"HIP_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}),
    ],
)
def test_an_engine_on_a_gpu_sees_its_own_devices_and_no_cpu_stubs(tmp_path, kind, variables):
    env = engine_environment(spec(tmp_path, device_kind=kind, visible_devices=("2", "3")))
    assert variables.items() <= env.items()
    assert "cpu_path" not in env.get("PYTHONPATH", "")
    command = engine_command(spec(tmp_path, device_kind=kind))
    assert "--enable-memory-saver" in command
    assert "torch_native" not in command


@pytest.mark.engine
def test_an_engine_that_dies_is_named_and_nothing_of_it_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("MILES_RUN_TOKEN", "token-of-this-test")
    running = start_service(tmp_path, make_qwen3(tmp_path), name="engine 7", is_forked=False)
    group = [
        psutil.Process(running.engine.pid),
        *psutil.Process(running.engine.pid).children(recursive=True),
    ]
    temp_dir = Path(group[0].environ()["TMPDIR"])
    try:
        assert len(group) >= 3
        assert all(
            process.environ()["MILES_RUN_TOKEN"] == "token-of-this-test" for process in group
        )

        async def die_in_the_middle(fleet):
            requests = [
                GenerateRequest(prompt_ids=[5, 6, 7], max_new_tokens=900, seed=seed, stop=["never"])
                for seed in range(64)
            ]
            tasks = [asyncio.create_task(fleet.generate(request)) for request in requests]
            await asyncio.sleep(0.5)
            for process in group:
                process.send_signal(signal.SIGKILL)
            return await asyncio.gather(*tasks, return_exceptions=True)

        outcomes = running.run(die_in_the_middle)
        unanswered = [outcome for outcome in outcomes if not isinstance(outcome, Completion)]
        assert unanswered, "the engine had answered everything before it was killed"
        assert {type(outcome) for outcome in unanswered} == {EngineDied}, unanswered
        assert "engine 7" in unanswered[0].what
        assert "Prefill batch" in unanswered[0].why
    finally:
        running.engine.stop()
    assert running.engine.poll() is not None
    assert not any(
        process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in group
    )
    assert not temp_dir.exists()


@pytest.mark.engine
def test_an_engine_that_cannot_start_is_named_with_its_last_words(tmp_path):
    server = engine_of(spec(tmp_path))
    server.start()
    try:
        with pytest.raises(WorkerDied, match="engine 0 ended while it started") as caught:
            server.wait_ready(200)
    finally:
        server.stop()
    assert "Error" in caught.value.why


PROGRAM = f"""
import time
def {LOOP}_of_a_test():
    print("begun", flush=True)
    on_idle()
def on_idle():
    time.sleep(60)
{LOOP}_of_a_test()
"""
RECORD_S = 4.0


@pytest.mark.timeout(240)
def test_a_record_has_the_stacks_of_a_process_and_is_the_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "engine_0.stacks.txt"
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as looked_at:
        try:
            assert looked_at.stdout is not None and looked_at.stdout.readline() == b"begun\n"
            recorder = Recorder(looked_at.pid, file)
            time.sleep(RECORD_S)
            error = recorder.stop()
            assert looked_at.poll() is None, "it is looked at from outside"
        finally:
            looked_at.kill()
    if error is not None and "ermission" in error:
        pytest.skip(f"this system does not let py-spy look: {error}")
    assert error is None
    assert file.stat().st_mode & 0o077 == 0
    assert 0 < sum(count for _, count in read_stacks(file.read_text())) <= 30 * PER_SECOND
    assert split(file.read_text()).shares == {"idle": 1.0}


@pytest.mark.timeout(240)
def test_of_a_process_that_is_gone_the_error_is_told(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(timeout=120)
    recorder = Recorder(gone.pid, tmp_path / "engine_0.stacks.txt")
    time.sleep(RECORD_S)
    said = recorder.stop()
    assert said is not None and said.startswith("py-spy: ")
