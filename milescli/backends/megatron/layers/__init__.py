"""Modules that Megatron's layer specs build where TransformerEngine is not: what mixes tokens,
norms, and whole layers of another shape."""
