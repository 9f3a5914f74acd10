"""What trainer ranks do in tests: tiny models made from a seed, batches of uneven answers, and the
cases that `world.py` runs."""

from __future__ import annotations

import json
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from milescli.core.types import Group, Prompt, RoutedExperts
from milescli.models import parse_facts, table
from milescli.plan.types import BatchPlan, EngineLayout, Plan, TrainerLayout
from milescli.recipe.schema import Recipe
from milescli.rollout.trajectories import demonstration
from milescli.train.base import TrainShard
from milescli.train.objectives import load_objective
from milescli.train.packing import pack
from milescli.train.streams import Stream
from tests.backends.megatron import latent_models
from tests.backends.megatron.measuring import measure_memory, plain_steps  # noqa: F401  (cases that `world` calls)
from tests.backends.megatron.packed_cases import packed_tokens_differ  # noqa: F401
from tests.samples import make_group, make_sample, make_trajectory

if TYPE_CHECKING:
    from milescli.backends.megatron.mesh import Mesh
    from milescli.backends.megatron.worker import TrainerRank
    from milescli.models import ModelFacts

MICROBATCH_TOKENS = 96
"""Cuts a batch into three or four microbatches, or two for each of two data-parallel ranks."""
DENSE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 131,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
MODELS = {
    **latent_models.MODELS,
    "dense": DENSE,
    "tied": {**DENSE, "tie_word_embeddings": True, "num_hidden_layers": 3},
    "moe": {
        **DENSE,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "sandwich": {
        **DENSE,
        "model_type": "glm4",
        "num_hidden_layers": 2,
        "partial_rotary_factor": 0.5,
    },
    "glm": {
        **DENSE,
        "model_type": "glm4_moe",
        "num_hidden_layers": 3,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "intermediate_size": 20,
        "vocab_size": 131,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "final_logit_softcapping": 2.0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
    "oss": {
        "model_type": "gpt_oss",
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 32,
        "vocab_size": 131,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "nemotron": {
        "model_type": "nemotron_h",
        "hidden_size": 44,
        "hybrid_override_pattern": "MEM*-",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 36,
        "vocab_size": 131,
        "mamba_num_heads": 6,
        "mamba_head_dim": 7,
        "n_groups": 2,
        "ssm_state_size": 9,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 28,
        "moe_latent_size": 12,
    },
    "delta": {
        **DENSE,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 3,
        "mamba_ssm_dtype": "float32",
    },
}
"""An odd vocabulary, so that tensor parallelism must pad it; three layers, so that two stages are
uneven."""


def make_model(folder: Path, name: str, *, seed: int = 0) -> Path:
    """A Hugging Face folder with random weights, the shapes by the table itself."""
    config = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    facts = parse_facts(config)
    for key, shape in table(facts).hf_shapes().items():
        noise = torch.randn(shape, generator=generator)
        centre = 0 if facts.norm_zero_centered and "linear_attn" not in key else 1
        is_factor = "norm" in key or "scal" in key
        tensors[key] = (
            centre + 0.1 * noise
            if is_factor
            else noise * (0.3 if key.endswith("mlp.gate.weight") else 0.08)
        )
    save_file(tensors, folder / "model.safetensors")
    return folder


def plan_of(layout: dict, *, precision: str = "fp32") -> Plan:
    """A CPU plan around a trainer layout."""
    return Plan(
        device_kind="cpu",
        collective="gloo",
        precision=precision,
        trainer=TrainerLayout(**layout),
        engines=EngineLayout(),
        colocated=False,
        channel="tensor",
        slots=[],
        batch=BatchPlan(
            prompts_per_step=4,
            samples_per_prompt=4,
            num_samples=16,
            updates_per_step=1,
            max_tokens_per_microbatch=MICROBATCH_TOKENS,
            max_sequence_tokens=48,
        ),
        cpu_threads=1,
        max_staleness=0,
        steps=3,
        warmup_steps=0,
    )


def make_groups(
    step: int, *, vocab_size: int, routing: tuple[int, int, int] | None = None
) -> list[Group]:
    """Four prompts with four samples each, all lengths uneven. `routing`: (experts, layers, topk)
    of random expert choices."""
    rng = np.random.default_rng(step)
    groups = []
    for index in range(4):
        prompt = rng.integers(0, vocab_size, rng.integers(1, 9)).tolist()
        samples = []
        for number in range(4):
            response = rng.integers(0, vocab_size, rng.integers(1, 25)).tolist()
            trajectory = make_trajectory(
                prompt,
                response,
                logprobs=(-5 + 0.1 * rng.standard_normal(len(response))).tolist(),
                mask=(rng.random(len(response)) < 0.9).tolist(),
                routed_experts=_routing(rng, len(prompt) + len(response) - 1, routing)
                if routing
                else None,
            )
            reward = float(rng.integers(0, 2))
            samples.append(make_sample(trajectory, reward=reward, index=number))
        groups.append(make_group(samples, prompt=Prompt(index=index, token_ids=prompt, text="")))
    return groups


def _routing(
    rng: np.random.Generator, num_tokens: int, routing: tuple[int, int, int]
) -> RoutedExperts:
    experts, layers, topk = routing
    chosen = np.argsort(rng.random((num_tokens, layers, experts)), axis=-1)[..., :topk].astype(
        np.int32
    )
    return RoutedExperts(
        indices=chosen.tobytes(), num_tokens=num_tokens, num_layers=layers, topk=topk
    )


def policy_shard(
    made: TrainerRank,
    step: int,
    *,
    updates: int = 1,
    routing: tuple[int, int, int] | None = None,
    objective: str = "policy",
) -> TrainShard:
    """What this rank gets of the batch of a step."""
    groups = make_groups(step, vocab_size=made.facts.vocab_size, routing=routing)
    batch = pack(
        load_objective(objective, made.recipe).sequences(groups),
        objective=objective,
        dp=made.mesh.layout.dp,
        max_tokens_per_microbatch=MICROBATCH_TOKENS,
        updates=updates,
        temperature=0.9,
    )
    return batch.shards[made.mesh.dp_rank]


def rows_shard(made: TrainerRank, rows: list[list[int]], *, cap: int = 64) -> TrainShard:
    """Rows of tokens, all but the first of each on the loss mask; of one data-parallel rank."""
    sequences = load_objective("supervised", made.recipe).sequences(
        [demonstration(row[:1], row[1:]) for row in rows]
    )
    batch = pack(
        sequences,
        objective="supervised",
        dp=made.mesh.layout.dp,
        max_tokens_per_microbatch=cap,
    )
    return batch.shards[made.mesh.dp_rank]


def scores_everywhere(made: TrainerRank, shard: TrainShard) -> list[list[float]]:
    """[sequences of the batch][tokens], put together from all ranks."""
    own = made.score(shard)
    told: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own and (shard.sequence_ids.tolist(), own))
    rows = {
        number: values.tolist()
        for part in told
        if part
        for number, values in zip(*part, strict=True)
    }
    return [rows[number] for number in sorted(rows)]


def trainer(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    train: dict | None = None,
    precision: str = "fp32",
):
    """A trainer rank that is set up."""
    from milescli.backends.megatron.worker import TrainerRank

    optimizer = {
        "lr": 1e-2,
        "eps": 1e-3,
        "weight_decay": 0.01,
        **(train or {}).pop("optimizer", {}),
    }
    made = TrainerRank(
        rank=rank,
        world_size=size,
        master_addr="127.0.0.1",
        master_port=port,
        recipe=Recipe(
            train={"optimizer": optimizer, **(train or {})},
            machine={"start_timeout_s": 60, "step_timeout_s": 60},
        ),
        plan=plan_of(
            {"recompute": (train or {}).get("recompute", "none"), **layout},
            precision=precision,
        ),
        model_dir=model,
    )
    made.setup()
    return made


def train_steps(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    train: dict | None = None,
    replay: bool = False,
    objective: str = "policy",
) -> dict:
    """Weights out and in again, scores, then three policy steps with everything on: clip, KL,
    entropy, two updates in the last."""
    full = {
        "kl_coef": 0.1,
        "entropy_coef": 0.01,
        "updates_per_step": 2,
        "routing_replay": replay,
        **(train or {}),
    }
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout, train=full)
    facts = made.facts
    routing = (facts.num_experts, facts.num_layers, facts.topk) if replay else None
    checksums = made.parameter_checksums()
    made.freeze_reference()
    scores = scores_everywhere(made, policy_shard(made, 9, routing=routing))
    reports = [
        made.step(
            policy_shard(made, step, updates=1 + (step == 2), routing=routing, objective=objective),
            1e-2,
        )
        for step in range(3)
    ]
    made.close()
    return {"checksums": checksums, "scores": scores, "reports": reports}


def engine_differences(
    *, rank: int, size: int, port: int, model: str, layout: dict, old_logprobs: str, updates: int
) -> float:
    """What a step of large updates says of an engine whose log-probs are the trainer's own."""
    train = {"old_logprobs": old_logprobs, "updates_per_step": updates}
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout, train=train)
    shard = policy_shard(made, 0, updates=updates)
    rows = scores_everywhere(made, shard)
    own = np.concatenate([np.array(rows[number], np.float32) for number in shard.sequence_ids])
    report = made.step(replace(shard, streams={**shard.streams, Stream.ENGINE: own}), 1e-1)
    made.close()
    return report.logprob_diff_max


