"""bench/gpu/pack.sh as far as it goes without a network: what it refuses, its lists, and parts of
one tiny wheel each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bench.gpu.entry_points import write
from bench.gpu.prune import globs, prune
from milescli.core.pins import pin, pins

ROOT = Path(__file__).resolve().parents[3]
LISTS = [ROOT / f"bench/gpu/part{number}.txt" for number in (1, 2, 3)]
BEYOND_PINS = {"sglang-kernel": "sglang_kernel_torch_2_11"}
"""The pin of a package, where it is not its name."""


def listed(file: Path) -> list[Requirement]:
    """The requirements of a list, pins filled in as pip fills them in."""
    text = re.sub(r"\$\{PIN_([A-Z0-9_]+)\}", lambda match: pin(match[1].lower()), file.read_text())
    return [Requirement(line) for line in text.splitlines() if line and line[0] != "#"]


def test_every_package_is_named_once_in_one_version() -> None:
    wanted = [requirement for file in LISTS for requirement in listed(file)]
    names = [requirement.name.lower().replace("_", "-") for requirement in wanted]
    assert len(names) == len(set(names))
    for requirement in wanted:
        assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), requirement


def test_what_is_pinned_is_taken_from_the_pins() -> None:
    text = "".join(file.read_text() for file in LISTS)
    for requirement in (requirement for file in LISTS for requirement in listed(file)):
        name = BEYOND_PINS.get(requirement.name, requirement.name.replace("-", "_"))
        if name in pins():
            assert f"{requirement.name}==${{PIN_{name.upper()}}}" in text


def test_what_sglang_pins_is_carried_so_but_for_its_kernel() -> None:
    pinned = {
        wanted.name: wanted.specifier
        for wanted in map(Requirement, requires("sglang") or [])
        if str(wanted.specifier).startswith("==") and not wanted.marker
    }
    carried = {wanted.name: wanted for file in LISTS for wanted in listed(file)}
    for name in (set(carried) & set(pinned)) - {"sglang-kernel"}:
        assert carried[name].specifier == pinned[name], name


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """The scripts, with lists of one tiny package each whose wheels are there already."""
    for name in ("pack.sh", "prune.py", "prune.txt", "entry_points.py", "abi.py"):
        target = tmp_path / "bench/gpu" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / "bench/gpu" / name).read_bytes())
    (tmp_path / "bench/gpu/pack.sh").chmod(0o755)
    for name in ("docker/pins.env", "pyproject.toml", "milescli/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for number in (1, 2):
        make_wheel(tmp_path / "bench/gpu/parts/wheels", f"tiny{number}")
        (tmp_path / f"bench/gpu/part{number}.txt").write_text(f"tiny{number}==1.0\n")
    return tmp_path


def make_wheel(folder: Path, name: str) -> None:
    """A module, a test that is pruned, and a console script."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "def main(): print('from the kit')\n",
        f"{name}_stubs.pyi": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def run_pack(kit: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(kit / "bench/gpu/pack.sh")],
        env={**os.environ, "PYTHON": sys.executable, "PIP_NO_INDEX": "1", **variables},
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.slow
def test_what_is_packed_is_unpacked_and_runs_and_is_the_same_twice(kit: Path) -> None:
    done = run_pack(kit)
    assert done.returncode == 0, done.stderr
    parts = kit / "bench/gpu/parts"
    sums = (parts / "SHA256").read_text()
    assert [line.split()[1] for line in sums.splitlines()] == [
        f"part{number}.tar.xz" for number in (1, 2)
    ]
    assert sorted(path.name for path in parts.iterdir()) == [
        "SHA256", "part1.tar.xz", "part2.tar.xz", "wheels",
    ]  # fmt: skip
    script = f"source {ROOT}/bench/gpu/unpack.sh all && tiny2 && ls $SITE/part1"
    seen = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PARTS": str(parts), "SITE": str(kit / "site")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert seen.stdout.splitlines() == [
        "from the kit", "bin", "miles_cli-0.1.0.dist-info", "tiny1-1.0.dist-info", "tiny1.py",
    ], seen.stderr  # fmt: skip
    run_pack(kit)
    assert (parts / "SHA256").read_text() == sums


def test_python_takes_miles_for_installed_with_its_entry_points(tmp_path: Path) -> None:
    own = PathDistribution(write(tmp_path))
    assert own.metadata["Name"] == "miles-cli" and own.requires
    points = {(point.group, point.name): point.value for point in own.entry_points}
    assert points["sglang.srt.plugins", "miles"] == "milescli.backends.sglang.plugin:register"
    done = subprocess.run(
        [str(tmp_path / "bin/miles"), "--version"],
        env={**os.environ, "PYTHONPATH": str(ROOT),
             "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0 and own.version in done.stdout


def test_headers_that_kernels_are_compiled_from_are_never_pruned(tmp_path: Path) -> None:
    kept = [
        "sglang/kernels/jit/csrc/elementwise/rope.cuh",
        "sglang/kernels/jit/include/sgl_kernel/utils.cuh",
        "flashinfer/data/include/flashinfer/norm.cuh",
        "flashinfer/data/cutlass/include/cutlass/cutlass.h",
        "tvm_ffi/include/tvm/ffi/c_api.h",
        "tvm_ffi/lib/libtvm_ffi_testing.so",
        "sgl_kernel/sm90/common_ops.abi3.so",
        "torch_memory_saver_hook_mode_preload_cu13.abi3.so",
    ]
    gone = ["sgl_kernel/sm100/common_ops.abi3.so", "sgl_kernel/flash_ops.abi3.so", "a/b/c.pyi"]
    for name in (*kept, *gone):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    prune(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(kept) and len(globs()) == len(set(globs()))
