  SLURM_TIME_FORMAT=%s timeout 30 scontrol -o show job "$_run_job" 2>/dev/null |
    sed -nE 's/.* SubmitTime=([0-9]+) .* EligibleTime=([0-9]+) .* StartTime=([0-9]+) .*/\1 \2 \3/p' >"$_logs/scheduled" &