def adamw_steps(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    steps: list[list[list[int]]],
    optimizer: dict,
    save: str,
) -> None:
    """One supervised update per entry of `steps`, rows of tokens; the weights go to `save`."""
    made = trainer(
        rank=rank, size=size, port=port, model=model, layout=layout, train={"optimizer": optimizer}
    )
    for rows in steps:
        made.step(rows_shard(made, rows), optimizer["lr"])
    weights = {
        name: tensor.detach().clone().contiguous()
        for bucket in made.buckets()
        for name, tensor in bucket
    }
    if rank == 0:
        save_file(weights, save)
    made.close()


def train_and_save(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    first: int,
    last: int,
    save: str = "",
    load: str = "",
) -> dict:
    """Steps first .. last with plain Adam (eps 1e-8), after loading and before saving where
    asked."""
    made = trainer(
        rank=rank,
        size=size,
        port=port,
        model=model,
        layout=layout,
        train={"optimizer": {"eps": 1e-8}},
    )
    if load:
        made.load(load)
    reports = [made.step(policy_shard(made, step), 1e-3) for step in range(first, last)]
    if save:
        made.save(save, True)
        # training goes on while the files are written
        scratch = made.step(policy_shard(made, 99), 1e-3)
        assert scratch.grad_norm > 0
        made.finish_save()
        made.load(save)
    result = {"reports": reports, "checksums": made.parameter_checksums()}
    made.close()
    return result


