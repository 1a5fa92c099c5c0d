#!/bin/bash
# Shows a job on Kubernetes without a cluster, in tests/fakes/kubernetes/with.sh.
# demo.sh JOB WORKLOAD [OPTION...]
set -euo pipefail
job=$1 workload=$2
shift 2
profile=$(mktemp --suffix .yaml)
trap 'rm -f "$profile"' EXIT
printf 'kind: kubernetes\nworkload: %s\nnamespace: default\nruns_claim: runs\n' "$workload" >"$profile"
echo "submitting $job as a $workload"
.venv/bin/toolkit submit "$job" --to "$profile" --follow "$@"
