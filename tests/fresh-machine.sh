#!/bin/bash
# Run a command (`make test`) in a new clone of HEAD on a new Debian of this machine's release, which
# knows nothing of this machine but how to reach the network:
#     tests/fresh-machine.sh [COMMAND...]
# FRESH_ROOT=FOLDER keeps the system there and uses it again the next time, with a new clone;
# FRESH_CLONE=keep enters the clone of last time as it is. Without FRESH_ROOT the system is new, lies
# below /var/tmp (about 30 GB at most), and is removed at the end. Needs root and debootstrap.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
clone=/root/torch-deploy-toolkit
[ $# -gt 0 ] || set -- make test

[ "$(id -u)" -eq 0 ] || { echo "fresh-machine: needs root; call as root" >&2; exit 2; }
for program in debootstrap git pivot_root; do
  command -v "$program" >/dev/null ||
    { echo "fresh-machine: no $program here; apt-get install debootstrap git util-linux" >&2; exit 2; }
done
root=${FRESH_ROOT:-}
if [ -z "$root" ]; then
  root=$(mktemp -d /var/tmp/fresh-machine.XXXXXX)
  chmod 755 "$root" # it becomes /, which every user must enter
  trap 'rm -rf --one-file-system "$root"' EXIT # nothing is mounted there outside the namespace
fi
mkdir -p "$root"
root=$(cd "$root" && pwd)

if [ ! -e "$root/etc/fresh-machine" ]; then
  # Of the sources of this machine's apt, those of Debian itself.
  sources=$(apt-get indextargets --format "deb \$(SITE) \$(RELEASE) \$(COMPONENT)" \
    'Created-By: Packages' 'Origin: Debian' | sort -u)
  # shellcheck source=/dev/null
  suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
  mirror=$(awk -v suite="$suite" '$3 == suite { print $2; exit }' <<<"$sources")
  [ -n "$mirror" ] || { echo "fresh-machine: apt has no source of $suite; apt-get update?" >&2; exit 2; }
  # A proxy, and whether a mirror may be older than its signature allows.
  network=$(apt-config dump Acquire | grep -E '^Acquire::(https?::Proxy|Check-)' || :)
  proxy=$(sed -n 's/^Acquire::http::Proxy "\(.*\)";/\1/p' <<<"$network")
  # What a clone and make need. All else is for the Makefile and tests/packages.sh to install.
  ${proxy:+env "http_proxy=$proxy"} debootstrap --variant=minbase \
    --include=ca-certificates,git,make,python3,python3-venv "$suite" "$root" "$mirror" >"$root/debootstrap.log"
  echo "$sources" >"$root/etc/apt/sources.list"
  echo "$network" >"$root/etc/apt/apt.conf.d/90network"
  printf '127.0.0.1 localhost\n127.0.1.1 fresh\n' >"$root/etc/hosts" # as Debian's installer does
  # Certificates of this machine's own network, which pip does not find by itself.
  mkdir -p "$root/usr/local/share/ca-certificates"
  find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t "$root/usr/local/share/ca-certificates" {} +
  chroot "$root" update-ca-certificates >/dev/null 2>&1
  printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$root/etc/pip.conf"
  touch "$root/etc/fresh-machine"
fi
cp /etc/resolv.conf "$root/etc/resolv.conf"
if [ "${FRESH_CLONE:-}" != keep ]; then
  rm -rf --one-file-system "${root:?}$clone"
  git clone --quiet "$here" "$root$clone"
fi

# A machine as far as programs can tell: its own PID 1, mounts, host name and /dev/shm; the network is
# this machine's. All of it ends with PID 1, which reaps orphans and ends after the command. In the
# background, so that SIGTERM is answered at once; Ctrl-C reaches the command, which is waited for.
# shellcheck disable=SC2016
env --default-signal=INT,QUIT unshare --mount --pid --fork --uts --ipc --kill-child bash -euc '
  root=$1 clone=$2; shift 2
  trap "exit 130" INT TERM
  mount --bind "$root" "$root" # pivot_root wants a mount point
  cd "$root"
  mount --rbind /sys sys
  mount --rbind /dev dev
  mount -t tmpfs tmpfs dev/shm # podman and PyTorch keep names there
  mount -t tmpfs -o mode=0755 tmpfs run
  mkdir run/lock
  mount -t proc proc proc
  pivot_root . mnt && umount -l /mnt
  mount --make-rshared / # as systemd does
  echo fresh >/proc/sys/kernel/hostname
  cd "$clone"
  env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin ${TERM:+"TERM=$TERM"} "$@"
' fresh "$root" "$clone" "$@" <&0 &
machine=$!
trap 'wait "$machine"; exit 130' INT
trap 'kill -KILL "$machine"; wait "$machine" 2>/dev/null || sleep 2; exit 143' TERM HUP # PID 1 dies with unshare
wait "$machine"
