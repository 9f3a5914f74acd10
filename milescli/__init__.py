"""miles: post-train large language models with reinforcement learning, from a laptop CPU to a
cluster."""

__version__ = "0.1.0"
