"""How published weights are cut into buckets. No ranks."""

from __future__ import annotations

from milescli.backends.megatron.state.gathering import bucket_groups
from milescli.models import parse_facts, table
from tests.backends.megatron.latent_models import MODELS


def test_what_engines_fuse_is_never_parted() -> None:
    lines = table(parse_facts(MODELS["sparse"]))
    bundles = [
        {name.rpartition("self_attn.")[2] for entry in bundle for name in entry.hf}
        for bundle in bucket_groups(lines.entries)
    ]
    assert bundles.count({"q_a_proj.weight", "kv_a_proj_with_mqa.weight"}) == 3
    assert bundles.count({"indexer.wk.weight", "indexer.weights_proj.weight"}) == 2
    assert sum(len(bundle) for bundle in bundles if len(bundle) > 2) == 0
