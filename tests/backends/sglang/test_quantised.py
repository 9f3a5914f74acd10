"""Quantised folders on real engines: log-probs are those of transformers with the dequantised
weights, at the start and after new bytes were sent by each channel; and `verify` sees a wrong
byte."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from milescli.backends.sglang.client.http import EngineHttp
from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.backends.sglang.weights.channels import DistributedChannel, TensorChannel
from milescli.checkpoint.formats import fp4, fp8_block, int4, mxfp8
from milescli.checkpoint.formats.base import Codec
from milescli.checkpoint.formats.schemes import FP8, int4_scheme
from milescli.checkpoint.source import open_source
from milescli.core.errors import MismatchError
from milescli.core.types import EngineAddress
from milescli.export.config import quantization_config
from milescli.export.folder import write_folder
from milescli.platform.ports import free_ports
from tests.backends.sglang.warm_engines import engine_of
from tests.buckets import into_buckets
from tests.export.models import (
    DEEPSEEK_V3,
    QWEN3,
    QWEN3_MOE,
    make_base,
    reader_of,
    table_of,
    tensors_of,
)

pytestmark = pytest.mark.engine
LARGEST = 1e-5
"""Difference of log-probs in float32."""
PROMPT, TOKENS = list(range(10, 40)), 16
PACKED = (torch.float8_e4m3fn, torch.uint8, torch.int32)
BUCKET_BYTES = 40_000
"""Ends between values and their scales."""
DENSE = {
    **QWEN3,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "tie_word_embeddings": False,
}
ODD = {**DENSE, "num_key_value_heads": 2, "intermediate_size": 192}
"""Blocks of 128 divide neither the 64 rows of keys and values nor the MLP's 192."""
LLAMA = {
    **DENSE,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 160,
}
MOE = {
    **QWEN3_MOE,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "mlp_only_layers": [],
}
NARROW = {**MOE, "moe_intermediate_size": 48}
"""SGLang pads 48 to 64 on a CPU."""
LATENT = {
    **DEEPSEEK_V3,
    "hidden_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_nextn_predict_layers": 0,
}
"""What its routed experts return is multiplied by 2.5, once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model in a format. `exempt`: parts of the names of matrices that stay plain, where it is no
    format that is exported like this."""

    config: dict
    format: str
    codec: Codec
    exempt: tuple[str, ...] | None = None


CASES = {
    "dense fp8": Case(config=DENSE, format="fp8", codec=fp8_block.codec()),
    "dense mxfp8": Case(config=DENSE, format="mxfp8", codec=mxfp8.CODEC),
    "dense int4": Case(config=DENSE, format="int4", codec=int4.codec(32)),
    "dense nvfp4": Case(config=DENSE, format="nvfp4", codec=fp4.NVFP4),
    "dense int4 g128": Case(config=DENSE, format="int4", codec=int4.codec(128), exempt=()),
    "odd fp8": Case(
        config=ODD, format="fp8", codec=fp8_block.codec(), exempt=("q_p", "k_p", "v_p", "mlp")
    ),
    "odd llama mxfp8": Case(config=LLAMA, format="mxfp8", codec=mxfp8.CODEC),
    "moe fp8": Case(config=MOE, format="fp8", codec=fp8_block.codec()),
    "moe mxfp8": Case(config=MOE, format="mxfp8", codec=mxfp8.CODEC),
    "moe int4": Case(config=MOE, format="int4", codec=int4.codec(32)),
    "moe nvfp4": Case(config=MOE, format="nvfp4", codec=fp4.NVFP4),
    "narrow nvfp4": Case(config=NARROW, format="nvfp4", codec=fp4.NVFP4),
    "latent fp8": Case(config=LATENT, format="fp8", codec=fp8_block.codec()),
    "latent mxfp8": Case(config=LATENT, format="mxfp8", codec=mxfp8.CODEC),
    "latent int4": Case(config=LATENT, format="int4", codec=int4.codec(32)),
    "latent nvfp4": Case(config=LATENT, format="nvfp4", codec=fp4.NVFP4),
}


