"""A multi-token-prediction layer in plain torch around transformers' own decoder layers
(arXiv 2412.19437, section 2.2), which knows nothing of the trainer. `python -m
tests.backends.megatron.plain_mtp ASKED.json OUT.json`, ASKED: {"folders": {name: folder},
"rows"}"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def next_logprobs(folder: Path, rows: list[list[int]]) -> list[list[float]]:
    """Of each row: log-probs of its tokens from the third, each given the hidden state two
    positions before it and the token between."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    number = config.num_hidden_layers
    config.num_hidden_layers = number + 1  # its last layer is that of the MTP layer
    kind = type(AutoModelForCausalLM.from_config(config))
    kind._keys_to_ignore_on_load_unexpected = None
    model = kind.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    frame = {
        name.removeprefix(f"model.layers.{number}."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith(f"model.layers.{number}.")
    }

    def norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = (hidden.square().mean(dim=-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return hidden * scale * weight

    def through(layers, hidden: torch.Tensor) -> torch.Tensor:
        length = hidden.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        rotary = model.model.rotary_emb(hidden, positions)
        for layer in layers:
            made = layer(
                hidden,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=rotary,
            )
            hidden = made if torch.is_tensor(made) else made[0]
        return hidden

    said = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor(row)
            embedded = model.model.embed_tokens(tokens)[None]
            *decoder, last = model.model.layers
            hidden = model.model.norm(through(decoder, embedded))
            both = [norm(embedded[:, 1:], frame["enorm.weight"])]
            both.append(norm(hidden[:, :-1], frame["hnorm.weight"]))
            inner = torch.cat(both, dim=-1) @ frame["eh_proj.weight"].T
            ahead = norm(through([last], inner), frame["shared_head.norm.weight"])
            logprobs = (ahead @ model.lm_head.weight.T).log_softmax(dim=-1)[0]
            said.append(logprobs[:-1].gather(1, tokens[2:, None])[:, 0].tolist())
    return said


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    said = {
        name: next_logprobs(Path(folder), asked["rows"])
        for name, folder in asked["folders"].items()
    }
    Path(sys.argv[2]).write_text(json.dumps(said))
