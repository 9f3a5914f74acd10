"""`train.on_policy: exact` between a real engine and a real trainer on a CPU: the log-probs of
prompts and responses are equal bit for bit, whatever the requests that were computed together, the
chunks of a prompt, and the threads of either side."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milescli.backends.sglang.client.http import EngineHttp
from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.core.types import EngineAddress
from milescli.platform.ports import free_ports
from tests.backends.sglang.warm_engines import engine_of
from tests.families.making import randomise
from tests.forked import ROOT

pytestmark = pytest.mark.engine
SMOLLM2 = Path("/tmp/models/smollm2-135m")
DENSE = {
    "vocab_size": 307,
    "hidden_size": 72,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "sliding_window": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
MODELS = {
    "llama": {"model_type": "llama", **DENSE},
    "mistral": {"model_type": "mistral", **DENSE},
    "qwen2": {"model_type": "qwen2", **DENSE, "tie_word_embeddings": True, "hidden_size": 144},
    "qwen3": {"model_type": "qwen3", **DENSE, "tie_word_embeddings": True},
    "large-vocabulary": {"model_type": "qwen3", **DENSE, "vocab_size": 40_001},
    "qwen3_moe": {"model_type": "qwen3_moe", **DENSE, **EXPERTS, "norm_topk_prob": True},
    "qwen3_moe-plain": {"model_type": "qwen3_moe", **DENSE, **EXPERTS, "norm_topk_prob": False},
}
"""Shapes that no block of a kernel divides."""
MOST_TOKENS = 160


def folder_of(name: str, root: Path) -> Path:
    if name == "smollm2-135m":
        if not SMOLLM2.is_dir():
            pytest.skip(f"{SMOLLM2} is not there")
        return SMOLLM2
    import transformers

    fields = dict(MODELS[name])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    randomise(list(model.named_parameters()))
    model.save_pretrained(root / "model")
    return root / "model"


def sampled(spec: EngineSpec, *, prompts: list[list[int]], temperature: float) -> list[dict]:
    """Responses of different lengths to all prompts, some of which come while others are
    decoded."""
    address = EngineAddress(url=spec.url, tp=1)

    async def respond(http: EngineHttp, number: int, prompt: list[int]) -> dict:
        await asyncio.sleep(0.02 * (number % 4))
        sampling = {
            "max_new_tokens": 8 + 5 * (number % 5),
            "temperature": temperature,
            "ignore_eos": True,
            "sampling_seed": number,
        }
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        # of a prompt SGLang gives log-probs at temperature 1
        body["logprob_start_len"] = 0 if temperature == 1.0 else -1
        return await http.order(address, "/generate", body, timeout_s=300)

    async def all_of_them() -> list[dict]:
        http = EngineHttp([address], caller="the test")
        try:
            return await asyncio.gather(*(respond(http, *each) for each in enumerate(prompts)))
        finally:
            await http.close()

    return asyncio.run(all_of_them())


CASES = [
    *((name, precision, 1, 1, 1.0) for precision in ("fp32", "bf16") for name in MODELS),
    ("qwen3", "fp32", 2, 1, 0.7),
    ("qwen3", "bf16", 1, 2, 0.7),
    ("large-vocabulary", "fp32", 2, 2, 1.0),
    ("qwen3_moe", "fp32", 2, 2, 0.7),
    ("qwen3_moe", "bf16", 2, 1, 1.0),
    ("smollm2-135m", "fp32", 2, 1, 1.0),
    ("smollm2-135m", "bf16", 2, 1, 1.0),
]


@pytest.mark.parametrize(
    ("name", "precision", "engine_threads", "trainer_threads", "temperature"), CASES
)
def test_engine_and_trainer_are_equal_bit_for_bit(
    name, precision, engine_threads, trainer_threads, temperature, tmp_path
) -> None:
    folder, draw = folder_of(name, tmp_path), random.Random(0)
    shared = [draw.randrange(3, 300) for _ in range(21)]
    lengths = (1, 2, 5, 7, 31, 64, 100)
    prompts = [[draw.randrange(3, 300) for _ in range(length)] for length in lengths]
    prompts += [shared, shared, [*shared, 5, 6]]
    spec = EngineSpec(
        model_dir=folder,
        tokenizer_dir=None,
        device_kind="cpu",
        precision=precision,
        port=free_ports(1)[0],
        log_path=tmp_path / "engine.log",
        max_total_tokens=4096,
        context_length=256,
        cpu_threads=engine_threads,
        exact=True,
        extra_args=("--chunked-prefill-size", "48"),
    )
    server = engine_of(spec)
    server.start()
    try:
        server.wait_ready(400)
        replies = sampled(spec, prompts=prompts, temperature=temperature)
    finally:
        server.stop()
    metas = [reply["meta_info"] for reply in replies]
    made = [meta["output_token_logprobs"] for meta in metas]
    rows = [[*prompt, *(e[1] for e in each)] for prompt, each in zip(prompts, made, strict=True)]
    request = {
        "folder": str(folder),
        "precision": precision,
        "threads": trainer_threads,
        "temperature": temperature,
        "rows": rows,
    }
    trained = by_trainer(request, tmp_path)
    for meta, each, row, trainer in zip(metas, made, rows, trained, strict=True):
        given = [entry[0] for entry in meta.get("input_token_logprobs", ())[1:]]
        said = torch.tensor([*given, *(entry[0] for entry in each)])
        assert len(said) == (len(row) - 1 if temperature == 1.0 else len(each))
        apart = (said - trainer[-len(said) :]).abs()
        assert int((apart != 0).sum()) == 0, f"{apart.max():.1e} at most"


def by_trainer(request: dict, root: Path) -> list[torch.Tensor]:
    """[tokens - 1] log-probs of each row, several rows in a microbatch."""
    out = root / "scores.safetensors"
    request |= {"microbatch_tokens": MOST_TOKENS, "out": str(out)}
    (root / "request.json").write_text(json.dumps(request))
    command = [sys.executable, "-m", "tests.backends.sglang.exact_scorer", "request.json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    scores = load_file(out)
    return [scores[str(index)] for index in range(len(request["rows"]))]
