#!/bin/bash
for lr in 0.1 0.01; do
  mkdir -p "runs/$lr"
  sbatch --time=1:00:00 <<EOF
#!/bin/bash
#SBATCH --job-name=lr-$lr
#SBATCH --ntask=2
export MASTER_PORT=29500
srun python train.py --lr $lr --seed \$SLURM_PROCID
EOF
done
sbatch <<'END'
#!/bin/bash
python report.py
srun python archive.py
rm -rf tmp
END
