#!/bin/bash
# What docs/recording.svg shows, at a real terminal: `make recording` records it again.
set -euo pipefail
PATH=$PWD/.venv/bin:$PATH
folder=$(mktemp -d /tmp/demo.XXXX) # a short path, for it is shown
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export XDG_STATE_HOME=$folder/state PS1='$ '
show() { # COMMAND: type it and run it
  printf '\033[32m$\033[0m '
  for ((i = 0; i < ${#1}; i++)); do printf '%s' "${1:i:1}" && sleep 0.03; done
  printf '\n'
  eval "$1" || true
  sleep "${2:-1.5}"
}
show 'toolkit new circles && cd circles' 1.5
sed -i 's/nproc_per_node/nproc_per_nod/; s/memory: 2GiB/memory: 2G/' job.yaml
show 'toolkit check job.yaml' 4
sed -i 's/nproc_per_nod/nproc_per_node/; s/memory: 2G/memory: 2GiB/' job.yaml
show '# mended; now train' 0.5
show 'toolkit run job.yaml' 2
show 'toolkit goodput runs/*' 4
show 'toolkit render job.yaml --to slurm | grep -A4 ^srun' 3
show 'toolkit render job.yaml --to k8s | head -n 12' 5
