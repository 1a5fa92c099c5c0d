#!/bin/sh
# The first process in a container: inside.sh COMMAND... starts the command and passes signals on.
# When its stdin ends, whoever held the container is gone, even by SIGKILL: then all in it is killed.
exec 3<&0 </dev/null
"$@" 3<&- &
main=$!
trap 'kill -TERM "$main"' TERM
trap 'kill -USR1 "$main"' USR1
if [ $$ = 1 ]; then { cat <&3 >/dev/null; kill -KILL -1; } & fi
while wait "$main"; status=$?; kill -0 "$main" 2>/dev/null; do :; done
exit "$status"
