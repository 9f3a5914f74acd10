#!/usr/bin/env bash
# Makes the parts of bench/gpu/pack.sh usable on a machine without a network: checks and extracts
# them below bench/gpu/site, and names PYTHONPATH and PATH. Installs nothing into any Python.
#   source bench/gpu/unpack.sh PART...   sets the variables in this shell
#   bench/gpu/unpack.sh PART...          prints the lines that set them: eval "$(...)"
# PART is 1, 2 or all. A part that is unpacked already is left alone, also where its archive is
# gone. PARTS and SITE name other folders.

# Everything in functions of one prefix and in subshells: a shell that sources this keeps its own
# options and names.
_miles_kit_fail() {
  printf 'error: %s\n  why: %s\n  fix: %s\n' "$1" "$2" "$3" >&2
  return 4
}

# Where this machine has no xz, Python has one.
_miles_kit_extract() { # ARCHIVE FOLDER
  if command -v xz >/dev/null; then
    tar -C "$2" -xJf "$1"
  else
    "${PYTHON:-python3}" -c 'import lzma, sys, tarfile
# Python before 3.11.4 knows no filters; the checksum is compared before
options = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
with lzma.open(sys.argv[1]) as stream:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        archive.extractall(sys.argv[2], **options)
    stream.read()  # to its end, where a broken one is known' "$1" "$2"
  fi
}

# One part, in a folder of its own whose name appears when it is whole. `set -e` would not count
# here: bash ignores it in whatever stands before `||`.
_miles_kit_part() ( # NUMBER PARTS SITE
  name=part$1.tar.xz
  archive=$2/$name
  unpacked=$(cat "$3/part$1/.sha256" 2>/dev/null)
  if [ ! -f "$archive" ]; then
    [ -z "$unpacked" ] || exit 0
    _miles_kit_fail "$archive is missing" "part $1 is not unpacked in $3 either" \
      "make it where there is a network: bench/gpu/pack.sh" || exit
  fi
  listed=$(awk -v name="$name" '$2 == name || $2 == "*" name { print $1 }' "$2/SHA256")
  [ -n "$listed" ] || _miles_kit_fail "$2/SHA256 does not name $name" \
    "its checksum is not known" "carry SHA256 beside the parts; bench/gpu/pack.sh writes it" || exit
  [ "$unpacked" != "$listed" ] || exit 0
  actual=$(sha256sum "$archive" | cut -d ' ' -f 1)
  [ "$actual" = "$listed" ] || _miles_kit_fail "$archive is damaged, or of another packing" \
    "its SHA-256 is $actual; SHA256 lists $listed" \
    "carry part$1.tar.xz and SHA256 of one bench/gpu/pack.sh" || exit
  new=
  trap 'rm -rf "$new"' EXIT
  mkdir -p "$3" && new=$(mktemp -d "$3/.part$1.XXXXXX") && _miles_kit_extract "$archive" "$new" &&
    chmod 755 "$new" && echo "$listed" >"$new/.sha256" && rm -rf "$3/part$1" &&
    mv "$new" "$3/part$1" ||
    _miles_kit_fail "$archive cannot be extracted" "what failed is above; no half of it is left" \
      "look for space with df -h $3, then unpack again" || exit
)

# SGLang's compiler of kernels looks for libcudart beside the first nvcc of PATH, which may be a
# link or a script outside CUDA's own folder.
_miles_kit_cuda_home() {
  local folder nvcc
  nvcc=$(readlink -f "$(command -v nvcc)" || true)
  for folder in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda /usr/local/cuda-13* \
    "${nvcc%/bin/nvcc}"; do
    [ -z "$folder" ] || [ ! -x "$folder/bin/nvcc" ] || [ ! -e "$folder/lib64/libcudart.so" ] ||
      { echo "$folder" && return; }
  done
}

# torch_memory_saver is preloaded: before torch, whose CUDA runtime it would not find, and the
# system's, if there is one, would be loaded beside it.
_miles_kit_cuda_runtime() {
  "${PYTHON:-python3}" -c 'import importlib.util, pathlib
spec = importlib.util.find_spec("nvidia")
for folder in spec.submodule_search_locations if spec else ():
    for library in pathlib.Path(folder).glob("*/lib/libcudart.so.13"):
        print(library.parent)' | head -n 1
}

_miles_kit_lines() { # ROOT PART...
  local root=$1 site=${SITE:-$1/bench/gpu/site} part folder packages="" programs="" cuda runtime
  shift
  [ "$*" != all ] || set -- 1 2
  [ $# -gt 0 ] || _miles_kit_fail "no part is named" "it is 1, 2 or all" \
    "source bench/gpu/unpack.sh all" || return
  for part in "$@"; do
    case $part in
    1 | 2) ;;
    *) _miles_kit_fail "unknown part $part" "it is 1, 2 or all" \
      "source bench/gpu/unpack.sh all" || return ;;
    esac
    _miles_kit_part "$part" "${PARTS:-$root/bench/gpu/parts}" "$site" || return
  done
  # also those of an earlier call
  for folder in "$site"/part[12]; do
    [ -f "$folder/.sha256" ] || continue
    packages+=$folder: programs+=$folder/bin:
  done
  # the code of miles is the repository's
  printf 'export PYTHONPATH=%q\n' "$packages$root"
  # shellcheck disable=SC2016 # PATH is the caller's
  printf 'export PATH=%q"${PATH:+:$PATH}"\n' "${programs%:}"
  cuda=$(_miles_kit_cuda_home)
  [ -z "$cuda" ] || printf 'export CUDA_HOME=%q\n' "$cuda"
  runtime=$(_miles_kit_cuda_runtime)
  # shellcheck disable=SC2016 # LD_LIBRARY_PATH is the caller's
  [ -z "$runtime" ] ||
    printf 'export LD_LIBRARY_PATH=%q"${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"\n' "$runtime"
}

_miles_kit_main() {
  local lines root
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
  lines=$(_miles_kit_lines "$root" "$@") || return
  if [ "${BASH_SOURCE[0]}" = "$0" ]; then echo "$lines"; else eval "$lines"; fi
}

_miles_kit_main "$@"
