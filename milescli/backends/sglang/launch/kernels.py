"""Finds the build of SGLang's CUDA kernels that belongs to the installed torch: each is compiled
for one. From the packages' metadata and docker/pins.env; loads nothing. Called by `server` and by
doctor."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from milescli.core.pins import pins

PACKAGE = "sglang-kernel"
SKIP_CHECK = "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"
"""SGLang refuses kernels older than those of its own torch, unless this is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Compares SGLang's installed CUDA kernels with those that belong to the installed torch."""

    torch: str | None
    """Version such as `2.11.0`; None if not installed."""
    installed: str | None
    tested: str | None
    """Version of the kernels tested with this torch; None if there is none."""

    @property
    def fit(self) -> bool:
        """Return True if they were tested with this torch."""
        return self.installed is not None and self.installed == self.tested


def kernels(version_of: Callable[[str], str] = importlib.metadata.version) -> Kernels:
    """Return the installed kernels of this environment."""
    torch = _version("torch", version_of)
    tested = None
    if torch is not None:
        major, minor = torch.split(".")[:2]
        tested = pins().get(f"sglang_kernel_torch_{major}_{minor}")
    return Kernels(torch=torch, installed=_version(PACKAGE, version_of), tested=tested)


def has_flash_attention() -> bool:
    """Return True if the installed kernels have FlashAttention-3, nine tenths of their size, which
    a small installation omits. Also True without any kernels, which is reported elsewhere."""
    spec = importlib.util.find_spec("sgl_kernel")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]
    return not folders or any(any(folder.glob("flash_ops*.so")) for folder in folders)


def kernel_environment() -> dict[str, str]:
    """Return variables for an engine on CUDA: kernels that were tested with an older torch are
    older than SGLang accepts without them."""
    return {SKIP_CHECK: "1"} if kernels().fit else {}


def _version(package: str, version_of: Callable[[str], str]) -> str | None:
    try:
        return version_of(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None
