# ---- How an attempt ended, and what follows: by outcome.json, since torchrun exits 1 for everything.
# Backquotes, since bash 5.2 loses a signal that comes while it expands $(...) or <(...), and its trap ends the script.
# Each attempt leaves in its folder: log, nodes, step (its last), reason, failing_node, first_error, exit_status.
log=`readlink "/proc/$$/fd/2"` || true  # the job's log; torchrun reports in it
[ -f "$log" ] || log=/dev/null
log_from=`stat -c %s "$log"`
echo "$log_from $log" >"$logs/log"  # where this attempt's lines begin, and in which file
word='' why='' status=1 queued='' excluded='' full=''

told() {  # KEY: its value in outcome.json, or nothing
  grep -oE "\"$1\": *(\"([^\"\\]|\\\\.)*\"|[^,}]*)" "$run_dir/outcome.json" 2>/dev/null |
    head -n 1 | sed -E 's/^[^:]*: *//; s/^"(.*)"$/\1/; s/\\(["\\])/\1/g; s/^null$//' || true
}

printed() { tail -c "+$((log_from + 1))" "$log"; }  # this attempt's part of the log

not_reached() {  # STATUS: whether srun could not start a node's task, so that no rank has trained
  # Its status is then the error's number modulo 256: 1001 to 1004, a node's slurmd did not answer;
  # 4007, the request was too long on its way (cred_expire).
  case $1 in 233 | 234 | 235 | 236 | 167) [ -n "`unreached`" ] ;; *) false ;; esac
}

unreached() {  # nodes whose task has not begun; needs those of the attempt in their order
  local n=0 node waiting='' named
  while read -r node; do
    [ -e "$logs/began-$n" ] || waiting+=${waiting:+$'\n'}$node
    n=$((n + 1))
  done <"$logs/nodes"
  # srun then ends the tasks of the others, some before they begin: if it names a node, it is that one.
  named=`printed | sed -nE 's/.*Task launch for .* failed on node ([^ :]+):.*/\1/p'` || true
  grep -xF "$waiting" <<<"${named:-$waiting}" | sort -u | grep . || echo "$waiting"
}

logged() { printed | grep -E "$1" >/dev/null; }  # PATTERN

down_nodes() { sinfo -h -N -n "$1" -t down,no_respond -o %N 2>/dev/null | sort -u || true; }  # NODES

fenced() { [ -e "$run_dir/logs/attempt-$((attempt + 1))" ]; }  # a cut cable had Slurm start another

note() { fenced || echo "$word: ${why:+$why; }$1" >"$logs/reason"; }  # DECISION

end() {  # STATUS DECISION
  note "$2"
  say "attempt $attempt ended: $word: ${why:+$why; }$2"
  exit "$1"
}

judge() {  # sets word and why: how this attempt ended
  local says='' rank where cannot code=$status
  if [ "`told attempt`" = "$attempt" ]; then
    says=`told status` rank=`told rank` why=`told reason`
    why=${rank:+rank $rank: }$why
  fi
  case $says:$status in done:* | :0 | running:0) word='done' why=''; return ;; esac
  if fenced; then
    word=fenced why="attempt $((attempt + 1)) has taken over"
    return
  fi
  if [ -s "$logs/repeated" ]; then  # in this job, which was stopped for it
    twice=`cat "$logs/repeated"`
    blame
    twice_on=`cat "$logs/failing_node" 2>/dev/null` || true
    judge_twice
    return
  fi
  ! logged '^ *exitcode +: 2( |$)' || code=2
  if logged '^ *exitcode +: 93( |$)'; then
    word=no_progress why="a worker exited with status 93${why:+ ($why)}"
  elif [ "$says" = fatal ]; then
    word=fatal
  elif [ -n "$full" ] && [ "$says" != preempted ]; then
    word=fatal why="no space is left for $run_dir"
  elif stopped; then
    :
  elif [ "$says" = preempted ]; then
    word=preempted
  elif where=`out_of_memory` || logged 'oom[-_]kill event'; then
    word=fatal why="out of memory: the kernel killed a process${where:+ on $where}"
  elif [ -z "$says" ] && cannot=`cat "$logs"/cannot-* 2>/dev/null` && read -r word why <<<"$cannot"; then
    [ "$word" = fatal ] || echo "${why%%:*}" >"$logs/failing_node"  # by node.sh, of its container
  elif [ -z "$says" ] && [[ $code =~ ^(2|126|127)$ ]]; then
    word=fatal why="exit status $code: another start would end like this one"
  elif not_reached "$status"; then
    word=retryable why="srun could not start on `unreached | paste -sd ' '` (exit status $status)"
    unreached | head -n 1 >"$logs/failing_node"
  else
    word=retryable
    [ -n "$says" ] || why="exit status $status without a word in outcome.json"
    [ "$says" != running ] || why="killed without a word, at step `told step` or later"
    blame
    if come_again; then judge_twice; fi
  fi
}

