"""bench/gpu/abi.py names exactly what a library wants of torch and torch does not define."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu.abi import demangled, read_symbols

ROOT = Path(__file__).resolve().parents[3]
TORCH_LIB = Path(torch.__file__).parent / "lib"
MISSING = "_ZN3c1010no_such_opEi"
NOT_TORCHS = "cuNoSuchCall"


@pytest.fixture(scope="module")
def present() -> str:
    """A function that this torch defines, of its core."""
    names = read_symbols(TORCH_LIB / "libc10.so").defined
    return min(name for name in names if name.startswith("_ZN3c10") and name.endswith("Ev"))


@pytest.fixture(scope="module")
def library(present: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wants one function that torch has, one that it has not, and one that is nothing of torch."""
    folder = tmp_path_factory.mktemp("abi")
    wanted = (present, MISSING, NOT_TORCHS)
    (folder / "kernel.c").write_text(
        "".join(f"void {name}(void);\n" for name in wanted)
        + f"__attribute__((weak)) void {MISSING}_weak(void);\n"
        + "static int own(void) { return 0; }\n"
        + f"int kernel(void) {{ {' '.join(f'{name}();' for name in wanted)}\n"
        + f"if ({MISSING}_weak) {MISSING}_weak(); return own(); }}\n"
    )
    built = folder / "kernel.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(built), str(folder / "kernel.c")], check=True
    )
    return built


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "bench/gpu/abi.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_it_names_the_missing_symbol_and_no_other(library: Path) -> None:
    done = run(library, "--torch", TORCH_LIB)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"{library}: 1 of torch's symbols missing",
        f"  {demangled([MISSING])[0]}",
    ]


def test_the_carried_kernel_finds_what_it_wants_of_its_torch() -> None:
    kernels = sorted((ROOT / "bench/gpu/site/part1/sgl_kernel").glob("sm90/*.so"))
    if not kernels:
        pytest.skip("part 1 is not unpacked here: bench/gpu/unpack.sh 1")
    if not torch.__version__.startswith("2.11."):
        pytest.skip(f"the kit's kernel is for torch 2.11; here it is {torch.__version__}")
    done = run(*kernels, "--torch", TORCH_LIB)
    assert done.returncode == 0, done.stdout
