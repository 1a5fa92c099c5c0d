# Starts torchrun with the watchdog beside it: sh start.sh SECONDS|learned COMMAND...
# The first folder of PYTHONPATH has a sitecustomize.py, which Python loads in each rank.
_here=${0%/*} _timeout=$1
shift
if TRAIN_WATCHDOG=`mktemp -d /tmp/watchdog.XXXXXX`; then
  export TRAIN_WATCHDOG
  # Not a child of torchrun, whose children are the ranks.
  (python3 "$_here/watchdog.py" "$TRAIN_WATCHDOG" "$_timeout" "$$" </dev/null &)
  export PYTHONPATH="$_here/site${PYTHONPATH:+:$PYTHONPATH}"
fi
exec "$@"
