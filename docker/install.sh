#!/usr/bin/env bash
# Makes a virtual environment with miles in it, for the accelerator that this machine has. Called by the Makefile.
# Usage: docker/install.sh VENV [cpu|cuda|rocm]
set -euo pipefail
venv=${1:?usage: docker/install.sh VENV [cpu|cuda|rocm]}
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
torch=2.13.0 sglang=0.5.20 torchvision=0.28.0

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
fail() { printf 'error: %s\n  why: %s\n  fix: %s\n' "$1" "$2" "$3" >&2; exit 4; }

kind_of_machine() {
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then echo cuda
  elif [ -e /dev/kfd ]; then echo rocm
  else echo cpu; fi
}

kind=${2:-$(kind_of_machine)}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' ||
  fail "Python 3.11 or 3.12 is needed" "$python is $("$python" -V 2>&1)" "make install PYTHON=python3.11"

pip() { "$venv/bin/pip" --disable-pip-version-check "$@"; }
new_venv() { [ -x "$venv/bin/pip" ] || "$python" -m venv "$@" "$venv"; }

say "installing for: $kind (into $venv)"
case $kind in
cpu)
  new_venv
  say "torch $torch"
  pip install -q "torch==$torch" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
  say "Ray, Megatron-Core and what SGLang needs"
  pip install -q -r "$here/docker/requirements-cpu.txt"
  say "SGLang $sglang"
  pip install -q --no-deps "sglang==$sglang" "torchvision==$torchvision"
  pip install -q --no-deps -e "$here"
  ;;
cuda)
  new_venv
  pip install -q -e "$here"
  ;;
rocm)
  "$python" -c 'import torch, sglang; assert torch.version.hip' 2>/dev/null ||
    fail "ROCm needs a Python that has torch and SGLang for ROCm" "their ROCm builds are not on PyPI" \
      "run inside an SGLang image for ROCm, then: make install PYTHON=\$(which python3)"
  new_venv --system-site-packages
  pip install -q megatron-core==0.16.1 sglang-router==0.3.2 'ray[default]>=2.48' 'typer==0.29.*' 'math-verify[antlr4_13_2]' tensorboard pyarrow
  pip install -q --no-deps -e "$here"
  ;;
*) fail "unknown kind $kind" "it is cpu, cuda or rocm" "docker/install.sh $venv cpu" ;;
esac
say "ready: $venv/bin/miles"
