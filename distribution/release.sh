#!/bin/bash
# Make what a release consists of, in dist/: wheel and sdist, their SBOM, checksums. BIN: the folder of python and twine.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-$PWD/.venv/bin}
fail() { echo "release: $*" >&2 && exit 1; }
[ -z "$(git status --porcelain)" ] || fail "there are changes that are in no commit; commit them, or put them aside"
! grep -q '^repository = ""' pyproject.toml ||
  echo "release: repository in pyproject.toml is empty: on an index, the package's page would have no addresses, and dead links" >&2
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)} # the files of the archives are as old as the commit
export SOURCE_DATE_EPOCH
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

rm -rf dist
for folder in dist "$scratch/again"; do
  "$bin/python" -m build --no-isolation --outdir "$folder" . >/dev/null
done
for file in dist/*; do
  cmp "$file" "$scratch/again/${file##*/}" || fail "$file differs when it is built again"
done
"$bin/twine" check --strict dist/*

# What `pip install` brings with the wheel, without the extras.
"$bin/python" -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install -qq --disable-pip-version-check -c constraints.txt dist/*.whl
"$scratch/venv/bin/pip" uninstall -qq -y pip setuptools
"$bin/cyclonedx-py" environment --output-reproducible --pyproject pyproject.toml --mc-type application \
  --output-file dist/sbom.cdx.json "$scratch/venv/bin/python"
(cd dist && sha256sum -- * >"$scratch/sums" && mv "$scratch/sums" SHA256SUMS && cat SHA256SUMS)
