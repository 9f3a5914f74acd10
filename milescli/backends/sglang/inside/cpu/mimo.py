"""MiMo's config.json, of which transformers has no class: SGLang builds the model of Qwen2's
fields, and releases bring Python of their own, which no engine runs."""

from __future__ import annotations


def install() -> None:
    """Register the config with `AutoConfig`."""
    from transformers import AutoConfig, Qwen2Config

    class MiMoConfig(Qwen2Config):
        """Qwen2's, under another name."""

        model_type = "mimo"

    AutoConfig.register("mimo", MiMoConfig)
