"""Multi-head latent attention on a CPU (DeepSeek-V3 and its kin): always in the absorbed form, by the attention backend of this folder.

Keys and values of a token are one latent row in the cache; queries are taken into its space by `w_kc` and results out of it by
`w_vc`, so that to the backend it is attention with one key-value head whose value is the first part of its key.
"""

from __future__ import annotations


def install() -> None:
    """SGLang has no latent attention for `torch_native`, and its CPU rotary embedding knows DeepSeek's YaRN alone."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    # else `--enable-deterministic-inference` is refused for these models; the engine's command says whether prefixes are kept
    if "torch_native" not in choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND:
        choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)

    def get_rope_cpu(*arguments: object, device: str | None = None, **settings: object) -> object:
        return factory.get_rope(*arguments[:_ROPE_ARGUMENTS], **settings)

    factory.get_rope_cpu = get_rope_cpu


_ROPE_ARGUMENTS = 8
"""get_rope_cpu's last argument is the device, where get_rope has another."""
