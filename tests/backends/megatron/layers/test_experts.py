"""What Megatron's experts are given, beside what ranks compute with them."""

from __future__ import annotations

import pytest
from megatron.core.transformer.moe import moe_utils

from milescli.backends.megatron.layers import experts
from milescli.models import parse_facts
from tests.backends.megatron.tiny_models import MODELS


def test_the_router_finds_out_that_transformer_engine_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    experts.options(parse_facts(MODELS["moe"]), routing_replay=False, grouped=False)
    assert moe_utils.te_general_gemm is None
