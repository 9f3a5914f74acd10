"""A multi-token-prediction layer in plain torch around transformers' own decoder layers
(arXiv 2412.19437, section 2.2), which knows nothing of the trainer. `python -m
tests.backends.megatron.plain_mtp ASKED.json OUT.json`, ASKED: {"folders": {name: folder},
"rows"}"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """How a family's releases name what stands around the layer."""

    layer: str
    """What the names of the layer begin with."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    last_norm: str
    hidden_first: bool = False
    """The projection takes the hidden state before the embedding."""
    zero_centred: bool = False
    """Norms multiply by 1 + weight."""


_DEEPSEEK = Frame(
    layer="model.layers.{number}.",
    embedding_norm="model.layers.{number}.enorm",
    hidden_norm="model.layers.{number}.hnorm",
    projection="model.layers.{number}.eh_proj",
    last_norm="model.layers.{number}.shared_head.norm",
)
_MIMO = Frame(
    layer="model.mtp_layers.0.",
    embedding_norm="model.mtp_layers.0.token_layernorm",
    hidden_norm="model.mtp_layers.0.hidden_layernorm",
    projection="model.mtp_layers.0.input_proj",
    last_norm="model.mtp_layers.0.final_layernorm",
    hidden_first=True,
)
_QWEN = Frame(
    layer="mtp.layers.0.",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    last_norm="mtp.norm",
    zero_centred=True,
)
_ONE_LAYER = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["sparse"],
}
"""What a model of the MTP layer's decoder layer alone has in its config."""
_PARTS = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
"""Of a decoder layer."""


def next_logprobs(folder: Path, rows: list[list[int]]) -> list[list[float]]:
    """Of each row: log-probs of its tokens from the third, each given the hidden state two
    positions before it and the token between."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "deepseek_v4":
        return _next_logprobs_of_streams(folder, config, rows)
    # of which transformers has no model by its own name
    config["model_type"] = re.sub("^mimo$", "qwen2", config["model_type"])
    number, weights = config["num_hidden_layers"], load_file(folder / "model.safetensors")
    of_type = {"qwen2": _MIMO, "qwen3_next": _QWEN}
    frame = of_type.get(
        config["model_type"], _QWEN if config["model_type"].startswith("qwen3_5") else _DEEPSEEK
    )

    def weight(name: str) -> torch.Tensor:
        return weights[name.format(number=number) + ".weight"]

    layer, model = frame.layer.format(number=number), "model.layers.0."
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    trunk = {name: value for name, value in weights.items() if not name.startswith((layer, "mtp"))}
    ahead = {
        **{name: weights[name] for name in ends},
        "model.norm.weight": weight(frame.last_norm),
        **{
            name.replace(layer, model): value
            for name, value in weights.items()
            if name.startswith(tuple(layer + part for part in _PARTS))
        },
    }
    below, layer_alone = _loaded(config, trunk), _loaded({**config, **_ONE_LAYER}, ahead)

    def norm(hidden: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        scale = (hidden.square().mean(dim=-1, keepdim=True) + below.config.rms_norm_eps).rsqrt()
        return hidden * scale * (factor + frame.zero_centred)

    said = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor(row)
            hidden = below.model(input_ids=tokens[None], use_cache=False).last_hidden_state
            both = [
                norm(below.model.embed_tokens(tokens[None, 1:]), weight(frame.embedding_norm)),
                norm(hidden[:, :-1], weight(frame.hidden_norm)),
            ]
            inner = torch.cat(both[::-1] if frame.hidden_first else both, dim=-1)
            inner = inner @ weight(frame.projection).T
            further = layer_alone.model(inputs_embeds=inner, use_cache=False).last_hidden_state
            logprobs = (further @ below.lm_head.weight.T).log_softmax(dim=-1)[0]
            said.append(logprobs[:-1].gather(1, tokens[2:, None])[:, 0].tolist())
    return said


def _next_logprobs_of_streams(
    folder: Path, config: dict[str, object], rows: list[list[int]]
) -> list[list[float]]:
    """As DeepSeek-V4's own code: the embedding is added to each residual stream of the model below,
    as it is before the head that sums them, and the layer sees its window alone."""
    weights, mine = load_file(folder / "model.safetensors"), "mtp.0."
    trunk = {name: value for name, value in weights.items() if not name.startswith("mtp")}
    of_layer = tuple(mine + part for part in ("attn", "ffn", "hc_attn", "hc_ffn"))
    ahead = {
        name.replace(mine, "layers.0." if name.startswith(of_layer) else ""): value
        for name, value in weights.items()
        if name.startswith(mine)
    }
    ahead |= {name: weights[name] for name in ("embed.weight", "head.weight")}
    kinds = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
    below = _loaded(config, trunk)
    layer_alone = _loaded({**config, **kinds, "num_hidden_layers": 1}, ahead)
    eps, kept = below.config.rms_norm_eps, {}
    below.model.hc_head.register_forward_pre_hook(lambda _, given: kept.update(streams=given[0]))
    layer_alone.model.layers[0].register_forward_pre_hook(lambda *_: (kept["inner"],))

    def norm(hidden: torch.Tensor, name: str) -> torch.Tensor:
        scale = (hidden.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
        return hidden * scale * weights[f"{mine}{name}.weight"]

    said = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor(row)
            below.model(input_ids=tokens[None], use_cache=False)
            embedded = below.model.embed_tokens(tokens[None, 1:])
            kept["inner"] = (norm(embedded, "enorm") @ weights[mine + "e_proj.weight"].T)[
                :, :, None
            ] + norm(kept["streams"][:, :-1], "hnorm") @ weights[mine + "h_proj.weight"].T
            further = layer_alone.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
            logprobs = (further @ below.lm_head.weight.T).log_softmax(dim=-1)[0]
            said.append(logprobs[:-1].gather(1, tokens[2:, None])[:, 0].tolist())
    return said


def _loaded(config: dict[str, object], tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(config))
        save_file(tensors, Path(made) / "model.safetensors", metadata={"format": "pt"})
        model, told = AutoModelForCausalLM.from_pretrained(
            made, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not told["missing_keys"], told
    return model.eval()


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    said = {
        name: next_logprobs(Path(folder), asked["rows"])
        for name, folder in asked["folders"].items()
    }
    Path(sys.argv[2]).write_text(json.dumps(said))
