"""What a small model spends its time on beside matrix products, each in one pass over memory: in C,
compiled for the processor at hand. Float32 tensors of a CPU; none of these knows a gradient. Used
by engines and trainers, which have PyTorch's own calls for where there is no compiler.

Letters: S or T tokens, H query heads, K key/value heads, D head size, B requests.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("cpu_kernels.c")
FLAGS = (
    "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=gnu11",
    # rounding in vectors, too; nothing that lets the compiler compute another formula
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
ANOTHER_COMPILER = "export CC=gcc   # or another that knows OpenMP"
COMPILE_TIMEOUT_S = 60.0
"""It takes a second."""


class NoKernels(Exception):
    """Says why there are none; `fix` is a command that may mend it."""

    def __init__(self, why: str, *, fix: str) -> None:
        super().__init__(why)
        self.fix = fix


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, compiled if need be; None where that cannot be done, which the log tells."""
    try:
        return loaded()
    except NoKernels as error:
        logging.getLogger(__name__).warning("no compiled kernels for this CPU: %s", error)
        return None


def loaded() -> ctypes.CDLL:
    """The same; raises NoKernels where it cannot be done."""
    path = compiled()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # a home that nothing may be run from, a library that was cut short
        raise NoKernels(f"{path} cannot be loaded: {error}", fix=f"rm {path}") from None


def compiled() -> Path:
    """The library's path. Raises NoKernels where there is no compiler, or it fails."""
    compiler = find_compiler()
    if compiler is None:
        fix = "sudo apt-get install gcc   # or as your system calls it"
        raise NoKernels("no C compiler (cc, gcc or clang) is on the PATH", fix=fix)
    path = _folder() / f"{_key(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    return path


def find_compiler() -> str | None:
    """What CC names, or the first of the usual ones on the PATH."""
    names = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _key(compiler: str) -> str:
    """Another source, compiler or processor has a library of its own."""
    made = os.stat(compiler)
    parts = (SOURCE.read_text(), *FLAGS, compiler, made.st_size, made.st_mtime_ns, _processor())
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


def _processor() -> str:
    """Its name and instruction sets, by which -march=native goes."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = {
        line.split(":", 1)[0].strip(): line
        for line in lines
        if line.startswith(("model name", "flags", "Features", "CPU part"))
    }
    return "\0".join([platform.machine(), platform.processor(), *told.values()])


def _folder() -> Path:
    """In the user's cache, or in the folder of temporary files; nobody else can write to it, since
    what lies there is run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    temporary = Path(tempfile.gettempdir()) / f"miles-{os.getuid()}"
    for base in (cache / "miles", temporary) if cache.is_absolute() else (temporary,):
        folder = base / "kernels"
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        is_ours = all(_only_ours(part.stat()) for part in (base, folder))
        if is_ours and os.access(folder, os.W_OK | os.X_OK):
            return folder
    where = cache / "miles"
    fix = f"chmod -R go-w {where}   # or export XDG_CACHE_HOME=FOLDER"
    raise NoKernels(f"{where} cannot be written to, or others can", fix=fix)


def _only_ours(of: os.stat_result) -> bool:
    return of.st_uid == os.getuid() and not of.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(compiler: str, path: Path) -> None:
    """Whole or not at all: several processes may begin at once."""
    part = path.with_suffix(f".{os.getpid()}.part")
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(part), "-lm"]
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
        )
        os.replace(part, path)
    except subprocess.TimeoutExpired:
        why = f"{compiler} took more than {COMPILE_TIMEOUT_S:.0f} s"
        raise NoKernels(why, fix=ANOTHER_COMPILER) from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise NoKernels(f"{compiler} failed: {lines[0]}", fix=ANOTHER_COMPILER) from None
    except OSError as error:
        raise NoKernels(f"{compiler}: {error}", fix=ANOTHER_COMPILER) from None
    finally:
        part.unlink(missing_ok=True)


LANES = 8
"""Head sizes that attention takes are multiples of it."""
_LETTERS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "t": ctypes.c_int}
_ARGUMENTS = {
    "rms_norm": "pipppppiift",
    "rms_norm_backward": "pipippppiiit",
    "swiglu": "ppiit",
    "swiglu_backward": "pppiit",
    "rotate": "piippipfpiiit",
    "attend_slots": "pipppipppiiiiifit",
    "attend_packed": "pipipipppiiiiiift",
    "attend_packed_backward": "pipipipipppppiiiiiift",
}
"""By function: p pointer, i int64, f float, t int."""
_BLOCK_VALUES = 16_384
"""Of rows whose gradients of a weight are added up together."""


def are_there() -> bool:
    """Whether the others may be called. The first call compiles, for a second."""
    return load() is not None


def suit(*tensors: torch.Tensor) -> bool:
    """Whether these are tensors for them, and they are there."""
    plain = all(x.dtype is torch.float32 and x.device.type == "cpu" for x in tensors)
    return plain and are_there()


