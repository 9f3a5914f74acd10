#!/usr/bin/env bash
# Makes a virtual environment with miles in it, for the accelerator that this machine has. Called by
# the Makefile, and by the Dockerfiles in two steps: packages change rarely and are cached, miles
# itself does not need them anew.
# Usage: [TE=1] docker/install.sh VENV [cpu|cuda|rocm] [packages|miles]
# TE=1 adds TransformerEngine on CUDA, whose part for torch is compiled here, by nvcc.
set -euo pipefail
usage="docker/install.sh VENV [cpu|cuda|rocm] [packages|miles]"
venv=${1:?usage: $usage}
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
set -a # pip reads the pins from its environment
# shellcheck source=docker/pins.env
. "$here/docker/pins.env"
set +a

# pip says nothing for minutes: the time and the size so far, on a terminal each second, in a log
# every half minute. Ends with this script, however that ends.
ticker=
tick() {
  local since=$SECONDS last=0 next=0 spent size
  while sleep 1 && kill -0 $$ 2>/dev/null; do
    spent=$((SECONDS - since))
    if [ -t 1 ]; then
      if [ "$spent" -ge "$next" ]; then # a busy machine skips seconds
        size=$(du -sh "$venv" 2>/dev/null | cut -f1)
        next=$((spent + 5))
      fi
      printf '\033[K    %d:%02d  %s in %s\r' $((spent / 60)) $((spent % 60)) "${size:-0}" "$venv"
    elif [ $((spent - last)) -ge 30 ]; then
      last=$spent
      printf '    %d:%02d  %s in %s\n' $((spent / 60)) $((spent % 60)) \
        "$(du -sh "$venv" 2>/dev/null | cut -f1)" "$venv"
    fi
  done
}
stop_ticker() {
  [ -n "$ticker" ] || return 0
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  ticker=
  [ ! -t 1 ] || printf '\r\033[K'
}
trap stop_ticker EXIT

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
fail() { printf 'error: %s\n  why: %s\n  fix: %s\n' "$1" "$2" "$3" >&2; exit 4; }

kind_of_machine() {
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then echo cuda
  elif [ -e /dev/kfd ]; then echo rocm
  else echo cpu; fi
}

kind=${2:-$(kind_of_machine)}
part=${3:-all}
case $kind in
cpu | cuda | rocm) ;;
*) fail "unknown kind $kind" "it is cpu, cuda or rocm" "docker/install.sh $venv cpu" ;;
esac
[ "${TE:-0}" != 1 ] || [ "$kind" = cuda ] ||
  fail "TransformerEngine is for CUDA" "this installs for $kind" "make install   # without TE=1"
case $part in
all | packages | miles) ;;
*) fail "unknown part $part" "it is packages, miles or left out" "$usage" ;;
esac
"$python" -c 'import sys; low, below = (tuple(map(int, text.split("."))) for text in sys.argv[1:])
sys.exit(not low <= sys.version_info[:2] < below)' "$PIN_PYTHON_OLDEST" "$PIN_PYTHON_BELOW" ||
  fail "Python from $PIN_PYTHON_OLDEST, below $PIN_PYTHON_BELOW, is needed" \
    "$python is $("$python" -V 2>&1)" "make install PYTHON=python$PIN_PYTHON_OLDEST"

ticking() {
  tick &
  ticker=$!
  "$@"
  stop_ticker
}
pip() { ticking "$venv/bin/pip" --disable-pip-version-check "$@"; }
new_venv() { [ -x "$venv/bin/pip" ] || ticking "$python" -m venv "$@" "$venv"; }

# it is built beside the torch that is there, hence without an environment of its own
transformer_engine() {
  command -v nvcc >/dev/null ||
    fail "TransformerEngine needs nvcc" "its part for torch is compiled here" \
      "make install   # without TE=1: the trainer's layers are PyTorch's"
  say "TransformerEngine $PIN_TRANSFORMER_ENGINE"
  pip install -q setuptools wheel ninja pybind11
  pip install -q --no-build-isolation \
    "transformer-engine[core_cu13,pytorch]==$PIN_TRANSFORMER_ENGINE"
}

packages() {
  case $kind in
  cpu)
    new_venv
    say "torch $PIN_TORCH"
    pip install -q "torch==$PIN_TORCH" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
    say "Ray, Megatron-Core and what SGLang needs"
    pip install -q -r "$here/docker/requirements.txt" -r "$here/docker/requirements-cpu.txt"
    say "SGLang $PIN_SGLANG"
    # Without torchvision: PyPI has it for CUDA alone, and where it does not load, transformers does
    # not either. On a CPU engines have a stand-in on their own path. One that does not load goes.
    pip install -q --no-deps "sglang==$PIN_SGLANG"
    "$venv/bin/python" -c 'import torchvision' 2>/dev/null ||
      pip uninstall -q -y torchvision 2>/dev/null
    ;;
  cuda)
    new_venv
    say "torch $PIN_TORCH, SGLang $PIN_SGLANG, Ray and Megatron-Core"
    pip install -q "torch==$PIN_TORCH" "sglang==$PIN_SGLANG" -r "$here/docker/requirements.txt"
    [ "${TE:-0}" != 1 ] || transformer_engine
    ;;
  rocm)
    "$python" -c 'import torch, sglang; assert torch.version.hip' 2>/dev/null ||
      fail "ROCm needs a Python that has torch and SGLang for ROCm" \
        "their ROCm builds are not on PyPI" \
        "run inside $PIN_IMAGE_ROCM_GFX942, then: make install PYTHON=\$(which python3)"
    new_venv --system-site-packages
    # an image may keep them in a virtual environment of its own, which a new one does not inherit
    local where='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$python" -c "$where" >"$("$venv/bin/python" -c "$where")/image.pth"
    say "Ray and Megatron-Core, beside the image's own torch and SGLang"
    pip install -q -r "$here/docker/requirements.txt"
    ;;
  esac
}

# A checkout is linked to, so that a change of a file is a change of the program; anything else is
# copied in.
miles() {
  local link=()
  [ ! -e "$here/.git" ] || link=(-e)
  say "miles"
  pip install -q --no-deps "${link[@]}" "$here"
}

say "installing for: $kind (into $venv)"
[ "$part" = miles ] || packages
[ "$part" = packages ] || miles
say "ready: $venv/bin/miles"
