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
exec "$@"
