"""Every number format: its rounding bound, its grid, and the implementations of others that read
the same bytes."""

from __future__ import annotations

import pytest
import torch

from milescli.checkpoint.formats import base, fp4, fp8_block, int4, mxfp8
from milescli.checkpoint.formats.base import (
    Codec,
    from_e8m0,
    smallest_power,
    stored_shapes,
    to_e8m0,
)

CODECS = {
    "fp8": fp8_block.codec(),
    "fp8 by powers": fp8_block.codec(powers=True),
    "fp8 by rows": fp8_block.codec((1, 0)),
    "mxfp8": mxfp8.CODEC,
    "int4 of 32": int4.codec(),
    "int4 of 128": int4.codec(128),
    "nvfp4": fp4.NVFP4,
    "mxfp4": fp4.MXFP4,
}


def weights() -> list[torch.Tensor]:
    """Ordinary, of wild range, with blocks of zeros, with one number far beyond the others, and
    tiny."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(200, 384, generator=generator) * 0.02
    wild = plain * torch.exp(4 * torch.randn(plain.shape, generator=generator))
    empty = plain.clone()
    empty[:130, :150] = 0
    lonely = plain.clone()
    lonely[3, 5] = -300.0
    return [plain.to(torch.bfloat16), wild, empty, lonely, plain * 1e-12]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_no_number_is_rounded_further_than_the_bound(codec: Codec) -> None:
    for weight in weights():
        parts = codec.quantise(weight, None)
        difference = (codec.dequantise(parts).double() - weight.double()).abs()
        assert bool((difference <= codec.bound(weight, parts)).all()), float(
            (difference / codec.bound(weight, parts)).max()
        )
        assert {name: tuple(parts[name].shape) for name in ("values", "scale")} == stored_shapes(
            codec, tuple(weight.shape)
        )


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_the_bound_is_not_loose(codec: Codec) -> None:
    """Of ordinary weights some number comes within a tenth of it: a bound that nothing reaches
    would hide a fault."""
    weight = weights()[0]
    parts = codec.quantise(weight, None)
    difference = (codec.dequantise(parts) - weight.float()).abs()
    assert float((difference / codec.bound(weight, parts)).max()) > 0.9


def parts_equal(ours: base.Parts, theirs: base.Parts) -> bool:
    """To the bit."""

    def raw(parts: base.Parts, role: str) -> torch.Tensor:
        return parts[role].reshape(-1).view(torch.uint8)

    return all(torch.equal(raw(ours, role), raw(theirs, role)) for role in ours)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_rounded_weights_get_the_same_bytes(codec: Codec) -> None:
    """Else a checkpoint that is read and written again would creep."""
    for weight in weights()[:4]:
        once = codec.quantise(weight)
        assert torch.equal(codec.rounded(weight), codec.dequantise(once))
        assert parts_equal(codec.quantise(codec.dequantise(once)), once)


def by_448(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and scales by the rule of TransformerEngine's Float8BlockScaling, and that of
    MXFP8BlockScaling: a block is multiplied by the largest power of two that is at most 448 / its
    largest number (`recipe_common.cuh`)."""
    largest = base.block_maxima(weight, block)
    factor = torch.where(largest > 0, 448.0 / largest, torch.ones_like(largest))
    inverse = 1 / (factor.view(torch.int32) & 0x7F800000).view(torch.float32)
    scaled = weight.float() / base.expand(inverse, block, like=weight, offset=(0, 0))
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn), inverse


@pytest.mark.parametrize("name", ["fp8 by powers", "mxfp8"])
def test_rounded_weights_get_the_same_bytes_by_the_rule_of_448(name: str) -> None:
    """A trainer that multiplies by TransformerEngine's kernels would multiply by what engines are
    sent, if it is given rounded weights; of others it makes other numbers."""
    codec, others = CODECS[name], 0
    between = weights()[0].float()
    between[0, 0] = 456 * 2.0**-12  # the largest number; by one rule the scale is twice the other's
    for weight in (*weights(), between):
        parts = codec.quantise(weight, None)
        again, scale = by_448(codec.rounded(weight), codec.block)
        zero = base.block_maxima(weight, codec.block) == 0
        assert torch.equal(again.view(torch.uint8), parts["values"].view(torch.uint8))
        assert torch.equal(scale[~zero], codec.scales(parts)[~zero])
        others += int((by_448(weight, codec.block)[1] != codec.scales(parts)).sum())
    assert others > 0, "the rules differ for weights that were not rounded"


