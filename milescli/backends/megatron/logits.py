"""Logits of a model by Megatron-Core in one process, from a Hugging Face folder through the weight
table, or from a checkpoint. `python -m milescli.backends.megatron.logits REQUEST.json`, called by
convert's proof and by the tests of the families."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from milescli.backends.megatron import cpu_compat
from milescli.checkpoint.torch_dist.reader import TorchDistReader
from milescli.core.files import read_json
from milescli.models import load_facts, table
from milescli.plan.types import TrainerLayout
from milescli.platform.ports import free_ports

_TIMEOUT_S = 600.0


@torch.inference_mode()
def logits(
    folder: Path, rows: list[list[int]], *, dtype: torch.dtype, checkpoint: Path | None, mesh
) -> list[torch.Tensor]:
    """Return [tokens, vocab] float32 for each row of token ids, which is one sequence.
    `checkpoint`: a `torch_dist` folder whose weights replace the folder's. `mesh`: of one rank."""
    built = _loaded(folder, dtype=dtype, checkpoint=checkpoint, mesh=mesh)
    return _of_rows(built, load_facts(folder), rows, mesh=mesh)


def _loaded(folder: Path, *, dtype: torch.dtype, checkpoint: Path | None, mesh):
    from megatron.core import dist_checkpointing

    from milescli.backends.megatron.architecture import model
    from milescli.backends.megatron.state import weights

    facts = load_facts(folder)
    config = model.build_config(
        facts, mesh.layout, dtype=dtype, device=mesh.device, recompute="none", routing_replay=False
    )
    built = model.build_model(config, facts, mesh).eval()
    if checkpoint is None:
        lines = table(facts)
        weights.load_hf(weights.local_weights(built, lines, mesh), lines, folder=folder, mesh=mesh)
    else:
        state = built.sharded_state_dict(prefix="", metadata=_metadata(checkpoint))
        built.load_state_dict(dist_checkpointing.load(state, str(checkpoint)))
    return built


def _of_rows(built, facts, rows: list[list[int]], *, mesh) -> list[torch.Tensor]:
    from milescli.backends.megatron.architecture import model
    from milescli.backends.megatron.layers.attention import pack_row
    from milescli.backends.megatron.step.rows import RowShape, make_row

    device, rows_logits = mesh.device, []
    for row_ids in rows:
        tokens = torch.tensor(row_ids, device=device)
        row = pack_row(
            make_row([(0, len(tokens))], shape=RowShape()),
            shape=RowShape(),
            facts=facts,
            device=device,
            tokens=tokens,
        )
        positions = torch.arange(len(tokens), device=device)[None]
        out = built(tokens[None], positions, None, packed_seq_params=row)
        head = model.head(built, out[0], facts=facts, vocab_size=facts.vocab_size, mesh=mesh)
        rows_logits.append(head.logits().cpu())
    return rows_logits


def _metadata(checkpoint: Path) -> dict[str, bool] | None:
    """Return the metadata with which Megatron loads a checkpoint whose layers are not stacked, as
    those of runs are; None selects Megatron's default."""
    with TorchDistReader(checkpoint) as reader:
        layers = [name for name in reader.names() if name.startswith("decoder.layers.")]
    return (
        None
        if any(not name.split(".")[2].isdigit() for name in layers)
        else {"non_homogeneous_layers": True}
    )


def main() -> None:
    """Execute REQUEST: {"threads", "jobs": [{"folder", "checkpoint", "rows", "dtype", "rounded",
    "out"}]}. `out` is a safetensors file with the logits by number of the row; with `rounded`, also
    those under another rounding, as NUMBER.rounded."""
    request = read_json(Path(sys.argv[1]))
    on_host = cpu_compat.install()
    from milescli.backends.megatron import mesh
    from milescli.backends.megatron.step import rounding

    torch.set_num_threads(request.get("threads", 1))
    own = mesh.bring_up(
        layout=TrainerLayout(),
        rank=0,
        master=("127.0.0.1", free_ports(1)[0]),
        backend="gloo" if on_host else "nccl",
        device=torch.device("cpu" if on_host else "cuda:0"),
        timeouts_s=(_TIMEOUT_S, _TIMEOUT_S),
    )
    for job in request["jobs"]:
        folder, checkpoint = Path(job["folder"]), job.get("checkpoint")
        built = _loaded(
            folder,
            dtype=getattr(torch, job["dtype"]),
            checkpoint=Path(checkpoint) if checkpoint else None,
            mesh=own,
        )
        facts, rows = load_facts(folder), job["rows"]
        with torch.inference_mode():
            results = dict(enumerate(_of_rows(built, facts, rows, mesh=own)))
            if job.get("rounded"):
                with rounding.with_other_rounding(built):
                    again = _of_rows(built, facts, rows, mesh=own)
                results |= {f"{number}.rounded": row for number, row in enumerate(again)}
        save_file({str(key): row.contiguous() for key, row in results.items()}, job["out"])
    mesh.tear_down()


if __name__ == "__main__":
    main()
