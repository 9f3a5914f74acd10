"""What SGLang imports of this module of `sgl_kernel`."""

from milescli.backends.sglang.inside.cpu.trees import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
