#!/bin/bash
# Runs a command beside a Kubernetes cluster of its own, whose pods are processes of this machine.
# with.sh COMMAND...
set -euo pipefail
here=$(cd "$(dirname "$0")/../../.." && pwd)
folder=$(mktemp -d)
cleanup() {
  [ -z "${server:-}" ] || { kill "$server" 2>/dev/null && wait "$server"; } || true
  rm -rf "$folder"
}
trap cleanup EXIT
export KUBECONFIG=$folder/kubeconfig XDG_STATE_HOME=$folder/state
export PATH=$here/.venv/bin:$PATH
(cd "$here" && exec python -m tests.fakes.kubernetes --kubeconfig "$KUBECONFIG") >"$folder/server.log" 2>&1 &
server=$!
until [ -s "$KUBECONFIG" ]; do
  kill -0 "$server" 2>/dev/null || { cat "$folder/server.log" >&2; exit 1; }
  sleep 0.1
done
cat "$folder/server.log"
"$@"
