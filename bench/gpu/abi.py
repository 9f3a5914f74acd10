"""Whether compiled libraries find in a torch what they want of it: `python bench/gpu/abi.py
LIBRARY... --torch FOLDER`, FOLDER being torch/lib. Reads the tables of dynamic symbols of the files
and loads nothing, so that a library for CUDA is checked where there is no CUDA. Names what is
missing, as C++ has it where c++filt is installed; ends with 1 where something is. Says nothing of
CUDA's own libraries, nor of a symbol that is there and has another meaning.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ELF64_LITTLE = b"\x7fELF\x02\x01"
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
DYNAMIC_SYMBOLS = 11
"""SHT_DYNSYM, the type of the section."""
LOCAL, WEAK = 0, 2
"""Bindings: seen by nobody else; may be missing."""
TORCHS = re.compile(
    r"^_ZN?[A-Z]*\d*.*?(?:3c10|2at|5torch|6caffe2|4c10d|3jit)|^(?:aoti_)?torch_|^THP|^TH[A-Z]"
)
"""Mangled names of torch's namespaces, wherever in the name, and its C interfaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbols:
    """The dynamic symbols of one library."""

    defined: frozenset[str]
    undefined: frozenset[str]
    """Wanted of others. Weak ones, which may be missing, are not among them."""


def read_symbols(library: Path) -> Symbols:
    """Of a 64-bit ELF file. ValueError where it is none, or has no table of them."""
    data = library.read_bytes()
    if not data.startswith(ELF64_LITTLE):
        raise ValueError(f"{library} is no 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [SECTION.unpack_from(data, offset + size * index) for index in range(count)]
    for _, kind, _, _, start, length, link, *_ in sections:
        if kind == DYNAMIC_SYMBOLS:
            names_start = sections[link][4]
            return _parted(data, SYMBOL.iter_unpack(data[start : start + length]), names_start)
    raise ValueError(f"{library} has no dynamic symbols")


def _parted(data: bytes, rows: Iterable[tuple[int, ...]], names_start: int) -> Symbols:
    defined, undefined = set(), set()
    for name_offset, info, _, section, *_ in rows:
        begin = names_start + name_offset
        name = data[begin : data.index(b"\0", begin)].decode()
        binding = info >> 4
        if not name or binding == LOCAL:
            continue
        if section:
            defined.add(name)
        elif binding != WEAK:
            undefined.add(name)
    return Symbols(defined=frozenset(defined), undefined=frozenset(undefined))


def missing(library: Path, available: frozenset[str]) -> list[str]:
    """Torch's symbols that the library wants and nobody defines."""
    symbols = read_symbols(library)
    wanted = symbols.undefined - available - symbols.defined
    return sorted(name for name in wanted if TORCHS.search(name))


def defined_in(folder: Path) -> frozenset[str]:
    """All that torch's libraries define."""
    return frozenset().union(*(read_symbols(path).defined for path in folder.glob("lib*.so*")))


def demangled(names: list[str]) -> list[str]:
    """As C++ writes them, where c++filt is installed; else as they are."""
    if not names or shutil.which("c++filt") is None:
        return names
    done = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def main() -> int:
    """1 where a symbol is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="+", type=Path, metavar="LIBRARY")
    parser.add_argument("--torch", type=Path, required=True, metavar="FOLDER", help="its torch/lib")
    options = parser.parse_args()
    available = defined_in(options.torch)
    if not available:
        parser.error(f"{options.torch} holds no libraries")
    worst = 0
    for library in options.libraries:
        names = missing(library, available)
        print(f"{library}: {len(names)} of torch's symbols missing")
        for name in demangled(names):
            print(f"  {name}")
        worst = max(worst, bool(names))
    return worst


if __name__ == "__main__":
    sys.exit(main())
