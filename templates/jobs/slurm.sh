#!/usr/bin/env bash
# @title@
# Made by `@made_by@`
#   sbatch job.sh        from a folder that all nodes share. Submitted again, it goes on with the
#                        same run.
# Keys come from the environment that you submit from: HF_TOKEN, WANDB_API_KEY.
#SBATCH --job-name=@job@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=1
@sbatch@
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# so many seconds before the time limit: the run saves itself, is queued again, and goes on
#SBATCH --signal=B:USR1@@notice_s@
set -euo pipefail

cd @folder@
export PATH=@bin@:$PATH   # of the same environment on every node
launch=(@launch@)
run=@run@

start_s=@start_s@         # bound on the start of Ray on all nodes
port=$((10000 + SLURM_JOB_ID % 10000))
state=$PWD/.miles-job-$SLURM_JOB_ID
temp=/tmp/ray-$SLURM_JOB_ID
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# of several networks the first: write another address here if nodes meet on another
address=$(hostname -I | awk '{ print $1 }')

fail() { printf 'error: %s\n  why: %s\n  fix: %s\n' "$1" "$2" "$3" >&2; exit 4; }
command -v miles ray >/dev/null ||
  fail "miles is not installed on ${nodes[0]}" "it is not in $PATH" "docker/install.sh VENV"

# Whoever has the token may run anything in this cluster: it lies in a file of this user's, and in
# no command line.
rm -rf "$state"
(umask 077; mkdir "$state"; od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n' >"$state/token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$state/token RAY_USAGE_STATS_ENABLED=0
unset RAY_ADDRESS RAY_AUTH_TOKEN

# Ray lives on each node as long as its standard input is open: when this script ends, that closes
# everywhere.
mkfifo "$state/alive"
exec {alive}<>"$state/alive"
steps=()
end_ray() {
  trap - EXIT
  exec {alive}>&-
  for step in "${steps[@]}"; do wait "$step" || true; done
  rm -rf "$state"
}
trap end_ray EXIT
trap 'fail "the time limit is near, and nothing was trained yet" \
  "Ray did not start in $SECONDS s" "sbatch --time=HOURS:00:00 $0"' USR1

# ray_on NUMBER NAMES ARGUMENTS...: Ray's processes on so many nodes
ray_on() {
  # shellcheck disable=SC2016  # expanded on the node
  srun --nodes="$1" --ntasks="$1" --nodelist="$2" --overlap --cpu-bind=none \
    --output="$state/ray-%N.log" bash -c '
    exec 3<&0
    ray start --block --temp-dir="$0" "$@" </dev/null 3<&- & ray=$!
    { while read -r -u 3; do :; done; kill $ray; } 2>/dev/null & open=$!
    wait $ray; kill $open 2>/dev/null; wait; rm -rf "$0"' \
    "$temp" @resources@ "${@:3}" <"$state/alive" {alive}>&- &
  steps+=($!)
}
present() {
  timeout 60 python - "$address:$port" <<'PYTHON' 2>"$state/present.log"
import logging, sys, ray
ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
alive = [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]
print(*(name.partition(".")[0] for name in alive), sep="\n")
PYTHON
}
# wait_for NUMBER: until Ray runs on so many nodes
wait_for() {
  until here=$(present) && [ "$(grep -c . <<<"$here")" -ge "$1" ]; do
    for step in "${steps[@]}"; do
      kill -0 "$step" 2>/dev/null || {
        tail -n 20 "$state"/*.log >&2
        fail "Ray ended on a node" "its log is above" "miles doctor"
      }
    done
    if [ "$SECONDS" -ge "$start_s" ]; then
      missing=$(printf '%s\n' "${nodes[@]%%.*}" | grep -vxFf <(echo "${here:-none}") |
        paste -sd ' ' || true)
      tail -n 5 "$state"/*.log >&2
      fail "Ray did not start on ${missing:-all nodes}" \
        "${#nodes[@]} nodes were waited for, $start_s s" "miles doctor   # on that node"
    fi
    sleep 2
  done
}
ray_on 1 "${nodes[0]}" --head --port="$port" --node-ip-address="$address" --include-dashboard=false
wait_for 1
if [ ${#nodes[@]} -gt 1 ]; then
  ray_on $((${#nodes[@]} - 1)) "$(IFS=,; echo "${nodes[*]:1}")" --address="$address:$port"
  wait_for ${#nodes[@]}
fi

[ ! -f "$run/recipe.yaml" ] || launch=(miles resume "$run")
echo "Ray runs on ${nodes[*]}: ${launch[*]}"
MILES_GRACE_S=@notice_s@ "${launch[@]}" --supervised --address "$address:$port" {alive}>&- &
driver=$!
again=no
trap 'again=yes; kill -USR1 "$driver"' USR1
trap 'kill -TERM "$driver"' TERM INT
# a signal ends a wait, not the driver
until ! kill -0 "$driver" 2>/dev/null; do wait "$driver" || true; done
code=0
wait "$driver" || code=$?

# 75: stopped, and saved
if [ "$code" = 75 ] && [ "$again" = yes ]; then
  end_ray
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