def save_bfloat16(*, rank: int, size: int, port: int, model: str, layout: dict, save: str) -> dict:
    """A bfloat16 trainer takes a step, saves, takes another, and loads: checksums at each point."""
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout, precision="bf16")
    found = {"first": made.parameter_checksums()}
    made.step(policy_shard(made, 0), 1e-2)
    found["saved"] = made.parameter_checksums()
    made.save(save, True)
    made.finish_save()
    made.step(policy_shard(made, 1), 1e-2)
    found["later"] = made.parameter_checksums()
    made.load(save)
    found["loaded"] = made.parameter_checksums()
    made.close()
    return found


def scores_of_rows(
    *, rank: int, size: int, port: int, model: str, layout: dict, rows: list[list[int]]
) -> list[list[float]]:
    """Log-probs of every token after the first of each row, at temperature 1."""
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout)
    scores = scores_everywhere(made, rows_shard(made, rows))
    made.close()
    return scores


def spoil_and_step(*, rank: int, size: int, port: int, model: str, layout: dict) -> dict:
    """A step whose loss, then one whose gradient, is not finite: what is raised, and whether the
    weights are untouched."""
    from milescli.backends.megatron import optimizer
    from milescli.core.errors import NotFiniteError

    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout)
    before = made.parameter_checksums()
    bad = policy_shard(made, 0)
    token = np.flatnonzero(bad.loss_mask)[-1]
    bad.streams[Stream.ADVANTAGE][token] = float("nan")
    index = int(np.searchsorted(bad.cu_seqlens, token, side="right")) - 1
    raised = []
    for spoil in (False, True):
        try:
            if spoil:
                made.model.zero_grad_buffer()
                if rank == size - 1:
                    dict(made.model.module.named_parameters())[
                        "decoder.final_layernorm.weight"
                    ].main_grad[0] = float("inf")
                optimizer.require_finite_gradients(made.model, device=made.device)
            else:
                made.step(bad, 1e-3)
        except NotFiniteError as error:
            raised.append(str(error))
    untouched = made.parameter_checksums() == before
    good = made.step(policy_shard(made, 0), 1e-3)
    made.close()
    return {
        "raised": raised,
        "untouched": untouched,
        "place": (
            f"sequence {bad.sequence_ids[index]} of {bad.num_sequences}",
            f"its token {token - bad.cu_seqlens[index]} ",
        ),
        "then": good.loss,
    }


