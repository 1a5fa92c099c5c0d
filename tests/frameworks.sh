#!/bin/bash
# Install Lightning and Accelerate into .cache/frameworks, for the tests that run scripts of theirs. Without
# what they need of torch, which .venv has: pip would fetch another one.
set -euo pipefail
project="$(dirname "$0")/.." folder="$(dirname "$0")/../.cache/frameworks"
[ ! -d "$folder" ] || exit 0
install() {
  "$project/.venv/bin/pip" install -qq --disable-pip-version-check -c "$project/constraints.txt" --target "$folder.new" "$@"
}
rm -rf "$folder.new"
install fsspec lightning-utilities psutil pyyaml safetensors tqdm huggingface-hub
install --no-deps accelerate lightning pytorch-lightning torchmetrics
mv "$folder.new" "$folder"
