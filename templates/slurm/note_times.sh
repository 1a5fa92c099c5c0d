note_times() {  # when this attempt was queued, could have started, and was given its nodes; for `toolkit goodput`
  [[ `SLURM_TIME_FORMAT=%s timeout 30 scontrol -o show job "$_run_job" 2>/dev/null` =~ \ SubmitTime=([0-9]+)\ .*EligibleTime=([0-9]+)\ .*\ StartTime=([0-9]+)\  ]] || return 0
  echo "${BASH_REMATCH[@]:1}" >"$_logs/scheduled"
}
