"""A model from scratch that is made in a moment, as a recipe writes it: for the tests of this
room."""

from __future__ import annotations

SMALL = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 32,
    "ffn_hidden_size": 32,
    "vocab_size": 300,
}
