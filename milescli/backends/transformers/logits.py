"""Logits of Hugging Face folders by transformers' own implementation, in a separate process:
Megatron's CPU shim changes torch process-wide, and a model built beside it computes otherwise.
`python -m milescli.backends.transformers.logits REQUEST.json`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from milescli.core.files import read_json


def _patch_mamba(config, *, longest: int):
    """Change two things in which, without CUDA kernels, transformers 5.12.1 differs from them (and
    from SGLang and Megatron): it raises small time steps to `time_step_min`, and passes a wrong
    state from one chunk to the next, so that its output depends on `chunk_size`."""
    config.time_step_min = 0.0
    config.chunk_size = max(config.chunk_size, longest)
    return config


def _patch_indexer(config) -> None:
    """Make transformers heed `indexer_rope_interleave`, as SGLang does: version 5.12.1 always
    rotates the halves of GLM-5's indexer. It matters for sequences that are longer than
    `index_topk`."""
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as module

    global _rotates_halves
    _rotates_halves = _rotates_halves or module.apply_rotary_pos_emb
    pairs = getattr(config, "indexer_rope_interleave", False)
    module.apply_rotary_pos_emb = (
        module.apply_rotary_pos_emb_interleave if pairs else _rotates_halves
    )


_rotates_halves = None


@torch.inference_mode()
def logits(folder: Path, rows: list[list[int]], *, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return [tokens, vocab] float32 per row of token ids. Runs no code of the folder's."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config, key_mapping = _read_config(folder)
    if config.model_type == "nemotron_h":
        config = _patch_mamba(config, longest=max(map(len, rows)))
    if config.model_type == "glm_moe_dsa":
        _patch_indexer(config)
    if getattr(config, "text_config", None) is not None:
        # its multimodal classes write and read the outer flag, its text classes the inner one
        config.text_config.tie_word_embeddings = config.tie_word_embeddings
    # the grouped kernel of experts refuses those whose rows are no multiple of 16 bytes
    config._experts_implementation = "eager"
    has_text_class = type(config) in AutoModelForCausalLM._model_mapping
    made_by = AutoModelForCausalLM if has_text_class else AutoModelForImageTextToText
    model, loading = made_by.from_pretrained(
        folder, config=config, dtype=dtype, key_mapping=key_mapping, output_loading_info=True
    )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"transformers finds no weights for {missing[:3]} and would initialise them randomly"
        )
    model.eval()
    return [model(torch.tensor([row]), use_cache=False).logits[0].float() for row in rows]


def _read_config(folder: Path):
    """Return (config, how names on disk are changed). A family that transformers lacks is loaded as
    one with the same architecture: Kimi K2's class is DeepSeek-V3's; K2.5 holds such a model under
    `language_model.`, which is loaded without its tower; MiMo's decoder is Qwen2's."""
    from transformers import AutoConfig

    raw = read_json(folder / "config.json")
    stand_in = {"kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3", "mimo": "qwen2"}.get(
        raw.get("model_type")
    )
    if stand_in is None:
        return AutoConfig.from_pretrained(folder), None
    text = {
        key: value
        for key, value in raw.get("text_config", raw).items()
        if key not in ("model_type", "auto_map")
    }
    return AutoConfig.for_model(stand_in, **text), {r"^language_model\.": ""}


def main() -> None:
    """Execute REQUEST: {"threads", "jobs": [{"folder", "rows", "dtype", "out"}]}; `out` is a
    safetensors file of logits by number of the row."""
    request = read_json(Path(sys.argv[1]))
    torch.set_num_threads(request.get("threads", 1))
    for job in request["jobs"]:
        rows = logits(Path(job["folder"]), job["rows"], dtype=getattr(torch, job["dtype"]))
        save_file({str(number): row.contiguous() for number, row in enumerate(rows)}, job["out"])


if __name__ == "__main__":
    main()
