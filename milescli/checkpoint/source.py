"""Opens a Hugging Face folder, plain or quantised, as plain tensors under plain names
(`open_source`). Reads safetensors, writes nothing.

Called by convert and by the trainer's load. A slice of a quantised tensor reads and dequantises
only the blocks that it touches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from milescli.checkpoint.formats.base import Scheme, dequantise_by_rows, stored_shapes
from milescli.checkpoint.formats.schemes import DROPPED, schemes_of
from milescli.checkpoint.hf_folder import HfReader, RegionReader
from milescli.core.errors import CheckpointError
from milescli.models.base import quantization_config, read_config

_QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
_LEFT_OVER = (
    ".weight_scale_inv",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_packed",
    ".weight_shape",
    ".weight_global_scale",
)
_UNSUPPORTED = (".weight_zero_point", ".weight_g_idx", ".pre_quant_scale", ".qweight", ".qzeros")
_DOWNLOAD_AGAIN = "fetch the model again, as safetensors"


def open_source(folder: Path) -> Source:
    """Open a folder of weights. Use as a context manager. Raises CheckpointError if config.json and
    tensors contradict each other, or a part of a quantised tensor is missing or misshapen."""
    config = read_config(folder)
    schemes = schemes_of(config)
    reader = HfReader(folder)
    try:
        if schemes:
            quantised = quantization_config(config) or {}
            return QuantisedReader(
                reader,
                schemes,
                method=str(quantised.get("quant_method") or quantised.get("quant_algo")),
                dtype=_plain_dtype(config),
            )
        _refuse_unannounced(reader)
        return reader
    except BaseException:
        reader.__exit__()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _QuantisedTensor:
    """Describes how the parts of one quantised tensor are stored."""

    scheme: Scheme
    names: dict[str, str]
    """role -> name on disk"""
    shape: tuple[int, ...]
    """[..., rows, columns] as stored: before the last two dims are swapped, if they are"""

    @property
    def plain_shape(self) -> tuple[int, ...]:
        return (
            (*self.shape[:-2], self.shape[-1], self.shape[-2])
            if self.scheme.transposed
            else self.shape
        )


def _plain_dtype(config: Mapping[str, object]) -> torch.dtype:
    """Return the dtype of the plain weights: bfloat16, from which releases quantise, unless
    config.json says float32."""
    text = config.get("text_config")
    holders = [config, *([text] if isinstance(text, Mapping) else [])]
    named = {str(holder.get(key)) for holder in holders for key in ("dtype", "torch_dtype")}
    return torch.float32 if named & {"float32", "torch.float32"} else torch.bfloat16


class QuantisedReader(RegionReader):
    """Implements HfReader's interface over a quantised folder: gives plain tensors, dequantised
    from their parts or stored plain."""

    def __init__(
        self, reader: HfReader, schemes: Sequence[Scheme], *, method: str, dtype: torch.dtype
    ) -> None:
        """Take ownership of `reader`. `method` is config.json's name of the quantisation; tensors
        are dequantised to `dtype`."""
        self._reader, self.method, self._dtype = reader, method, dtype
        self._stored = _find_stored(reader, schemes, method=method)
        parts = {name for stored in self._stored.values() for name in stored.names.values()}
        dropped = {name for name in reader.names() if name.endswith(DROPPED)}
        self._plain = {name for name in reader.names() if name not in parts and name not in dropped}
        _refuse_left_over(reader, sorted(self._plain), method=method)

    @property
    def folder(self) -> Path:
        """Return the folder."""
        return self._reader.folder

    def __exit__(self, *exc: object) -> None:
        self._reader.__exit__(*exc)

    def __contains__(self, name: str) -> bool:
        return name in self._stored or name in self._plain

    def drop_cached_pages(self) -> None:
        """Drop everything that is read from now on from the page cache."""
        self._reader.drop_cached_pages()

    def names(self) -> list[str]:
        """Return the plain names of all tensors of the model."""
        return sorted([*self._stored, *self._plain])

    def quantised_names(self) -> list[str]:
        """Return the names of the tensors that are stored quantised."""
        return sorted(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored.get(name)
        return stored.plain_shape if stored else self._reader.shape(name)

    def is_real(self, name: str) -> bool:
        """Return True if the plain tensor holds real numbers."""
        return name in self._stored or self._reader.is_real(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the plain tensor."""
        return self._dtype if name in self._stored else self._reader.dtype(name)

    def read_region(self, name: str, *ranges: tuple[int, int]) -> torch.Tensor:
        if name not in self._stored:
            return self._reader.read_region(name, *ranges)
        return _region(self._reader, self._stored[name], list(ranges), self._dtype)

    def parts(self, name: str) -> dict[str, torch.Tensor] | None:
        """Return role -> stored tensor of a quantised tensor, whole; None for a plain one."""
        stored = self._stored.get(name)
        return stored and {
            role: self._reader.read(on_disk) for role, on_disk in stored.names.items()
        }


