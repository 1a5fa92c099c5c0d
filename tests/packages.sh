#!/bin/bash
# Install the Debian packages that the tests need, where that is possible; otherwise say what is
# left out. Tests that need them are skipped then, and fail where CI is set.
set -euo pipefail

missing=()
command -v shellcheck >/dev/null || missing+=(shellcheck)
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  command -v slurmctld >/dev/null || missing+=(slurm-wlm munge)
  [ ${#missing[@]} -eq 0 ] || echo "not root on Debian: tests that need ${missing[*]} are left out" >&2
  exit 0
fi
if [ ${#missing[@]} -gt 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
    { apt-get update -qq && apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null; }
fi
"$(dirname "$0")/../slurm/sandbox/sandbox" install
