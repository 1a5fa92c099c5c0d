# ---- A run whose number of nodes may change. Slurm takes a lost node out of the job for good and
# adds none, so each missing one is waited for by a job of its own, which joins the run (join.sh).
joiners=$logs/joiners  # the ids of those jobs

keep_whole() {  # looks after the nodes until it is killed
  local before=$SLURM_JOB_NUM_NODES have here id shown nodes=$SLURM_JOB_NODELIST
  while :; do
    shown=$(scontrol -o show job "$SLURM_JOB_ID" 2>/dev/null) || true
    [[ $shown =~ \ NumNodes=([0-9]+) ]] || true
    here=${BASH_REMATCH[1]:-$before}
    [[ ! $shown =~ \ NodeList=([^\ \(]+) ]] || nodes=${BASH_REMATCH[1]}
    [ "$here" -ge "$before" ] || say "$((before - here)) of $before nodes lost; $here go on"
    before=$here
    have=$((here + $(living | wc -l)))
    while [ "$have" -lt "$max_nodes" ]; do
      id=$(ask_for_one "$nodes") || break
      echo "$id" >>"$joiners"
      say "job $id waits for another node, to join this run"
      have=$((have + 1))
    done
    sleep 15
  done
}

living() {  # ids of the jobs that wait or have joined
  [ ! -s "$joiners" ] || squeue -h -j "$(paste -sd , "$joiners")" -o %A 2>/dev/null || true
}

ask_for_one() {  # NOT_ON: prints the id of a new job, which must not inherit this one's variables
  local name unset=()
  for name in $(compgen -e | grep '^SLURM_' | grep -vx SLURM_CONF); do unset+=(-u "$name"); done
  env "${unset[@]}" sbatch --parsable --exclude="$1" --output="${log//%/%%}" \
    "$logs/join.sh" "$run_dir" "$attempt" "$endpoint" "$SLURM_JOB_ID" | sed 's/;.*//' | grep .
}

let_go() {  # ends the jobs of these attempts' joiners
  local ids
  ids=`cat "$run_dir"/logs/attempt-*/joiners 2>/dev/null` || return 0
  # shellcheck disable=SC2086  # several words
  scancel --quiet $ids 2>/dev/null || true
}
