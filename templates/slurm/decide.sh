# ---- How an attempt ended, and what follows: by outcome.json, since torchrun exits 1 for everything.
# Each attempt leaves in its folder: nodes, step (its last), reason, failing_node, exit_status.
log=$(readlink "/proc/$$/fd/2") || true  # the job's log; torchrun reports in it
[ -f "$log" ] || log=/dev/null
log_from=$(stat -c %s "$log")
word='' why='' status=1 queued=''

told() {  # KEY: its value in outcome.json, or nothing
  grep -oE "\"$1\": *(\"([^\"\\]|\\\\.)*\"|[^,}]*)" "$run_dir/outcome.json" 2>/dev/null |
    head -n 1 | sed -E 's/^[^:]*: *//; s/^"(.*)"$/\1/; s/\\(["\\])/\1/g; s/^null$//' || true
}

printed() { tail -c "+$((log_from + 1))" "$log"; }  # this attempt's part of the log

not_reached() {  # STATUS: whether srun could not start a node's task, so that no rank has trained
  # Its status is then the error's number modulo 256: 1001 to 1004, a node's slurmd did not answer.
  case $1 in 233 | 234 | 235 | 236) [ -n "$(unreached)" ] ;; *) false ;; esac
}

unreached() {  # nodes whose task has not begun; needs those of the attempt in their order
  local n=0 node
  while read -r node; do
    [ -e "$logs/began-$n" ] || echo "$node"
    n=$((n + 1))
  done <"$logs/nodes"
}

logged() { grep -qE "$1" <(printed); }  # PATTERN

down_nodes() { sinfo -h -N -n "$1" -t down,no_respond -o %N 2>/dev/null | sort -u || true; }  # NODES

note() { echo "$word: ${why:+$why; }$1" >"$logs/reason"; }  # DECISION

end() {  # STATUS DECISION
  note "$2"
  say "attempt $attempt ended: $(cat "$logs/reason")"
  exit "$1"
}

judge() {  # sets word and why: how this attempt ended
  local says='' rank code=$status
  if [ "$(told attempt)" = "$attempt" ]; then
    says=$(told status) rank=$(told rank) why=$(told reason)
    why=${rank:+rank $rank: }$why
  fi
  case $says:$status in done:* | :0 | running:0) word='done' why=''; return ;; esac
  ! logged '^ *exitcode +: 2( |$)' || code=2
  if logged '^ *exitcode +: 93( |$)'; then
    word=no_progress why="a worker exited with status 93${why:+ ($why)}"
  elif [ "$says" = fatal ]; then
    word=fatal
  elif logged 'oom[-_]kill event'; then
    word=fatal why="out of memory: the kernel killed a process"
  elif [ "$stopping" = cancelled ]; then
    word=cancelled why="by toolkit cancel"
  elif [ "$stopping" = terminated ]; then
    terminated
  elif [ "$stopping" = walltime ]; then
    word=walltime why="out of time"
  elif [ "$says" = preempted ]; then
    word=preempted
  elif [ -z "$says" ] && [[ $code =~ ^(2|126|127)$ ]]; then
    word=fatal why="exit status $code: another start would end like this one"
  elif not_reached "$status"; then
    word=retryable why="srun could not start on $(unreached | paste -sd ' ') (exit status $status)"
    unreached | head -n 1 >"$logs/failing_node"
  else
    word=retryable
    [ -n "$says" ] || why="exit status $status without a word in outcome.json"
    [ "$says" != running ] || why="killed without a word, at step $(told step) or later"
    first_to_fail | grep -xF -f "$logs/nodes" >"$logs/failing_node" || rm "$logs/failing_node"
  fi
}

first_to_fail() {  # by torchrun's reports, killed before failed; else whose torchrun ended first
  local reports
  reports=$(printed | grep -E '^ +(time|host|exitcode) +:' | sed -E 's/^[^:]*: *//' | paste - - -) ||
    reports=$(cat "$logs"/failed-* 2>/dev/null) || true
  LC_ALL=C sort -t $'\t' -k 1,1 -k 3,3 <<<"$reports" | cut -f 2 | sed 's/\..*//; q'
}

terminated() {  # Slurm ends the job (TERM): because of a node, for another job, or by scancel?
  local down
  [[ $(scontrol -o show job "$SLURM_JOB_ID" 2>/dev/null) =~ \ Restarts=([0-9]+) ]] || true
  [ "${BASH_REMATCH[1]:-0}" -le "$restarts" ] || queued=yes
  down=$(down_nodes "$SLURM_JOB_NODELIST")
  if [ -n "$down" ]; then
    word=node_failure why="down: ${down//$'\n'/ }"
    echo "$down" >"$logs/failing_node"
  elif [ -n "$queued" ]; then
    word=preempted why="Slurm has taken the nodes"
  else
    word=cancelled why="by scancel"
  fi
}

