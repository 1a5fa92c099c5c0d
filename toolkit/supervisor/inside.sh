#!/bin/sh
# The first process in a container: inside.sh COMMAND... starts the command and passes signals on.
# When its stdin closes, the shell and podman that held it open are gone, even after SIGKILL: then all
# processes in the container are killed.
exec 3<&0 </dev/null
"$@" 3<&- &
_main=$!
trap 'kill -TERM "$_main"' TERM
trap 'kill -USR1 "$_main"' USR1
if [ $$ = 1 ]; then { cat <&3 >/dev/null; kill -KILL -1; } & fi
while wait "$_main"; _status=$?; kill -0 "$_main" 2>/dev/null; do :; done
exit "$_status"
