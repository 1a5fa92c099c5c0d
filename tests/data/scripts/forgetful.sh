#SBATCH --nodes=2
#SBATCH --time=60
#SBATCH --ntasks_per_node=1
# token=hf_AbCdEfGhIjKlMnOpQrStUvWx
cd "$SLURM_SUBMIT_DIR"
for seed in 1 2; do
  torchrun --nnodes=1 --nproc-per-node=2 train.py --seed "$seed"
done
torchrun --standalone --nproc-per-node=2 test.py 2>&1 | tee test.log