def routing_effect(*, rank: int, size: int, port: int, model: str, layout: dict) -> dict:
    """Scores of one batch routed freely, as the model would route by itself (recorded), and by
    random choices."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from milescli.backends.megatron.shard import RankShard

    made = trainer(
        rank=rank, size=size, port=port, model=model, layout=layout, train={"routing_replay": True}
    )
    facts = made.facts
    shard = policy_shard(made, 1, routing=(facts.num_experts, facts.num_layers, facts.topk))
    free = replace(shard, routed_experts=None)
    recorded_rows = np.zeros_like(shard.routed_experts)
    for microbatch in RankShard(free, mesh=made.mesh, facts=facts).microbatches:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        routers, made.passes.routers = made.passes.routers, []
        made.passes.score([microbatch], temperature=shard.temperature)
        made.passes.routers = routers
        recorded = torch.stack(RouterReplay.get_recorded_data(), dim=1)
        recorded_rows[microbatch.source.numpy()] = recorded.numpy()
        RouterReplay.clear_global_router_replay_action()
    routed = {"free": free, "own": replace(shard, routed_experts=recorded_rows), "random": shard}
    scores = {name: scores_everywhere(made, each) for name, each in routed.items()}
    made.close()
    return {name: [x for row in rows for x in row] for name, rows in scores.items()}


def published_differs(
    *, rank: int, size: int, port: int, model: str, layout: dict, dtype: str = "float32"
) -> list[str]:
    """Names of tensors that come out of a model under a layout otherwise than they lie in the
    folder, or do not come out. What goes wrong on every rank alike is told in their place, so that
    one family does not hide the others."""
    from milescli.backends.megatron import cpu_compat

    cpu_compat.install()
    from milescli.backends.megatron import mesh
    from milescli.models import load_facts
    from milescli.plan.legal import check_layout

    layout_of, facts = TrainerLayout(**layout), load_facts(Path(model))
    timeouts_s = (60, 60)
    own = mesh.bring_up(
        layout=layout_of,
        rank=rank,
        master=("127.0.0.1", port),
        backend="gloo",
        device=torch.device("cpu"),
        timeouts_s=timeouts_s,
    )
    try:
        check_layout(layout_of, facts)
        return _differences(Path(model), facts, own, getattr(torch, dtype))
    except Exception as error:
        return ["".join(traceback.format_exception(error)[-3:])]
    finally:
        mesh.tear_down()


def _differences(folder: Path, facts: ModelFacts, own: Mesh, dtype: torch.dtype) -> list[str]:
    from milescli.backends.megatron import gathering, model, weights
    from milescli.checkpoint.hf_folder import HfReader

    config = model.build_config(
        facts, own.layout, dtype=dtype, device=own.device, recompute="none", routing_replay=False
    )
    with HfReader(folder) as reader:
        lines = table(facts).as_on_disk(reader.names())
        local = weights.local_weights(model.build_model(config, facts, own), lines, own)
        for weight in local:
            weight.parameter.data.fill_(float("nan"))
        weights.load_hf(local, lines, folder=folder, mesh=own)
        missing = {name for entry in lines.entries if entry.mtp is None for name in entry.hf}
        wide = {name for entry in lines.entries if entry.rule.float32 for name in entry.hf}
        wrong = []
        for bucket in gathering.hf_buckets(local, lines, mesh=own, bucket_bytes=20_000):
            for name, tensor in bucket:
                missing.discard(name)
                expected = reader.read(name).to(torch.float32 if name in wide else dtype)
                if tensor.dtype != expected.dtype or not torch.equal(tensor, expected):
                    wrong.append(name)
    return sorted(wrong) + sorted(f"{name} did not come out" for name in missing)
