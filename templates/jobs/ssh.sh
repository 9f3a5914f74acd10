#!/usr/bin/env bash
# @title@
# Made by `@made_by@`
#   HOSTS='node1 node2 ...' bash job.sh       on the first of them, from a folder that all share.
#                                             Started again, it goes on with the same run.
# The others are reached by ssh with keys, never with a password. Keys come from this shell's
# environment: HF_TOKEN, WANDB_API_KEY.
set -euo pipefail

# @nodes@ names or addresses, this host first, by which all reach each other
read -ra hosts <<<"${HOSTS:-}"
num_hosts=@nodes@

cd @folder@
export PATH=@bin@:$PATH   # of the same environment on every host
launch=(@launch@)
run=@run@

start_s=@start_s@                # bound on the start of Ray on all hosts
port=${RAY_PORT:-6379}
state=$PWD/.miles-job-$(hostname)-$$
temp=/tmp/ray-$$
ssh_to=(ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15)

fail() { printf 'error: %s\n  why: %s\n  fix: %s\n' "$1" "$2" "$3" >&2; exit 4; }
[ ${#hosts[@]} = "$num_hosts" ] ||
  fail "$num_hosts hosts are needed" "HOSTS names ${#hosts[@]}" \
    "HOSTS='this-host other-host ...' bash $0"
command -v miles ray >/dev/null ||
  fail "miles is not installed here" "it is not in $PATH" "docker/install.sh VENV"
addresses=()
for host in "${hosts[@]}"; do
  addresses+=("$(getent ahostsv4 "$host" | awk 'NR == 1 { print $1 }')")
  [ -n "${addresses[-1]}" ] ||
    fail "the address of $host is not known" "its name does not resolve" \
      "write addresses into HOSTS"
done

# Whoever has the token may run anything in this cluster: it lies in a file of this user's, and in
# no command line.
rm -rf "$state"
(umask 077; mkdir "$state"; od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n' >"$state/token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$state/token RAY_USAGE_STATS_ENABLED=0
unset RAY_ADDRESS RAY_AUTH_TOKEN

# Each host's Ray lives as long as its standard input is open. When this script ends, however it
# ends, that closes everywhere.
mkfifo "$state/alive"
exec {alive}<>"$state/alive"
rays=()
# shellcheck disable=SC2329  # called by the trap
end_ray() {
  trap - EXIT
  exec {alive}>&-
  for ray in "${rays[@]}"; do wait "$ray" || true; done
  rm -rf "$state"
}
trap end_ray EXIT

# ray_on INDEX ARGUMENTS...: Ray's processes on one host, with the keys that are set here
ray_on() {
  local host=${hosts[$1]} address=${addresses[$1]} shell=(bash -s)
  [ "$1" = 0 ] || shell=("${ssh_to[@]}" "$host" bash -s)
  shift
  {
    declare -p PATH "${!RAY_@}"
    for name in HF_TOKEN HF_HOME HF_ENDPOINT WANDB_API_KEY; do
      [ -z "${!name:-}" ] || declare -p "$name"
    done
    printf 'cd %q || exit; exec 3<&0; ' "$PWD"
    printf 'ray start --block --node-ip-address=%q --temp-dir=%q' "$address" "$temp"
    printf ' %q' @resources@ "$@"
    # shellcheck disable=SC2016  # expanded on the host
    printf ' </dev/null 3<&- & ray=$!; { while read -r -u 3; do :; done; kill $ray; } 2>/dev/null &'
    # shellcheck disable=SC2016
    printf ' open=$!; wait $ray; kill $open 2>/dev/null; wait; rm -rf %q; exit\n' "$temp"
    cat
  } <"$state/alive" {alive}>&- | "${shell[@]}" {alive}>&- >"$state/ray-$host.log" 2>&1 &
  rays+=($!)
}

present() {
  timeout 60 python - "${addresses[0]}:$port" <<'PYTHON' 2>"$state/present.log"
import logging, sys, ray
ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
print(*(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]), sep="\n")
PYTHON
}
# wait_for NUMBER: until Ray runs on so many hosts
wait_for() {
  until here=$(present) && [ "$(grep -c . <<<"$here")" -ge "$1" ]; do
    for index in "${!rays[@]}"; do
      kill -0 "${rays[$index]}" 2>/dev/null || {
        tail -n 20 "$state/ray-${hosts[$index]}.log" >&2
        fail "Ray ended on ${hosts[$index]}" "its log is above" \
          "ssh ${hosts[$index]} true   # can it be reached without a password?"
      }
    done
    if [ "$SECONDS" -ge "$start_s" ]; then
      missing=$(printf '%s\n' "${addresses[@]}" | grep -vxFf <(echo "${here:-none}") |
        paste -sd ' ' || true)
      tail -n 5 "$state"/*.log >&2
      fail "Ray did not start on ${missing:-all hosts}" \
        "$num_hosts hosts were waited for, $start_s s" "miles doctor   # on that host"
    fi
    sleep 2
  done
}
ray_on 0 --head --port="$port" --include-dashboard=false
wait_for 1
for ((index = 1; index < num_hosts; index++)); do
  ray_on "$index" --address="${addresses[0]}:$port"
done
wait_for "$num_hosts"

[ ! -f "$run/recipe.yaml" ] || launch=(miles resume "$run")
echo "Ray runs on ${hosts[*]}: ${launch[*]}"
"${launch[@]}" --supervised --address "${addresses[0]}:$port" {alive}>&- &
driver=$!
trap 'kill -TERM "$driver"' TERM INT HUP
# a signal ends a wait, not the driver
until ! kill -0 "$driver" 2>/dev/null; do wait "$driver" || true; done
code=0
wait "$driver" || code=$?
exit "$code"
