#!/bin/bash
# Shows a job on Kubernetes without a cluster: its pods run as processes of this machine.
# demo.sh JOB WORKLOAD [OPTION...]
set -euo pipefail
job=$1 workload=$2
shift 2
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
cleanup() {
  [ -z "${server:-}" ] || { kill "$server" 2>/dev/null && wait "$server"; } || true
  rm -rf "$folder"
}
trap cleanup EXIT
export KUBECONFIG=$folder/kubeconfig XDG_STATE_HOME=$folder/state
export PATH=$PWD/.venv/bin:$PATH

.venv/bin/python -m tests.cluster --kubeconfig "$KUBECONFIG" >"$folder/server.log" 2>&1 &
server=$!
until [ -s "$KUBECONFIG" ]; do
  kill -0 "$server" 2>/dev/null || { cat "$folder/server.log" >&2; exit 1; }
  sleep 0.1
done
cat "$folder/server.log"
printf 'kind: kubernetes\nworkload: %s\nnamespace: default\nruns_claim: runs\n' "$workload" \
  >"$folder/demo.yaml"
echo "submitting $job as a $workload"
.venv/bin/toolkit submit "$job" --to "$folder/demo.yaml" --follow "$@"
