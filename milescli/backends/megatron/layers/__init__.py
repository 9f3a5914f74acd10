"""Modules that Megatron's layer specs build where TransformerEngine is not used: token mixers,
norms, and whole layers of another shape."""
