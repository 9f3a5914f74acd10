"""What trainer ranks do in tests: each function is a case that `world.py` runs on every rank."""

from __future__ import annotations

import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save_file

from milescli.models import table
from milescli.plan.types import TrainerLayout
from milescli.train.streams import Stream
from tests.backends.megatron.algorithm_cases import algorithms_measured  # noqa: F401
from tests.backends.megatron.distill_cases import distill_steps  # noqa: F401
from tests.backends.megatron.draft_cases import draft_steps  # noqa: F401
from tests.backends.megatron.harness import (
    policy_shard,
    rows_shard,
    scores_everywhere,
    trainer,
)
from tests.backends.megatron.indexer_cases import (  # noqa: F401
    indexer_apart,
    indexer_goes_on,
    indexer_gradients,
    indexer_learns,
    indexer_packed,
    indexer_steps,
)
from tests.backends.megatron.lora_cases import adapter_and_merged, dropout_steps  # noqa: F401
from tests.backends.megatron.measuring import (  # noqa: F401  (cases that `world` calls)
    measure_memory,
    plain_steps,
    published_and_stepped,
)
from tests.backends.megatron.mtp_cases import (  # noqa: F401
    layer_learns,
    next_logprobs,
    packed_and_single,
    trunk_differs,
)
from tests.backends.megatron.packed_cases import packed_tokens_differ  # noqa: F401
from tests.backends.megatron.ppo_cases import critic_of_adapter, ppo_steps  # noqa: F401
from tests.backends.megatron.quantised_cases import quantised_steps, reference_steps  # noqa: F401
from tests.backends.megatron.routing_cases import routing_effect  # noqa: F401
from tests.backends.megatron.row_cases import row_steps, trained_scores  # noqa: F401
from tests.backends.megatron.saving_cases import (  # noqa: F401
    changes_wait,
    memory_of_save,
    saves_fail,
)
from tests.backends.megatron.shard_cases import published_in_shards, shard_checksums  # noqa: F401
from tests.backends.megatron.shared_cases import shared_prompts  # noqa: F401
from tests.backends.megatron.snapshot_cases import (  # noqa: F401
    goes_on_from_copy,
    random_states_return,
)
from tests.backends.megatron.told_cases import told_by_a_step  # noqa: F401
from tests.backends.megatron.turns_cases import turns_and_alone  # noqa: F401
from tests.backends.megatron.vision_cases import (  # noqa: F401
    vision_goes_on,
    vision_gradients,
    vision_steps,
)

if TYPE_CHECKING:
    from milescli.backends.megatron.mesh import Mesh
    from milescli.models import ModelFacts


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
    in_shards = shard_checksums(made)
    made.freeze_reference()
    scores = scores_everywhere(made, policy_shard(made, 9, routing=routing))
    reports = [
        made.step(
            policy_shard(made, step, updates=1 + (step == 2), routing=routing, objective=objective),
            1e-2,
        ).report
        for step in range(3)
    ]
    made.close()
    return {
        "checksums": checksums,
        "in_shards": in_shards,
        "scores": scores,
        "reports": reports,
    }


def engine_differences(
    *, rank: int, size: int, port: int, model: str, layout: dict, old_logprobs: str, updates: int
) -> float:
    """What a step of large updates says of an engine whose log-probs are the trainer's own."""
    train = {"old_logprobs": old_logprobs, "updates_per_step": updates}
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout, train=train)
    shard = policy_shard(made, 0, updates=updates)
    rows = scores_everywhere(made, shard)
    own = np.concatenate([np.array(rows[number], np.float32) for number in shard.sequence_ids])
    report = made.step(replace(shard, streams={**shard.streams, Stream.ENGINE: own}), 1e-1).report
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
    formats: dict | None = None,
) -> None:
    """One supervised update per entry of `steps`, rows of tokens; the weights go to `save`."""
    made = trainer(
        rank=rank,
        size=size,
        port=port,
        model=model,
        layout=layout,
        train={"optimizer": optimizer},
        formats=formats,
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
    train: dict | None = None,
    precision: str = "fp32",
) -> dict:
    """Steps first .. last with plain Adam (eps 1e-8), after loading and before saving where
    asked."""
    made = trainer(
        rank=rank,
        size=size,
        port=port,
        model=model,
        layout=layout,
        train={"optimizer": {"eps": 1e-8}, **(train or {})},
        precision=precision,
    )
    if load:
        made.load(load)
    reports = [made.step(policy_shard(made, step), 1e-3).report for step in range(first, last)]
    if save:
        made.save(save, True)
        # training goes on while the files are written
        scratch = made.step(policy_shard(made, 99), 1e-3).report
        assert scratch.grad_norm > 0
        made.finish_save()
        made.load(save)
    result = {"reports": reports, "checksums": made.parameter_checksums()}
    made.close()
    return result


def save_bfloat16(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    save: str,
    fused: bool = False,
) -> dict:
    """A bfloat16 trainer takes a step, saves, takes another, and loads: checksums at each point.
    `fused`: AdamW by the kernel that accelerators take."""
    from milescli.backends.megatron.state.optimizer import fuse

    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout, precision="bf16")
    if fused:
        fuse(made.optimizer)
    checksums = {"first": made.parameter_checksums()}
    made.step(policy_shard(made, 0), 1e-2)
    checksums["saved"] = made.parameter_checksums()
    made.save(save, True)
    made.finish_save()
    made.step(policy_shard(made, 1), 1e-2)
    checksums["later"] = made.parameter_checksums()
    made.load(save)
    checksums["loaded"] = made.parameter_checksums()
    made.close()
    return checksums


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
    from milescli.backends.megatron.state import optimizer
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
    good = made.step(policy_shard(made, 0), 1e-3).report
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
    from milescli.backends.megatron.architecture import model
    from milescli.backends.megatron.state import gathering, weights
    from milescli.checkpoint.hf_folder import HfReader

    config = model.build_config(
        facts, own.layout, dtype=dtype, device=own.device, recompute="none", routing_replay=False
    )
    with HfReader(folder) as reader:
        lines = table(facts).as_on_disk(reader.names())
        local = weights.local_weights(model.build_model(config, facts, own), lines, own)
        for weight in local:
            is_real = weight.parameter.is_floating_point()
            weight.parameter.data.fill_(float("nan") if is_real else -1)
        weights.load_hf(local, lines, folder=folder, mesh=own)
        missing = {name for entry in lines.entries if entry.mtp is None for name in entry.hf}
        wide = {name for entry in lines.entries if entry.rule.float32 for name in entry.hf}
        wrong = []
        for bucket in gathering.hf_buckets(local, lines, mesh=own, bucket_bytes=20_000):
            for name, tensor in bucket:
                missing.discard(name)
                expected = reader.read(name)
                if expected.is_floating_point():
                    expected = expected.to(torch.float32 if name in wide else dtype)
                if tensor.dtype != expected.dtype or not torch.equal(tensor, expected):
                    wrong.append(name)
    return sorted(wrong) + sorted(f"{name} did not come out" for name in missing)
