#!/bin/bash
# Install what the slow tests compare with: Google's calculator of goodput, and TensorBoard. Apart
# from .venv, since they bring half of Google's clients.
set -euo pipefail
project="$(dirname "$0")/.."
folder="$project/.cache/ml-goodput-measurement"
[ ! -d "$folder" ] || exit 0
install=("$project/.venv/bin/pip" install -qq --disable-pip-version-check --target "$folder.new")
{ "${install[@]}" google-cloud-{logging,monitoring,storage} tensorboard &&
  "${install[@]}" --no-deps ml-goodput-measurement==0.2.3 tensorboardX &&
  mv "$folder.new" "$folder"; } 2>/dev/null ||
  echo "left out: the tests beside ml-goodput-measurement, which could not be had" >&2
