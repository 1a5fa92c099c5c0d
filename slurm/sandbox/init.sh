#!/bin/bash
# PID 1 of one machine of the sandbox: init.sh controller|node NAME STATE_DIRECTORY [accounting|"" [SLURM]]
#
# `sandbox up` holds the other end of stdin: it reads this process's pid from stdout, wires the network and
# then says "go". When it dies before that, stdin ends and so does this machine: nothing can be left behind.
set -eu
role=$1 name=$2 dir=$3 accounting=${4:-} slurm=${5:-}
run=/run/slurm-sandbox

# /proc is still the real machine's here, so this is the pid as the outside sees it.
read -r pid _ </proc/self/stat

exec 3>&1 >>"$dir/logs/$name.log" 2>&1
echo "$name" >/proc/sys/kernel/hostname
# Another Slurm with the C library that it needs: what the machine has runs with a newer one, too.
if [ -n "$slurm" ]; then
    mount -t overlay -o "lowerdir=$slurm/usr:/usr" overlay /usr
    for plugins in "$slurm"/usr/lib/*/slurm-wlm; do # none of the machine's own among them
        mount --bind "$plugins" "${plugins#"$slurm"}"
    done
fi
mount --bind "$dir/etc/hosts" /etc/hosts
# Where Slurm looks without SLURM_CONF, as in a job under --export=NONE.
if [ -d /etc/slurm ]; then mount --bind "$dir/etc" /etc/slurm; fi
# A short path, private to this mount namespace: unix socket paths may have at most 108 characters.
mount -t tmpfs -o mode=0755 tmpfs "$run"
if [ "$role" = node ]; then
    mount -t proc proc /proc
    : >"$run/node"
    # What a power cut erases, and two machines never share: podman keeps its locks there.
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    if [ -d "$dir/etc/containers/$name" ]; then
        mount --bind "$dir/etc/containers/$name" /etc/containers
        for part in containers libpod crun runc; do
            mkdir -p "/run/$part"
            mount -t tmpfs -o mode=0755 tmpfs "/run/$part"
        done
        # crun takes the hierarchy of both versions for one it does not know.
        ! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified
    fi
fi
echo "$pid" >&3
exec 3>&-
read -r _ || exit 1
exec </dev/null

# wait_for SECONDS COMMAND...: until the command succeeds; the machine ends when it never does.
wait_for() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        if [ "$SECONDS" -ge "$end" ]; then
            echo "$name: gave up waiting for: $*"
            exit 1
        fi
        sleep 0.05
    done
}

# listens PORT: without connecting, which daemons would log as an error.
listens() {
    grep -qE "^ *[0-9]+: [0-9A-F]+:$(printf '%04X' "$1") [0-9A-F:]+ 0A " /proc/net/tcp /proc/net/tcp6
}

export SLURM_CONF="$dir/etc/slurm.conf"
mkdir -m 0700 "$run/key" "$run/spool"
cp "$dir/etc/munge.key" "$run/key/munge.key"
chmod 0600 "$run/key/munge.key"
munged --foreground --socket="$run/munge.sock" --key-file="$run/key/munge.key" \
    --seed-file="$run/key/seed" --pid-file="$run/munged.pid" &
wait_for 30 test -S "$run/munge.sock"

if [ "$accounting" = accounting ]; then
    # Its temporary files have names of process ids, which are the same ones in each sandbox.
    mkdir -m 0700 "$run/tmp"
    mariadb-install-db --no-defaults --user=root --datadir="$dir/mariadb" --tmpdir="$run/tmp" \
        --auth-root-authentication-method=normal --skip-test-db >"$dir/logs/mariadb-install.log" 2>&1
    # The port is safe: it exists in this network namespace only.
    mariadbd --no-defaults --user=root --datadir="$dir/mariadb" --tmpdir="$run/tmp" \
        --socket="$run/mariadb.sock" --bind-address=127.0.0.1 --skip-name-resolve --pid-file="$run/mariadb.pid" \
        --innodb-buffer-pool-size=64M --innodb-log-file-size=16M >"$dir/logs/mariadb.log" 2>&1 &
    wait_for 60 mariadb-admin --no-defaults --socket="$run/mariadb.sock" --user=root ping
    slurmdbd
    wait_for 60 listens 6819
    sacctmgr -i add cluster sandbox
fi

# They go to the background once their log is open; what fails before that is said in this file.
if [ "$role" = controller ]; then
    slurmctld -f "$SLURM_CONF"
else
    slurmd -f "$SLURM_CONF"
fi

# Stay for ever without a child of our own (`sandbox ps` must show jobs only); bash reaps what jobs leave.
set +e
exec {hold}<> <(:)
while :; do
    read -r -u "$hold" _
done
