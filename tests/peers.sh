#!/bin/bash
# Install what the slow tests compare with, or pass metrics on to: Google's calculator of goodput,
# TensorBoard, and other trackers. Apart from .venv, since they bring half of Google's clients.
set -euo pipefail
project="$(dirname "$0")/.."
install() { "$project/.venv/bin/pip" install -qq --disable-pip-version-check "$@"; }
peer() { # FOLDER WHAT PACKAGE... [-- PACKAGE..., without what they need]
  local folder="$project/.cache/$1" what=$2 packages=()
  shift 2
  [ ! -d "$folder" ] || return 0
  while [ $# -gt 0 ] && [ "$1" != -- ]; do packages+=("$1") && shift; done
  { install --target "$folder.new" "${packages[@]}" &&
    { [ $# -le 1 ] || install --target "$folder.new" --no-deps "${@:2}"; } &&
    mv "$folder.new" "$folder"; } 2>/dev/null ||
    echo "left out: the tests beside $what, which could not be had" >&2
}
peer ml-goodput-measurement "ml-goodput-measurement and TensorBoard" \
  google-cloud-{logging,monitoring,storage} tensorboard -- ml-goodput-measurement==0.2.3 tensorboardX
peer trackers "W&B, MLflow and trackio" wandb==0.31.0 mlflow-skinny==3.17.2 sqlalchemy alembic trackio==0.43.0
# What `make release` needs.
install -c "$project/constraints.txt" -e "$project[release]" 2>/dev/null ||
  echo "left out: the test of a release, whose tools could not be had" >&2
