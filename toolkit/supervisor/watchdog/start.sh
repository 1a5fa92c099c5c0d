# Starts torchrun, with the watchdog beside it: sh start.sh SECONDS|learned|never COMMAND...
# Python loads the sitecustomize.py in the first folder of PYTHONPATH, also in each rank.
_here=${0%/*} _timeout=$1
shift
if [ "$_timeout" != never ] && TRAIN_WATCHDOG=`mktemp -d /tmp/watchdog.XXXXXX`; then
  export TRAIN_WATCHDOG
  python3 "$_here/watchdog.py" "$TRAIN_WATCHDOG" "$_timeout" </dev/null || {
    rmdir "$TRAIN_WATCHDOG"
    unset TRAIN_WATCHDOG
  }
fi
export PYTHONPATH="$_here/site${PYTHONPATH:+:$PYTHONPATH}"
if [ -f "$_here/site/fork_server.py" ] && read -r _server </proc/sys/kernel/random/uuid; then
  case " $* " in *" --nproc-per-node=1 "*) ;; *) export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} ;; esac # as torchrun does
  # In a subshell, so that it is no child of torchrun, whose children are ranks.
  # From Python, as torchrun starts ranks: in the C locale, Python sets LC_CTYPE for what it starts.
  (python3 -c 'import os, sys
os.environ["TRAIN_IS_FORK_SERVER"] = "1"
os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])' "$_here/site/fork_server.py" "$_server" $$ "$@" </dev/null &)
  export TRAIN_FORK_SERVER="$_server"
fi
exec "$@"
