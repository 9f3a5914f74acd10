"""Megatron-Core as it comes, on a CPU: loads a converted checkpoint under a layout and writes
logits. Uses nothing of miles but the shim without which Megatron does not run here: model, config
and loading are stock. Each rank is `python tests/conversion/stock.py REQUEST.json RANK WORLD`."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from milescli.backends.megatron import cpu_compat  # noqa: E402

cpu_compat.install()

import torch.nn.functional as F  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from safetensors.torch import save_file  # noqa: E402


def config_of(raw: dict, job: dict) -> TransformerConfig:
    """Written by hand from a Qwen3 config.json."""
    layout = job["layout"]
    moe: dict[str, object] = {}
    if raw["model_type"] == "qwen3_moe":
        dense = raw["mlp_only_layers"]
        freq = [int(layer not in dense) for layer in range(raw["num_hidden_layers"])]
        moe = {
            "num_moe_experts": raw.get("num_experts") or raw["num_local_experts"],
            "moe_router_topk": raw["num_experts_per_tok"],
            "moe_ffn_hidden_size": raw["moe_intermediate_size"],
            "moe_router_pre_softmax": False,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_layer_freq": freq if dense or job.get("freq_as_list") else 1,
        }
    pipeline = {"pipeline_model_parallel_layout": job["stages"]} if "stages" in job else {}
    return TransformerConfig(
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        num_attention_heads=raw["num_attention_heads"],
        num_query_groups=raw["num_key_value_heads"],
        kv_channels=raw["head_dim"],
        ffn_hidden_size=raw["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=raw["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        virtual_pipeline_model_parallel_size=layout.get("vpp"),
        expert_model_parallel_size=layout.get("ep", 1),
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        batch_p2p_comm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        transformer_impl="local",
        **moe,
        **pipeline,
    )


def build(config: TransformerConfig, raw: dict, *, chunk: int | None) -> GPTModel:
    """One pipeline chunk of this rank."""
    tp = config.tensor_model_parallel_size
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=chunk
        ),
        # as Megatron-LM pads: a multiple of 128 x tp
        vocab_size=-(-raw["vocab_size"] // (128 * tp)) * 128 * tp,
        max_sequence_length=512,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=raw["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=raw["rope_parameters"]["rope_theta"],
        parallel_output=False,
        vp_stage=chunk,
    ).eval()


@torch.no_grad()
def logits(job: dict) -> dict[str, torch.Tensor]:
    """On ranks of the last stage, by number of the row."""
    layout = job["layout"]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        virtual_pipeline_model_parallel_size=layout.get("vpp"),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    raw = json.loads((Path(job["model"]) / "config.json").read_text())
    config = config_of(raw, job)
    chunks = [
        build(config, raw, chunk=chunk)
        for chunk in (range(layout["vpp"]) if "vpp" in layout else [None])
    ]
    wanted = {
        f"model{number}": chunk.sharded_state_dict(prefix="", metadata=job.get("metadata"))
        for number, chunk in enumerate(chunks)
    }
    loaded = dist_checkpointing.load(wanted, job["checkpoint"], strict="raise_unexpected")
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
    rows: dict[str, torch.Tensor] = {}
    for number, row in enumerate(job["rows"]):
        tokens = torch.tensor([row])
        mask = torch.ones(1, 1, len(row), len(row)).triu(1).bool()

        def step(source, model, tokens=tokens, mask=mask):
            next(source)
            return model(
                tokens, torch.arange(tokens.shape[1])[None], mask
            ), lambda out, non_loss_data: out

        repeats = layout.get("pp", 1)
        outs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(range(repeats)) for _ in chunks]
            if len(chunks) > 1
            else iter(range(repeats)),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=repeats,
            seq_length=len(row),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
        if outs:
            rows[str(number)] = outs[0][0, :, : raw["vocab_size"]].contiguous()
    parallel_state.destroy_model_parallel()
    return rows


def main() -> None:
    """All jobs, one after the other."""
    request, rank, world = (
        json.loads(Path(sys.argv[1]).read_text()),
        int(sys.argv[2]),
        int(sys.argv[3]),
    )
    torch.set_num_threads(1)
    store = dist.FileStore(request["store"], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for job in request["jobs"]:
        rows = logits(job)
        if rows and rank == world - 1:
            save_file(rows, job["out"])
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
