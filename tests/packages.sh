#!/bin/bash
# Install the Debian packages that the tests need, where that is possible; otherwise say what is
# left out. Tests that need them are skipped then, and fail where CI is set.
set -euo pipefail

# Data sets, unpacked below the project: neither root nor the R that one of them depends on is
# needed.
data="$(dirname "$0")/../.cache/data"
unpack() { # PACKAGE
  [ ! -d "$data/$1" ] || return 0
  local folder done=0
  mkdir -p "$data"
  folder=$(mktemp -d "$data/.XXXXXX")
  { (cd "$folder" && apt-get download -qq "$1") ||
    { apt-get update -qq && (cd "$folder" && apt-get download -qq "$1"); }; } >/dev/null 2>&1 &&
    dpkg -x "$folder"/*.deb "$folder/unpacked" && mv "$folder/unpacked" "$data/$1" && done=1
  rm -rf "$folder"
  [ $done -eq 1 ] || echo "left out: the tests on the data of $1, which could not be had" >&2
}
if command -v apt-get >/dev/null; then
  unpack dataset-fashion-mnist
  unpack r-cran-mlbench
else
  echo "left out: the tests on fashion-mnist and shuttle, whose data are Debian packages" >&2
fi

missing=()
command -v shellcheck >/dev/null || missing+=(shellcheck)
if [ "$(id -u)" -eq 0 ]; then
  # What builds the image and runs it on the sandbox's nodes.
  # rsync, tcsh, and below a login node's sshd: how the tests reach a cluster from a laptop.
  # runc, catatonit, iptables: what runs pods by `podman kube play`.
  for program in podman crun debootstrap rsync tcsh runc catatonit iptables; do
    command -v "$program" >/dev/null || missing+=("$program")
  done
  command -v sshd >/dev/null || missing+=(openssh-server)
  # What shows the reports.
  command -v chromium >/dev/null || missing+=(chromium)
  command -v chromedriver >/dev/null || missing+=(chromium-driver)
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "left out: the tests on a real Slurm cluster, in containers, by ssh and with a full disk, which need root on Debian" >&2
  [ ${#missing[@]} -eq 0 ] || echo "left out: the tests that need ${missing[*]}; please install it" >&2
  exit 0
fi
no_daemon() { # COMMAND: the tests start sshd themselves; this machine is to have none of its own
  case " ${missing[*]} " in *" openssh-server "*) ;; *) return 0 ;; esac
  [ ! -d /run/systemd/system ] || systemctl "$@" ssh.service ssh.socket >/dev/null 2>&1 || :
}
if [ ${#missing[@]} -gt 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  no_daemon mask --runtime
  apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
    { apt-get update -qq && apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null; }
  no_daemon disable
  no_daemon unmask --runtime
fi
sandbox="$(dirname "$0")/../slurm/sandbox/sandbox"
"$sandbox" install
# kubectl, unpacked below the project: Debian 12 has only one whose kustomize is too old, and Debian
# 13's runs on it as it is.
kubectl="$(dirname "$0")/../.cache/kubectl"
if ! command -v kubectl >/dev/null && [ ! -d "$kubectl" ]; then
  PYTHONPATH="$(dirname "$0")/../slurm/sandbox" python3 -c 'import sys
from pathlib import Path
from sandboxlib.versions import unpack
unpack("trixie", Path(sys.argv[1]).resolve(), ["kubectl"])' "$kubectl" 2>/dev/null ||
    echo "left out: the tests on k8s/base, which need kubectl" >&2
fi
# A second version of Slurm, unpacked below the project.
for suite in trixie forky; do
  "$sandbox" fetch $suite "$(dirname "$0")/../.cache/slurm-$suite" >/dev/null ||
    echo "left out: the tests on the Slurm of Debian's $suite, whose packages could not be had" >&2
done