Source = HfReader | QuantisedReader
"""Result of `open_source`: one interface to read plain tensors by plain names."""


def _find_stored(
    reader: HfReader, schemes: Sequence[Scheme], *, method: str
) -> dict[str, _QuantisedTensor]:
    by_name: dict[str, _QuantisedTensor] = {}
    for name in reader.names():
        if name.endswith(_UNSUPPORTED):
            raise _contradiction(
                reader, why=f"`{name}` belongs to a variant of {method} that miles does not support"
            )
        named = [
            scheme
            for scheme in schemes
            if (plain := scheme.plain_name(name)) and _is_values(reader, name, scheme)
        ]
        if not named:
            continue
        complete = [scheme for scheme in named if _missing(reader, scheme, name) is None]
        if not complete:
            missing = _missing(reader, named[0], name)
            raise _contradiction(
                reader, why=f"`{name}` is quantised, but its `{missing}` is missing"
            )
        fitting = [
            stored for scheme in complete if (stored := _stored(reader, scheme, name)) is not None
        ]
        if not fitting:
            raise _contradiction(reader, why=_describe_misfit(reader, complete[0], name))
        plain = fitting[0].scheme.plain_name(name)
        assert plain is not None
        by_name[plain] = fitting[0]
    if not by_name:
        raise CheckpointError(
            f"`{reader.folder}`: config.json and weights do not match",
            why=f"config.json says that the weights are quantised as {method}, but no tensor is",
            fix="remove `quantization_config` from config.json if the weights are not "
            "quantised, or download the model again",
        )
    return by_name


def _is_values(reader: HfReader, name: str, scheme: Scheme) -> bool:
    """Return True if a tensor holds quantised numbers of this scheme; a plain tensor may have the
    same suffix."""
    if reader.dtype(name) not in scheme.codec.values_dtypes:
        return False
    # without a suffix of its own, every tensor would end alike: scales and the parts of other
    # schemes too
    return bool(scheme.suffixes["values"]) or not name.endswith((".weight", *_LEFT_OVER))


def _missing(reader: HfReader, scheme: Scheme, values_name: str) -> str | None:
    plain = scheme.plain_name(values_name)
    assert plain is not None
    return next((name for name in scheme.names(plain).values() if name not in reader), None)


def _stored(reader: HfReader, scheme: Scheme, values_name: str) -> _QuantisedTensor | None:
    """Return the description of a tensor; None if the scale's shape or dtype is not the
    scheme's."""
    plain = scheme.plain_name(values_name)
    assert plain is not None
    names = scheme.names(plain)
    shape = _shape(reader, scheme, names)
    if shape is None or reader.dtype(names["scale"]) not in scheme.codec.scale_dtypes:
        return None
    expected = stored_shapes(scheme.codec, shape)["scale"]
    scale = reader.shape(names["scale"])
    same = scale == expected or (
        math.prod(expected) == math.prod(scale) and scale in (expected[:-1], expected[:-2], (1,))
    )
    return _QuantisedTensor(scheme=scheme, names=names, shape=shape) if same else None


