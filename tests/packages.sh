#!/bin/bash
# Install the Debian packages that the tests need, where that is possible; otherwise say what is
# left out. Tests that need them are skipped then, and fail where CI is set.
set -euo pipefail

missing=()
command -v shellcheck >/dev/null || missing+=(shellcheck)
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "left out: the tests on a real Slurm cluster and with a full disk, which need root on Debian" >&2
  [ ${#missing[@]} -eq 0 ] || echo "left out: the tests that need ${missing[*]}; please install it" >&2
  exit 0
fi
if [ ${#missing[@]} -gt 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
    { apt-get update -qq && apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null; }
fi
"$(dirname "$0")/../slurm/sandbox/sandbox" install