@pytest.mark.parametrize("name", ["fp8 by powers", "mxfp8", "nvfp4", "mxfp4"])
def test_bfloat16_holds_the_numbers_of_formats_whose_scales_are_short(name: str) -> None:
    """So a trainer in bfloat16 multiplies by the numbers that engines do."""
    for weight in weights()[:4]:
        rounded = CODECS[name].rounded(weight)
        assert torch.equal(rounded.bfloat16().float(), rounded)


def test_int4_groups_that_reach_7_return_to_their_grid() -> None:
    generator = torch.Generator().manual_seed(3)
    scale = (0.01 * torch.rand(64, 4, generator=generator) + 0.001).to(torch.bfloat16)
    numbers = torch.randint(-7, 8, (64, 4, 32), generator=generator)
    numbers[..., 0] = 7
    parts = int4.codec(32).quantise((numbers * scale[..., None].float()).flatten(1))
    assert torch.equal(int4.unpack(parts["values"]), numbers.flatten(1).float())
    assert torch.equal(parts["scale"], scale)


def test_e2m1_rounds_to_the_nearest_and_ties_to_even() -> None:
    steps = torch.linspace(-6, 6, 4801)
    values = torch.tensor(fp4.VALUES)
    distance = (steps[:, None] - values).abs()
    chosen = (steps - values[fp4.to_e2m1(steps).long()]).abs()
    assert torch.equal(chosen, distance.amin(dim=1))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert values[fp4.to_e2m1(ties).long()].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_e8m0_is_torchs_own() -> None:
    codes = torch.arange(1, 255, dtype=torch.uint8)
    powers = from_e8m0(codes)
    assert torch.equal(powers, codes.view(torch.float8_e8m0fnu).float())
    assert torch.equal(to_e8m0(powers), codes)
    assert bool(from_e8m0(torch.tensor([255], dtype=torch.uint8)).isnan().all())
    assert smallest_power(torch.tensor([1.0, 1.1, 0.25, 3.0])).tolist() == [1.0, 2.0, 0.25, 4.0]


def test_scales_by_powers_are_powers_of_two_and_hold_the_largest() -> None:
    for codec in (fp8_block.codec(powers=True), mxfp8.CODEC, fp4.MXFP4):
        for weight in weights()[:4]:
            parts = codec.quantise(weight, None)
            scale = codec.scales(parts)
            assert bool((torch.frexp(scale)[0] == 0.5).all())
            largest = 6.0 if codec is fp4.MXFP4 else 448.0
            unpacked = codec.unpack(parts["values"]).abs()
            assert largest / 2 < float(unpacked.max()) <= largest


def test_transformers_reads_fp8_alike() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = weights()[1][:, :256].repeat(2, 1)[:256]
    for codec in (fp8_block.codec(), fp8_block.codec(powers=True), mxfp8.CODEC):
        parts = codec.quantise(weight, None)
        theirs = Fp8Dequantize(None)._dequantize_one(parts["values"], parts["scale"], torch.float32)
        assert torch.equal(codec.dequantise(parts), theirs)
    parts = fp4.MXFP4.quantise(weight, None)
    theirs = Fp8Dequantize(None)._dequantize_one(
        parts["values"].view(torch.int8), parts["scale"].view(torch.float8_e8m0fnu), torch.float32
    )
    assert torch.equal(fp4.MXFP4.dequantise(parts), theirs)


def test_transformers_reads_mxfp4_alike() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weight = torch.randn(3, 20, 64, generator=torch.Generator().manual_seed(1))
    parts = fp4.MXFP4.quantise(weight, None)
    theirs = convert_moe_packed_tensors(parts["values"].unflatten(-1, (-1, 16)), parts["scale"])
    assert torch.equal(fp4.MXFP4.dequantise(parts).transpose(1, 2).to(torch.bfloat16), theirs)


def _scheme(**weights: object) -> object:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