def _shape(reader: HfReader, scheme: Scheme, names: dict[str, str]) -> tuple[int, ...] | None:
    """Return [..., rows, columns] of the tensor that the stored numbers represent."""
    codec, values = scheme.codec, reader.shape(names["values"])
    if scheme.grouped:
        values = (
            (*values[:-2], values[-2] * values[-1])
            if values[-1] * codec.per_element == codec.block[1]
            else ()
        )
    if len(values) < 2:
        return None
    columns = values[-1] * codec.per_element
    if "shape" in names:
        recorded = [int(length) for length in reader.read(names["shape"])]
        if (
            len(recorded) != 2
            or recorded[0] != values[-2]
            or -(-recorded[1] // codec.per_element) != values[-1]
        ):
            return None
        columns = recorded[1]
    return (*values[:-1], columns)


def _describe_misfit(reader: HfReader, scheme: Scheme, values_name: str) -> str:
    plain = scheme.plain_name(values_name)
    assert plain is not None
    names = scheme.names(plain)
    values, scale = reader.shape(names["values"]), reader.shape(names["scale"])
    shape = _shape(reader, scheme, names)
    if shape is None:
        return (
            f"`{names['values']}` is {list(values)}, which "
            f"`{names.get('shape', names['scale'])}` contradicts"
        )
    expected = list(stored_shapes(scheme.codec, shape)["scale"])
    return (
        f"`{names['scale']}` is {list(scale)} {reader.dtype(names['scale'])}, and "
        f"`{names['values']}` {list(values)} needs {expected}"
    )


def _region(
    reader: HfReader, stored: _QuantisedTensor, ranges: list[tuple[int, int]], dtype: torch.dtype
) -> torch.Tensor:
    """Return [start:end along every dim] of the plain tensor."""
    scheme, codec = stored.scheme, stored.scheme.codec
    assert len(ranges) == len(stored.shape), (stored.names, ranges)
    if scheme.transposed:
        ranges = [*ranges[:-2], ranges[-1], ranges[-2]]
    *lead, rows, columns = ranges
    # whole stored elements, or whole groups of them
    unit = codec.block[1] if scheme.grouped else codec.per_element
    first, last = columns[0] // unit, -(-columns[1] // unit)
    values_ranges = [*lead, rows, (first, last)]
    if scheme.grouped:
        values_ranges.append((0, codec.block[1] // codec.per_element))
    values = reader.read_region(stored.names["values"], *values_ranges)
    if scheme.grouped:
        values = values.flatten(-2)
    row_blocks, row_offset = _block_range(rows, codec.block[0])
    column_blocks, column_offset = _block_range((first * unit, columns[1]), codec.block[1])
    scale = _scale(reader, stored, [*lead, row_blocks, column_blocks])
    parts = {"values": values, "scale": scale}
    if "global_scale" in stored.names:
        parts["global_scale"] = reader.read(stored.names["global_scale"])
    within = (columns[0] - first * unit, columns[1] - first * unit)
    region = dequantise_by_rows(
        codec, parts, dtype=dtype, columns=within, offset=(row_offset, column_offset)
    )
    return region.transpose(-1, -2).contiguous() if scheme.transposed else region


def _scale(
    reader: HfReader, stored: _QuantisedTensor, ranges: list[tuple[int, int]]
) -> torch.Tensor:
    """Return the scales of the blocks of a region. Scales of whole rows or tensors may be stored
    with fewer dims."""
    name = stored.names["scale"]
    expected = stored_shapes(stored.scheme.codec, stored.shape)["scale"]
    if reader.shape(name) == expected:
        return reader.read_region(name, *ranges)
    whole = reader.read(name).reshape(expected)
    return whole[tuple(slice(*bounds) for bounds in ranges)]


def _block_range(numbers: tuple[int, int], size: int) -> tuple[tuple[int, int], int]:
    """Return (blocks that hold these numbers, offset of the first number within the first
    block)."""
    if not size:
        return (0, 1), 0
    first = numbers[0] // size
    return (first, max(-(-numbers[1] // size), first)), numbers[0] - first * size


def _refuse_unannounced(reader: HfReader) -> None:
    for name in reader.names():
        if reader.dtype(name) in _QUANTISED_DTYPES and not name.endswith(DROPPED):
            raise _contradiction(
                reader,
                why=f"`{name}` is stored as {reader.dtype(name)}, but config.json has no "
                "`quantization_config`",
            )


def _refuse_left_over(reader: HfReader, plain: Sequence[str], *, method: str) -> None:
    for name in plain:
        if name.endswith(_LEFT_OVER):
            raise _contradiction(
                reader, why=f"`{name}` does not belong to any tensor that is quantised as {method}"
            )
        if reader.dtype(name) in _QUANTISED_DTYPES:
            raise _contradiction(
                reader,
                why=f"`{name}` is stored as {reader.dtype(name)}, but {method} has no scale for it",
            )


def _contradiction(reader: HfReader, *, why: str) -> CheckpointError:
    return CheckpointError(
        f"`{reader.folder}`: config.json and weights do not match",
        why=why,
        fix=_DOWNLOAD_AGAIN,
    )


def require_finite(tensor: torch.Tensor, *, name: str, where: str) -> None:
    """Raise CheckpointError if `tensor` contains NaN or infinity. Reads the tensor once."""
    if not tensor.is_floating_point() or not tensor.numel() or tensor.itemsize == 1:
        return
    # both ends are NaN if any number is, and infinite if one is
    low, high = torch.aminmax(tensor)
    if bool(torch.isfinite(low)) and bool(torch.isfinite(high)):
        return
    wrong = ~torch.isfinite(tensor)
    place = [int(index) for index in wrong.nonzero()[0]] if tensor.dim() else []
    raise CheckpointError(
        f"`{name}` cannot be trained or served",
        why=f"{int(wrong.sum())} of its {tensor.numel()} numbers are NaN or infinite, the first at "
        f"{place}, in {where}",
        fix="download the model again, or use an earlier checkpoint",
    )