class Model:
    """A quantised folder, what it holds, and transformers' model of the dequantised weights."""

    def __init__(self, folder: Path, case: Case, *, seed: int) -> None:
        weights = tensors_of(table_of(case.config), seed=seed)
        make_base(folder / "base", case.config)
        self.folder = folder / "quantised"
        if case.exempt is None:
            write_folder(
                self.folder,
                table=table_of(case.config),
                read=reader_of(weights),
                base=folder / "base",
                format=case.format,
                card=lambda done: {},
            )
        else:
            write_by_hand(self.folder, case, weights)
        self.stored = load_file(self.folder / "model.safetensors")
        with open_source(self.folder) as source:
            quantised = set(source.quantised_names())
            plain = {
                name: case.codec.dequantise(source.parts(name))[:, : source.shape(name)[1]]
                if name in quantised
                else source.read(name).float()
                for name in source.names()
            }
        assert quantised
        config = {**case.config, "dtype": "float32"}
        (folder / "base" / "config.json").write_text(json.dumps(config))
        save_file(plain, folder / "base" / "model.safetensors", metadata={"format": "pt"})
        import transformers

        self.reference = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "base", dtype=torch.float32
        ).eval()

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[tokens - 1]"""
        with torch.no_grad():
            rows = self.reference(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)
        return rows.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def write_by_hand(folder: Path, case: Case, weights: dict[str, torch.Tensor]) -> None:
    """A folder as releases of others are, whose groups or exemptions export does not write."""
    scheme = FP8 if case.format == "fp8" else int4_scheme(case.codec.block[1])
    scheme, stored, plain = replace(scheme, codec=case.codec), {}, ["lm_head"]
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or any(part in name for part in case.exempt or ()):
            stored[name] = tensor
            plain += [module] if module.endswith("_proj") else []
            continue
        parts = {**scheme.codec.quantise(tensor, None), "shape": torch.tensor(tensor.shape)}
        stored |= {own: parts[role] for role, own in scheme.names(name).items()}
    quantised = quantization_config(case.format, plain)
    for group in quantised.get("config_groups", {}).values():
        group["weights"]["group_size"] = case.codec.block[1]
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps({**case.config, "quantization_config": quantised})
    )


def response(engine: EngineAddress) -> tuple[list[int], torch.Tensor]:
    """(tokens of prompt and response, log-probs of all but the first)"""
    body = {
        "input_ids": PROMPT,
        "sampling_params": {
            "max_new_tokens": TOKENS,
            "temperature": 1.0,
            "ignore_eos": True,
            "sampling_seed": 3,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }

    async def generate() -> dict:
        http = EngineHttp([engine], caller="the test")
        try:
            return await http.order(engine, "/generate", body, timeout_s=100)
        finally:
            await http.close()

    meta = asyncio.run(generate())["meta_info"]
    given, made = meta["input_token_logprobs"][1:], meta["output_token_logprobs"]
    tokens = [*PROMPT, *(entry[1] for entry in made)]
    return tokens, torch.tensor([entry[0] for entry in (*given, *made)]).double()


def difference(engine: EngineAddress, model: Model) -> float:
    tokens, logprobs = response(engine)
    return float((logprobs - model.logprobs(tokens)).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_a_quantised_folder_is_served_and_updated_as_its_dequantised_weights(
    tmp_path: Path, name: str
) -> None:
    first, second = (Model(tmp_path / str(seed), CASES[name], seed=seed) for seed in (0, 1))
    spec = EngineSpec(
        model_dir=first.folder,
        tokenizer_dir=None,
        device_kind="cpu",
        precision="fp32",
        port=free_ports(1)[0],
        log_path=tmp_path / "engine.log",
        max_total_tokens=8192,
        context_length=256,
    )
    server = engine_of(spec)
    server.start()
    try:
        server.wait_ready(400)
        engine = EngineAddress(url=spec.url, tp=1, sharing_ranks=[0])
        found = {"start": difference(engine, first)}
        assert difference(engine, second) > 1000 * LARGEST, "both say the same, and prove nothing"
        for made in (TensorChannel, DistributedChannel):
            channel = made(timeout_s=120)
            channel.open([engine])
            for order, model in (("second", second), ("first", first)):
                channel.send(into_buckets(iter(model.stored.items()), BUCKET_BYTES))
                found[f"{made.__name__}: {order}"] = difference(engine, model)
            channel.verify(into_buckets(iter(first.stored.items()), BUCKET_BYTES))
            wrong = {part: tensor.clone() for part, tensor in first.stored.items()}
            values = next(tensor for tensor in wrong.values() if tensor.dtype in PACKED)
            values.view(-1).view(torch.uint8)[7] ^= 1
            with pytest.raises(MismatchError, match="1 of"):
                channel.verify(into_buckets(iter(wrong.items()), BUCKET_BYTES))
            channel.close()
    finally:
        server.stop()
    print(name, {order: f"{value:.1e}" for order, value in found.items()})
    assert max(found.values()) <= LARGEST, found
