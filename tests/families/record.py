"""Writes what the tests of the families saw: milescli/models/evidence.json, and docs/models.md for
people.

MILES_EVIDENCE=1 python -m pytest -q tests/families
"""

from __future__ import annotations

import datetime
import json
from importlib.metadata import version
from pathlib import Path

from milescli.backends.sglang.launch.servable import is_served_on_cpu
from milescli.models import parse_facts
from milescli.models.catalogue import RELEASES, UNPROVEN, Evidence, evidence
from tests.families.cases import ALL

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "milescli" / "models" / "evidence.json"
PAGE = ROOT / "docs" / "models.md"


def write(notes: dict[str, dict]) -> None:
    """`notes`: by case; families of which no case was run keep their record."""
    by_family: dict[str, list[str]] = {}
    for name in notes:
        by_family.setdefault(_family(name), []).append(name)
    evidence = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    for family, names in by_family.items():
        seen = [notes[name]["logits"] for name in names if "logits" in notes[name]]
        layouts = {_spell(layout) for name in names for layout in notes[name].get("layouts", [])}
        evidence[family] = {
            "cases": sorted(names),
            "logits": max(seen) if seen else None,
            "logits_why": ""
            if seen
            else next((ALL[name].why for name in names if ALL[name].why), "not compared"),
            "layouts": sorted(layouts),
            "converted": all(notes[name].get("converted", False) for name in names),
            "when": f"{datetime.date.today()}, CPU, megatron-core {version('megatron-core')}, "
            f"transformers {version('transformers')}",
        }
    EVIDENCE.write_text(json.dumps(evidence, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


def _family(name: str) -> str:
    family = parse_facts(ALL[name].config).family
    return family.removesuffix("_text")


def _spell(layout: dict) -> str:
    sizes = [
        f"{axis}{layout[axis]}"
        for axis in ("tp", "pp", "cp", "ep", "etp", "dp")
        if layout.get(axis, 1) > 1
    ]
    if layout.get("ep", 1) > 1:
        sizes = [size for size in sizes if not size.startswith("dp")]
    return "+".join([*sizes, *(["sp"] if layout.get("sequence_parallel") else [])])


def page() -> str:
    """docs/models.md"""
    known = evidence()
    rows = [_row(family, known.get(family)) for family in RELEASES]
    remarks = [f"- `{family}`: {remark}" for family, remark in UNPROVEN.items()]
    when = sorted({shown.when for shown in known.values()})
    return (
        _HEAD
        + "\n".join(rows)
        + "\n\n"
        + "\n".join(remarks)
        + "\n"
        + _TAIL
        + f"\nMeasured: {'; '.join(when)}.\n"
    )


def _row(family: str, shown: Evidence | None) -> str:
    if shown is None:
        return f"| `{family}` | {RELEASES[family]} | not run | | | | |"
    logits = f"{shown.logits:.1e}" if shown.logits is not None else "not compared"
    served = "yes" if is_served_on_cpu(family) else "no"
    cells = [
        f"`{family}`",
        RELEASES[family],
        logits,
        ", ".join(shown.layouts),
        "yes" if shown.converted else "no",
        served,
    ]
    return "| " + " | ".join([*cells, str(len(shown.cases))]) + " |"


_HEAD = """# Models

This page lists the supported model families and what was measured of each.

    miles models                        # this table
    miles models Qwen/Qwen3-30B-A3B     # the numbers of one model
    miles models check ./my-model       # test a folder on this machine

The tests use tiny models with random weights in the real architecture: odd shapes, tied and untied,
one key-value head, numbers of experts that are not powers of two, dense first layers, and whatever
else the family has. `MILES_EVIDENCE=1 python -m pytest tests/families` writes this page; nobody
types these numbers.

- **logits**: largest difference between Megatron-Core's logits and transformers' own, over all tiny
  models of the family, in float32, relative to the largest logit.
- **bit for bit under**: layouts of two ranks through which every tensor passed from the folder into
  Megatron and back unchanged. Each model was also computed and published in one process.
- **converted**: Hugging Face -> `torch_dist` -> Hugging Face with every byte of every tensor equal,
  and the checkpoint in between loaded by Megatron's own `dist_checkpointing`.
- **served on CPU**: SGLang's log-probs were compared with transformers'. On an accelerator SGLang
  serves many more families; miles has run none of them there.

| family | stands for | logits | bit for bit under | converted | served on CPU | tiny models |
|---|---|---|---|---|---|---|
"""
_TAIL = """
## What to know

- miles converts, computes and trains the vision towers of Qwen2.5-VL, Qwen3-VL and Gemma 3
  (`model.vision`, [vision.md](vision.md)). The logits above cover text only. Towers of other
  multimodal releases pass through every conversion unchanged and are not trained.
- Multi-token-prediction layers pass through every conversion unchanged. `train.mtp` trains them in
  DeepSeek-V3, DeepSeek-V4, GLM-4-MoE, GLM-4.7-Flash, MiMo, Qwen3-Next and Qwen3.5, where they were
  compared with transformers' layers
  ([draft-training.md](draft-training.md#training-the-mtp-layer)).
- Conversions never round weights. Norms that multiply by 1 + weight (Qwen3-Next, Qwen3.5, Gemma 3)
  keep their stored values; Megatron computes them with `layernorm_zero_centered_gamma`. The only
  exception is the norm inside a gated delta net, which is stored plain: a stock Megatron model with
  that flag would add 1 to it.
- The indexer of sparse attention (DeepSeek-V3.2, GLM-5, DeepSeek-V4) selects positions as
  released, because its selection has no gradient. `--set model.indexer=kl` trains it with the loss
  of the sparse stage of DeepSeek-V3.2's report: KL(p || softmax(scores)) at the selected
  positions, where p are the attention's own weights there, summed over heads and normalised; for
  DeepSeek-V4, at the selected entries. `train/indexer_kl` is its mean over positions and indexers.
  Where layers share a selection (some releases of GLM-5), their indexer learns from the mean over
  these layers. The indexer learns from this loss alone, and the rest of the model does not: after
  a step it has the same bits as with `frozen`, and the norm that `clip_grad` bounds leaves the
  indexer out. Its learning rate and decay are those of the model. Engines receive it with each
  publication. An adapter is an error. Tests compare the gradients with plain PyTorch (within 1e-5)
  and over tp, sp, ep, dp, pp, recomputation and packing. On tiny models, 50 steps on the same rows
  took the divergence from 6.8e-3 to 1.2e-3 (GLM-5) and from 3.2e-2 to 7e-4 (DeepSeek-V4). The loss
  computes the attention's logits once more: on a CPU, with rows of 768 tokens of which 128 are
  selected, passes took 1.5 times as long.
- DeepSeek-V4 is trained in full, with tp (heads and output groups), sp, pp, ep and recomputation;
  cp and adapters are errors. Its first layers select experts by token ID, so routing replay covers
  the other layers. No CPU engine serves it, because SGLang caches its entries only in FP8. There
  you can train it on rows (`train.objective: supervised`, `preference`, `reward_model`), convert it
  and export it. transformers has no class for a DeepSeek-V4 that returns scores; the scores of a
  trained reward model were compared with its decoder.
- Conversion, runs and export read DeepSeek-V4 as it is released: FP8 blocks with E8M0 scales, FP4
  or FP8 experts. Tests compare each number, also for sizes that blocks do not divide. In BF16 the
  hyper-connections, attention sinks, position biases and the router's correction stay in float32,
  as in the release. What is written is BF16, FP16 or float32. Tests compare steps in float32 with
  transformers and plain PyTorch (three AdamW steps, DPO); a step in BF16 has a gradient norm within
  2 % of float32's.
- A family that is not listed needs one file: [new-family.md](new-family.md). `miles models check
  FOLDER` compares a model with transformers and an engine, and tests this machine's memory.

## What is missing

- Kimi-K3, Inkling, `glm5_next`, Hunyuan 4, `qwen4_exp`: transformers 5.12.1 has no implementation
  to compare with, although SGLang 0.5.20 has modules for them.
- DeepSeek-V4.1: neither transformers 5.12.1 nor SGLang 0.5.20 has its n-gram memory.
- MiniMax-M3: its attention over blocks of positions is not implemented here.
- The MTP layers of Hunyuan 3 and MiniMax-M2 are copied, not trained.

## About the comparison

- The process that computes transformers' logits patches transformers 5.12.1 in three places. On a
  CPU, Nemotron-H passes a wrong state between chunks and clamps time steps, so its logits depend on
  `chunk_size`. GLM-5's indexer ignores `indexer_rope_interleave`, which SGLang uses. Experts are
  computed one by one, because the grouped product does not accept odd widths.
- No number on this page comes from a GPU. There, full-attention families use TransformerEngine's
  layers if it is installed, and the others miles' own.
"""
