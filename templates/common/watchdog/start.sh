# Starts torchrun with the watchdog beside it: sh start.sh SECONDS|learned COMMAND...
# Python loads the sitecustomize.py in the first folder of PYTHONPATH, also in each rank.
_here=${0%/*} _timeout=$1
shift
if TRAIN_WATCHDOG=`mktemp -d /tmp/watchdog.XXXXXX`; then
  export TRAIN_WATCHDOG
  if python3 "$_here/watchdog.py" "$TRAIN_WATCHDOG" "$_timeout" </dev/null; then
    export PYTHONPATH="$_here/site${PYTHONPATH:+:$PYTHONPATH}"
  else
    rmdir "$TRAIN_WATCHDOG"
  fi
fi
exec "$@"