@functools.cache
def _function(name: str) -> Callable[..., None]:
    function = getattr(load(), name)
    function.argtypes = [_LETTERS[letter] for letter in _ARGUMENTS[name]]
    function.restype = None
    return function


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, x + residual, or x where there is none), [..., W]: x / sqrt(mean(x^2) + eps) *
    weight (arXiv 1910.07467). `scales` [rows]: takes what each row was multiplied by."""
    assert _is_laid(weight)
    x, stride = _rows(x)
    width = x.shape[-1]
    out, added = torch.empty(x.shape), x
    if residual is not None:
        residual, added = residual.contiguous(), torch.empty(x.shape)
    _function("rms_norm")(
        x.data_ptr(),
        stride,
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        added.data_ptr(),
        out.data_ptr(),
        None if scales is None else scales.data_ptr(),
        x.numel() // width,
        width,
        eps,
        torch.get_num_threads(),
    )
    return out, added


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [..., W] and of the weight [W]; `scales` as `rms_norm` gave them."""
    (grad, grad_stride), (x, stride) = _rows(grad), _rows(x)
    width = x.shape[-1]
    rows, block = x.numel() // width, max(_BLOCK_VALUES // width, 1)
    out, parts = torch.empty(x.shape), torch.empty((-(-rows // block), width))
    _function("rms_norm_backward")(
        grad.data_ptr(),
        grad_stride,
        x.data_ptr(),
        stride,
        weight.data_ptr(),
        scales.data_ptr(),
        out.data_ptr(),
        parts.data_ptr(),
        rows,
        width,
        block,
        torch.get_num_threads(),
    )
    return out, parts.sum(dim=0)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """[..., 2 F] -> [..., F]: silu(first half) * second half."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width))
    _function("swiglu")(
        x.data_ptr(), out.data_ptr(), out.numel() // width, width, torch.get_num_threads()
    )
    return out


def swiglu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of `swiglu`'s argument, [..., 2 F]."""
    grad, x = grad.contiguous(), x.contiguous()
    width, out = grad.shape[-1], torch.empty(x.shape)
    _function("swiglu_backward")(
        grad.data_ptr(),
        x.data_ptr(),
        out.data_ptr(),
        grad.numel() // width,
        width,
        torch.get_num_threads(),
    )
    return out


def rotate(
    x: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    back: bool = False,
) -> torch.Tensor:
    """x [T, heads, D]: (a, b) -> (a cos - b sin, b cos + a sin) of the halves of each head
    (RoFormer, arXiv 2104.09864, eq. 34, halves instead of neighbours). `cosine` and `sine`
    [rows, D / 2], whose rows are apart alike: that of token t, or `positions[t]`, is for t. `back`:
    the other way round."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    assert len(cosine if positions is None else positions) == len(x)
    assert positions is None or _is_laid(positions, torch.int64)
    assert cosine.stride() == sine.stride() and cosine.stride(1) == 1
    tokens, heads, size = x.shape
    out = torch.empty(x.shape)
    _function("rotate")(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        cosine.data_ptr(),
        sine.data_ptr(),
        cosine.stride(0),
        None if positions is None else positions.data_ptr(),
        -1.0 if back else 1.0,
        out.data_ptr(),
        tokens,
        heads,
        size // 2,
        torch.get_num_threads(),
    )
    return out


def attend_slots(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    lens: torch.Tensor,
    *,
    longest: int,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """One new token of each request over its context: query [B, H, D], caches [slots, K, D] -> [B,
    H, D]. `table` [requests, positions] int32: slots; `requests` [B] int64: rows of it; `lens` [B]
    int64: positions in use, `longest` at most. `window`: that many of the last ones, 0 for all."""
    assert _is_laid(keys) and _is_laid(values)
    assert table.dtype is torch.int32 and table.stride(1) == 1
    assert _is_laid(requests, torch.int64) and _is_laid(lens, torch.int64)
    query, _ = _rows(query.flatten(1))
    groups, size = keys.shape[1:]
    heads = query.shape[1] // size
    out = torch.empty((len(query), heads, size))
    _function("attend_slots")(
        query.data_ptr(),
        query.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        requests.data_ptr(),
        lens.data_ptr(),
        out.data_ptr(),
        len(query),
        heads,
        groups,
        size,
        longest,
        scale,
        window,
        torch.get_num_threads(),
    )
    return out


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    *,
    longest: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within each sequence: query [S, H, D], key and value [S, K, D] -> [S, H, D],
    and what the backward pass needs. `starts` [sequences + 1] int32: where each begins, then S."""
    assert _is_laid(starts, torch.int32) and int(starts[-1]) == len(query)
    (query, *strides), (key, *more), (value, *rest) = map(_heads, (query, key, value))
    tokens, heads, size = query.shape
    out, logs = torch.empty(query.shape), torch.empty((heads, tokens))
    _function("attend_packed")(
        query.data_ptr(),
        *strides,
        key.data_ptr(),
        *more,
        value.data_ptr(),
        *rest,
        starts.data_ptr(),
        out.data_ptr(),
        logs.data_ptr(),
        len(starts) - 1,
        tokens,
        heads,
        key.shape[1],
        size,
        longest,
        scale,
        torch.get_num_threads(),
    )
    return out, logs


def attend_packed_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    logs: torch.Tensor,
    *,
    longest: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value of `attend_packed`, which gave `logs`."""
    laid = [_heads(x) for x in (grad, query, key, value)]
    (_, tokens), (_, groups, size) = logs.shape, key.shape
    gradients = tuple(torch.empty(x.shape) for x in (query, key, value))
    _function("attend_packed_backward")(
        *(part for x, stride in laid for part in (x.data_ptr(), stride)),
        starts.data_ptr(),
        logs.data_ptr(),
        *(x.data_ptr() for x in gradients),
        len(starts) - 1,
        tokens,
        query.shape[1],
        groups,
        size,
        longest,
        scale,
        torch.get_num_threads(),
    )
    return gradients


def _is_laid(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether C finds there what it expects."""
    return x.dtype is dtype and x.is_contiguous()


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """[..., W], and how far its rows are apart; a copy where that differs."""
    if not (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)):
        x = x.contiguous()
    return x, x.stride(-2) if x.dim() == 2 else x.shape[-1]


def _heads(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """[S, heads, D], the heads of a token in one piece, and how far tokens are apart."""
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        x = x.contiguous()
    return x, x.stride(0)