count() {  # over this job's attempts; sets failures, idle (in a row without a new step) and best
  local n=$((attempt - restarts)) was step
  [ "$n" -ge 0 ] || n=0
  best=$(cat "$run_dir/logs/attempt-$((n - 1))/step" 2>/dev/null) || best=0
  failures=0 idle=0
  for ((; n <= attempt; n++)); do
    was=$(sed 's/:.*//' "$run_dir/logs/attempt-$n/reason" 2>/dev/null) || true
    step=$(cat "$run_dir/logs/attempt-$n/step" 2>/dev/null) || true
    case $was:$step in  # out of time is no failure of who can show progress
      retryable:* | node_failure:* | lost:* | walltime:) failures=$((failures + 1)) ;;
    esac
    if [ "${step:-0}" -gt "$best" ]; then
      best=$step idle=0
    elif [ -n "$step" ]; then
      idle=$((idle + 1))
    fi
  done
}

stop_if_spent() {
  count
  if [ "$idle" -ge "$idle_limit" ]; then
    word=no_progress
    end 93 "no step beyond $best in $idle attempts (retries.no_progress)"
  fi
  word=${word:-gave_up}
  [ "$failures" -le "$failure_limit" ] || end "$status" "gave up after $failure_limit requeues"
}

conclude() {  # STATUS of the step: ends this attempt, and queues the job again or not
  status=$1
  judge
  [ "$status" -ne 0 ] || [ "$word" = 'done' ] || status=1
  note "deciding"
  # An attempt that was preempted before it began says nothing of progress.
  if [ "$word" != preempted ] || [ "$(told attempt)" = "$attempt" ]; then
    told step | grep . >"$logs/step" || rm "$logs/step"
  fi
  case $word in
    'done') end 0 "all steps made" ;;
    no_progress) end 93 "not queued again" ;;
    fatal | cancelled) end "$status" "not queued again" ;;
  esac
  [ "$failure_limit" -gt 0 ] || end "$status" "not queued again (retries.requeue is 0)"
  if [ -z "$queued" ]; then
    stop_if_spent
    queue_again
  fi
  end "$status" "queued again$(exclude)"
}

queue_again() {
  note "queued again"
  trap '' TERM  # what the requeue sends this script
  scontrol requeue "$SLURM_JOB_ID" || end "$status" "scontrol refused to queue it again"
}

exclude() {  # keeps a job that waits off nodes on which two of its attempts have failed first
  local bad before='' left
  bad=$(cat "$run_dir"/logs/attempt-*/failing_node 2>/dev/null | sort | uniq -d)
  [[ $(scontrol -o show job "$SLURM_JOB_ID" 2>/dev/null) =~ \ ExcNodeList=([^\ \(]+) ]] &&
    before=$(scontrol show hostnames "${BASH_REMATCH[1]}")
  bad=$(grep -vxF "${before:- }" <<<"$bad") || return 0
  [ -n "$bad" ] || return 0
  left=$(sinfo -h -N -p "$SLURM_JOB_PARTITION" -o '%N %t' | grep -vE ' (down|drain|drng|fail|unk)|\*$' |
    cut -d ' ' -f 1 | sort -u | grep -cvxF "$before"$'\n'"$bad") || true
  bad=${bad//$'\n'/,}
  if [ "${left:-0}" -lt "$nnodes" ]; then
    echo "; not without $bad, where two attempts have failed first: too few nodes would be left"
  elif scontrol update jobid="$SLURM_JOB_ID" excnodelist="${before:+${before//$'\n'/,},}$bad" >&2; then
    echo "; without $bad, where two attempts have failed first"
  fi
}

begin() {  # finishes the reason of an attempt that could not; stops a job that has spent its starts
  local before=$run_dir/logs/attempt-$((attempt - 1)) down
  [ "$restarts" -gt 0 ] && [ -d "$before" ] || return 0
  if [ ! -e "$before/reason" ]; then
    # Its script died without a word, and with it the first node, unless Slurm knows another one.
    down=$(down_nodes "$(paste -sd , "$before/nodes")")
    echo "lost: the batch script was killed without a word${down:+; down: ${down//$'\n'/ }}" >"$before/reason"
    echo "${down:-$(head -n 1 "$before/nodes")}" >"$before/failing_node"
    told step | grep . >"$before/step" || rm "$before/step"
  fi
  [ "$failure_limit" -eq 0 ] || stop_if_spent
}