blame() {
  first_to_fail | grep -xF -f "$logs/nodes" >"$logs/failing_node" || rm "$logs/failing_node"
}

come_again() {  # whether this failure has come before: in two starts in this job, or in two attempts
  local all_ended=yes n=$((attempt - 1)) before='' error  # sets twice, and twice_on, if that was one node
  error=`printed | first_error "$logs" last` || true
  [ -z "$error" ] || echo "$error" >"$logs/first_error"
  twice_on=`cat "$logs/failing_node" 2>/dev/null` || true
  ! repeated "$logs"/node-*/* || return 0
  # Attempts that were stopped, or lost, may stand between; but where no step is known, as progress.
  while [ "$n" -ge "$since" ] && [ "$n" -ge 0 ]; do
    before=`cat "$run_dir/logs/attempt-$n/first_error" 2>/dev/null` && break
    [[ $error = *$'\t'[0-9]*$'\t'* ]] || break
    n=$((n - 1))
  done
  same_failure "$before" "$error" || return 1
  twice=$error
  [ "$twice_on" = "`cat "$run_dir/logs/attempt-$n/failing_node" 2>/dev/null`" ] || twice_on=''
}

judge_twice() {  # a failure that has come twice is fatal, unless it may be that of a node
  local n
  word=fatal why=`in_words "$twice"`
  for ((n = since; n < attempt; n++)); do [ ! -e "$run_dir/logs/attempt-$n/once_more" ] || twice_on=''; done
  # No exception of the script's own, first on the same node: once more without that, if others are left.
  case $twice in error*) grep -qE 'CUDA|ECC|Input/output error|Stale file handle' <<<"$twice" || twice_on='' ;; esac
  if [ -n "$twice_on" ] && [ "`nodes_left "$twice_on"`" -ge "$nnodes" ]; then
    word=retryable
    printf '%s\n' "$twice_on" "$twice_on" | tee "$logs/once_more" >"$logs/failing_node"
  else
    why+="; another start would end like these two"
  fi
}

out_of_memory() {  # names the nodes that have counted kills; Slurm itself may not watch memory
  cat "$logs"/oom-* 2>/dev/null | sort -u | paste -sd ' '
}

first_to_fail() {  # by torchrun's reports, killed before failed; else whose torchrun ended first
  local reports
  reports=`printed | grep -E '^ +(time|host|exitcode) +:' | sed -E 's/^[^:]*: *//' | paste - - -` ||
    reports=`cat "$logs"/failed-* 2>/dev/null` || true
  LC_ALL=C sort -t $'\t' -k 1,1 -k 3,3 <<<"$reports" | cut -f 2 | sed 's/\..*//; q'
}

stopped() {  # whether somebody has ended this attempt, and who
  case $stopping in
    cancelled) word=cancelled why="by toolkit cancel" ;;
    terminated) terminated ;;
    walltime) word=walltime why="out of time" ;;
    *) return 1 ;;
  esac
}

told_to_end() {  # Slurm may kill the script before its step has ended: all that can be said by now
  local word=terminated why="by Slurm" queued=''
  note "killed soon after"
  stopped || true
  if [ -n "$queued" ] && [ -z "$excluded" ]; then excluded=`exclude` || true; fi
  note "${queued:+queued again$excluded; }killed soon after"
}

terminated() {  # Slurm ends the job (TERM): because of a node, for another job, or by scancel?
  local down
  ! slurm_has_queued_it || queued=yes
  down=`down_nodes "$SLURM_JOB_NODELIST"`
  if [ -n "$down" ]; then
    word=node_failure why="down: ${down//$'\n'/ }"
    echo "$down" >"$logs/failing_node"
  elif [ -n "$queued" ]; then
    word=preempted why="Slurm has taken the nodes"
  else
    word=cancelled why="by scancel"
  fi
}

slurm_has_queued_it() {  # for a start after this one
  [[ `scontrol -o show job "$run_job" 2>/dev/null` =~ \ Restarts=([0-9]+) ]] &&
    [ "${BASH_REMATCH[1]}" -gt "$restarts" ]
}

count() {  # over this job's or chain's attempts; sets failures, idle (in a row, no new step) and best
  local n=$since was step
  [ "$n" -ge 0 ] || n=0
  best=`cat "$run_dir/logs/attempt-$((n - 1))/step" 2>/dev/null` || best=0
  failures=0 idle=0
  for ((; n <= attempt; n++)); do
    was=`sed 's/:.*//' "$run_dir/logs/attempt-$n/reason" 2>/dev/null` || true
    step=`cat "$run_dir/logs/attempt-$n/step" 2>/dev/null` || true
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
  [ "$failure_limit" -eq 0 ] || [ "$failures" -le "$failure_limit" ] ||
    end "$status" "gave up after $failure_limit requeues"
}

