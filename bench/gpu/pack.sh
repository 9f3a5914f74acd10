#!/usr/bin/env bash
# Packs what a GPU machine without a network lacks for bench/gpu: the wheels of part1.txt and
# part2.txt, as part1.tar.xz and part2.tar.xz with SHA256. Fetches wheels for the Python of that
# machine, whatever runs here; installs nothing outside FOLDER, and packs nothing of miles but its
# entry points: the code travels with the repository. bench/gpu/unpack.sh is the other end.
# Usage: [TORCH_LIB=FOLDER] bench/gpu/pack.sh [FOLDER]
#   FOLDER      where to; bench/gpu/parts where left out. FOLDER/wheels is kept for the next time
#   TORCH_LIB   torch/lib of the torch that the GPU machine has: the compiled parts are checked to
#               find in it what they need
#   MAX_BYTES   largest size of a part
set -euo pipefail
usage="bench/gpu/pack.sh [FOLDER]"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
target=3.12
max_bytes=${MAX_BYTES:-60000000}
parts=(1 2)

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
fail() { printf 'error: %s\n  why: %s\n  fix: %s\n' "$1" "$2" "$3" >&2; exit 4; }

[ $# -le 1 ] || fail "too many arguments: $*" "there is one, the folder" "$usage"
folder=${1:-$here/parts}
case $folder in -*) fail "unknown option $folder" "there is none" "$usage" ;; esac
case $max_bytes in
*[!0-9]* | '')
  fail "MAX_BYTES is $max_bytes" "it is a number of bytes" "MAX_BYTES=60000000 $usage"
  ;;
esac
for tool in "$python" tar xz strip sha256sum; do
  command -v "$tool" >/dev/null ||
    fail "$tool is missing" "parts are made with it" "install it (strip comes with binutils)"
done
"$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "$python is too old, or has no pip" "Python 3.11 or newer with pip fetches the wheels" \
    "PYTHON=python3.12 $usage"
mkdir -p "$folder/wheels"
folder=$(cd "$folder" && pwd)

set -a # pip reads the pins from its environment
# shellcheck source=docker/pins.env
. "$root/docker/pins.env"
set +a

# pip compares these tags letter by letter
platforms=()
for minor in 5 12 17 24 26 27 28 31 34 35 39; do platforms+=("manylinux_2_${minor}_x86_64"); done
platforms+=(manylinux1_x86_64 manylinux2010_x86_64 manylinux2014_x86_64)
foreign=(--no-deps --only-binary=:all: --python-version "$target" --implementation cp)
for platform in "${platforms[@]}"; do foreign+=(--platform "$platform"); done
pip() { "$python" -m pip --disable-pip-version-check -q "$@"; }

# Wheels of a list, from the folder where they lie already, else fetched.
fetch() {
  local wanted=(-r "$1" -d "$folder/wheels" "${foreign[@]}")
  pip download --no-index --find-links "$folder/wheels" "${wanted[@]}" 2>/dev/null ||
    pip download "${wanted[@]}" >"$folder/pip.log" 2>&1 ||
    fail "wheels of $1 cannot be fetched" \
      "$(grep -m 1 ERROR "$folder/pip.log" || tail -n 1 "$folder/pip.log")" \
      "see $folder/pip.log; without a network put the wheels into $folder/wheels"
  rm -f "$folder/pip.log"
}

# A folder with the packages of a list, less what prune.txt names.
install_part() {
  local stage=$1 list=$2 script
  pip install --no-index --find-links "$folder/wheels" --no-compile --root-user-action ignore \
    "${foreign[@]}" --target "$stage" -r "$list"
  "$python" "$here/prune.py" "$stage"
  # pip has the scripts begin with the Python of this machine
  for script in "$stage"/bin/*; do
    [ ! -f "$script" ] || sed -i '1s|^#!.*python.*|#!/usr/bin/env python3|' "$script"
  done
}

# One file, the same for the same packages and pip: order, times and owners are not this machine's.
archive() {
  tar -C "$1" --sort=name --mtime='2026-01-01 00:00Z' --owner=0 --group=0 --numeric-owner \
    --format=gnu -cf - . | xz -6 -T4 --block-size=16MiB >"$2"
}

for part in "${parts[@]}"; do
  say "part $part: wheels"
  fetch "$here/part$part.txt"
done
stages=$(mktemp -d "$folder/stages.XXXXXX")
trap 'rm -rf "$stages"' EXIT
for part in "${parts[@]}"; do
  say "part $part: pack"
  install_part "$stages/$part" "$here/part$part.txt"
  [ "$part" != 1 ] || "$python" "$here/entry_points.py" "$stages/1"
  archive "$stages/$part" "$stages/part$part.tar.xz"
done

if [ -n "${TORCH_LIB:-}" ]; then
  say "symbols of torch"
  "$python" "$here/abi.py" "$stages"/1/sgl_kernel/sm90/*.so "$stages"/1/torch_memory_saver_*.so \
    --torch "$TORCH_LIB"
else
  say "symbols of torch: not checked (TORCH_LIB=FOLDER/torch/lib $usage)"
fi

printf '%-16s%12s%14s\n' part packed unpacked
large=()
for part in "${parts[@]}"; do
  bytes=$(stat -c %s "$stages/part$part.tar.xz")
  printf '%-16s%9d kB%11d kB\n' "part$part.tar.xz" $((bytes / 1000)) \
    "$(du -sk --apparent-size "$stages/$part" | cut -f 1)"
  [ "$bytes" -le "$max_bytes" ] || large+=("part$part.tar.xz has $bytes bytes")
done
[ ${#large[@]} -eq 0 ] ||
  fail "a part is larger than $max_bytes bytes" "${large[*]}" \
    "move packages to another of $here/part*.txt, or name more in $here/prune.txt"
mv "$stages"/part*.tar.xz "$folder"
(cd "$folder" && sha256sum part*.tar.xz >SHA256)
say "ready: $folder"