@pytest.mark.parametrize("group", [32, 128])
def test_compressed_tensors_reads_int4_alike(group: int) -> None:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    codec = int4.codec(group)
    for weight in weights():
        parts = codec.quantise(weight, None)
        stored = {
            "weight_packed": parts["values"],
            "weight_scale": parts["scale"],
            "weight_shape": torch.tensor(weight.shape),
        }
        scheme = _scheme(num_bits=4, type="int", strategy="group", group_size=group, symmetric=True)
        theirs = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
        assert torch.equal(codec.dequantise(parts).to(theirs.dtype), theirs)


def test_compressed_tensors_packs_int4_alike() -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import (
        pack_to_int32,
        unpack_from_int32,
    )

    numbers = torch.randint(
        -8, 8, (5, 44), generator=torch.Generator().manual_seed(2), dtype=torch.int8
    )
    assert torch.equal(int4.pack(numbers), pack_to_int32(numbers, 4))
    assert torch.equal(
        int4.unpack(int4.pack(numbers))[:, :44].to(torch.int8),
        unpack_from_int32(int4.pack(numbers), 4, numbers.shape),
    )


def test_compressed_tensors_reads_fp4_alike() -> None:
    from compressed_tensors.compressors.nvfp4.helpers import (
        pack_fp4_to_uint8,
        unpack_fp4_from_uint8,
    )

    weight = weights()[1]
    parts = fp4.NVFP4.quantise(weight, None)
    rows, columns = weight.shape
    theirs = unpack_fp4_from_uint8(parts["values"], rows, columns, dtype=torch.float32)
    assert torch.equal(fp4.unpack(parts["values"]), theirs)
    assert torch.equal(pack_fp4_to_uint8(theirs), parts["values"])
    divided = {**parts, "global_scale": 1 / parts["global_scale"]}
    assert torch.allclose(
        fp4.NVFP4_DIVIDED.dequantise(divided), fp4.NVFP4.dequantise(parts), rtol=1e-6
    )


def test_nvfp4_tensors_that_are_fused_share_a_global_scale() -> None:
    gate, up = weights()[0].float(), 3 * weights()[0].float()
    largest = torch.maximum(gate.abs().max(), up.abs().max())
    parts = [fp4.NVFP4.quantise(weight, largest) for weight in (gate, up)]
    assert torch.equal(parts[0]["global_scale"], parts[1]["global_scale"])
    assert 240.0 <= float(parts[1]["scale"].float().max()) <= 448.0
    for weight, part in zip((gate, up), parts, strict=True):
        assert bool(
            ((fp4.NVFP4.dequantise(part) - weight).abs() <= fp4.NVFP4.bound(weight, part)).all()
        )


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_region_is_dequantised_by_its_own_blocks(codec: Codec) -> None:
    weight = weights()[1]
    parts = codec.quantise(weight, None)
    whole = codec.dequantise(parts)
    rows = codec.block[0] or 200
    region = {**parts, "values": parts["values"][rows // 2 : rows + 1], "scale": parts["scale"][:2]}
    assert torch.equal(codec.dequantise(region, offset=(rows // 2, 0)), whole[rows // 2 : rows + 1])


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_work_in_pieces_gives_the_same(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights()[1]
    parts = codec.quantise(weight, None)
    whole = codec.dequantise(parts)
    chunks = base.row_chunks
    monkeypatch.setattr(
        base,
        "row_chunks",
        lambda codec, rows, columns: chunks(codec, rows, columns, numbers=5 * columns),
    )
    assert all(
        torch.equal(tensor, parts[role])
        for role, tensor in base.quantise_by_rows(codec, weight).items()
    )
    begin = 37 if codec.block[0] > 1 else 0
    region = {**parts, "values": parts["values"][begin:]}
    pieced = base.dequantise_by_rows(
        codec, region, dtype=torch.float32, columns=(3, 90), offset=(begin, 0)
    )
    assert torch.equal(pieced, whole[begin:, 3:90])
    stacked = {
        role: torch.stack([part, part]) if part.dim() else part for role, part in parts.items()
    }
    both = base.dequantise_by_rows(
        codec, stacked, dtype=torch.bfloat16, columns=(0, weight.shape[1])
    )
    assert torch.equal(both, torch.stack([whole, whole]).to(torch.bfloat16))
