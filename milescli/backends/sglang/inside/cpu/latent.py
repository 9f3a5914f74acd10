"""Multi-head latent attention on a CPU (DeepSeek-V3 and its kin): always in the absorbed form, by
the attention backend of this folder.

Keys and values of a token are one latent row in the cache; queries are taken into its space by
`w_kc` and results out of it by `w_vc`, so that to the backend it is attention with one key-value
head whose value is the first part of its key.
"""

from __future__ import annotations


def install() -> None:
    """Add latent attention to `torch_native`, rotary embeddings other than DeepSeek's YaRN to the
    CPU path, and the latents' own epsilon to their norms."""
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models import deepseek_v2
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register(
        "torch_native", lambda attention, batch: AttnForwardMethod.MLA
    )

    def get_rope_cpu(*arguments: object, device: str | None = None, **settings: object) -> object:
        return factory.get_rope(*arguments[:_ROPE_ARGUMENTS], **settings)

    factory.get_rope_cpu = get_rope_cpu
    build = deepseek_v2.DeepseekV2AttentionMLA.__init__

    def build_with_own_epsilon(self, *arguments, **settings):
        build(self, *arguments, **settings)
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if hasattr(self, name):
                getattr(self, name).variance_epsilon = _LATENT_EPSILON

    deepseek_v2.DeepseekV2AttentionMLA.__init__ = build_with_own_epsilon


_ROPE_ARGUMENTS = 8
"""get_rope_cpu's last argument is the device, where get_rope has another."""
_LATENT_EPSILON = 1e-6
"""In the releases' own code, in transformers and in the trainer, whatever `rms_norm_eps` says (1e-5
in Kimi K2 and GLM-4.7-Flash)."""