conclude() {  # STATUS of the step: ends this attempt, and queues the job again or not
  status=$1
  # By bash itself: another program may be ended by the TERM that Slurm sends to all of the script.
  printf %5000s . 2>/dev/null >"$logs/reserve.full" || full=yes
  rm -f "$logs/reserve" "$logs/reserve.full"  # so that there is room for a reason
  judge
  [ "$status" -ne 0 ] || [ "$word" = 'done' ] || status=1
  # Of an end that Slurm has asked for all is said that can be, should it not wait any longer.
  [ "$stopping" = terminated ] || note "deciding"
  # An attempt that was preempted before it began says nothing of progress.
  if [[ $word != @(preempted|fenced) ]] || [ "`told attempt`" = "$attempt" ]; then
    told step | grep . >"$logs/step" || rm "$logs/step"
  fi
  case $word in
    'done') end 0 "all steps made" ;;
    no_progress) end 93 "not queued again" ;;
    fatal | cancelled | fenced) end "$status" "not queued again" ;;
  esac
  [ "$failure_limit" -gt 0 ] || end "$status" "not queued again (retries.requeue is 0)"
  if [ -z "$queued" ]; then
    stop_if_spent
    queue_again
  fi
  [ -n "$excluded" ] || excluded=`exclude` || true
  end "$status" "queued again$excluded"
}

queue_again() {
  note "queued again"
  trap '' TERM  # what the requeue sends this script
  # A controller that does not answer is being restarted: try again for ten minutes. Behind a cut
  # cable, Slurm has made another start of this job meanwhile, which must not be queued again.
  local answers='' until_s=$((SECONDS + 600))
  until slurm_has_queued_it || scontrol requeue "$run_job"; do
    if [ -n "$answers" ] || [ "$SECONDS" -ge "$until_s" ] || fenced; then
      end "$status" "scontrol could not queue it again"
    fi
    if scontrol ping >/dev/null 2>&1; then answers=yes; else sleep 5; fi
  done
}

nodes_left() {  # WITHOUT these nodes: how many others the job could have
  sinfo -h -N -p "$SLURM_JOB_PARTITION" -o '%N %t' | grep -vE ' (down|drain|drng|fail|unk)|\*$' |
    cut -d ' ' -f 1 | sort -u | grep -cvxF "$1" || true
}

exclude() {  # keeps a job that waits off nodes on which two of its attempts have failed first
  local bad before='' left
  bad=`cat "$run_dir"/logs/attempt-*/failing_node 2>/dev/null | sort | uniq -d`
  [[ `scontrol -o show job "$run_job" 2>/dev/null` =~ \ ExcNodeList=([^\ \(]+) ]] &&
    before=`scontrol show hostnames "${BASH_REMATCH[1]}"`
  bad=`grep -vxF "${before:- }" <<<"$bad"` || return 0
  [ -n "$bad" ] || return 0
  left=`nodes_left "$before"$'\n'"$bad"`
  bad=${bad//$'\n'/,}
  if [ "$left" -lt "$nnodes" ]; then
    echo "; not without $bad, where two attempts have failed first: too few nodes would be left"
  elif scontrol update jobid="$run_job" excnodelist="${before:+${before//$'\n'/,},}$bad" >&2; then
    echo "; without $bad, where two attempts have failed first"
  fi
}

begin() {  # finishes the reason of an attempt that could not; stops a job that has spent its starts
  local before=$run_dir/logs/attempt-$((attempt - 1)) down was
  printf %65536s . >"$logs/reserve"  # for the last words of an attempt that fills the disk
  rm -f "$before/reserve"
  { [ "$restarts" -gt 0 ] || [ "$mode" = chain ]; } && [ -d "$before" ] || return 0
  was=`cat "$before/reason" 2>/dev/null` || true
  case $was in '' | terminated:*)
    # Its script died without a word, and with it the first node, unless Slurm knows another one.
    down=`down_nodes "$(paste -sd , "$before/nodes")"`
    if [ -z "$was" ]; then
      echo "lost: the batch script was killed without a word${down:+; down: ${down//$'\n'/ }}" >"$before/reason"
    elif [ -n "$down" ]; then
      echo "node_failure: down: ${down//$'\n'/ }; killed before it could say so" >"$before/reason"
    fi
    if [ -z "$was" ] || [ -n "$down" ]; then
      echo "${down:-`head -n 1 "$before/nodes"`}" >"$before/failing_node"
    fi
    ;;
  esac
  case $was in '' | *"; killed soon after")
    told step | grep . >"$before/step" || rm "$before/step"
    ;;
  esac
  if [ "$failure_limit" -gt 0 ] || [ "$mode" = chain ]; then stop_if_spent; fi
}
