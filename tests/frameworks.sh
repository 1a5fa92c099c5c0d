#!/bin/bash
# Install Lightning, Accelerate and Transformers into .cache/frameworks, for the tests that run scripts and
# models of theirs. Without what they need of torch, which .venv has: pip would fetch another one.
set -euo pipefail
project="$(dirname "$0")/.." folder="$(dirname "$0")/../.cache/frameworks"
[ ! -d "$folder/transformers" ] || exit 0
install() {
  "$project/.venv/bin/pip" install -qq --disable-pip-version-check --no-compile -c "$project/constraints.txt" --target "$folder.new" "$@"
}
rm -rf "$folder.new"
install fsspec lightning-utilities psutil pyyaml safetensors tqdm huggingface-hub tokenizers regex
install --no-deps accelerate lightning pytorch-lightning torchmetrics transformers
rm -rf "$folder"
mv "$folder.new" "$folder"
