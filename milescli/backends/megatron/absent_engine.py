"""What Megatron-Core 0.16.1 takes for granted where TransformerEngine is absent, on a CPU and on an
accelerator alike. Called by whoever builds experts, and by `cpu_compat` for Megatron's own models.
"""

from __future__ import annotations


def mend_router() -> None:
    """A router asks whether `te_general_gemm` is None, and finds it undefined."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
