"""Number formats in which weights are stored: each a codec of pure functions on tensors, and the
names under which folders store them."""

from milescli.checkpoint.formats.base import Codec, Scheme, stored_shapes

__all__ = ["Codec", "Scheme", "stored_shapes"]
