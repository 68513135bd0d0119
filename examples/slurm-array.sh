#!/bin/bash
# The full matrix as a Slurm array: each task runs a shard on a GPU of its own. From the checkout, on a file system that
# all nodes share:
#
#   array=$(sbatch --parsable --array=1-4 examples/slurm-array.sh)
#   sbatch --dependency=afterany:"$array" examples/slurm-array.sh merge
#
# A task that was ended goes on where it was: sbatch --array=3 --export=ALL,SHARDS=4,RESUME=--resume examples/slurm-array.sh
#SBATCH --job-name=narrowgauge
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#SBATCH --output=narrowgauge-%A-%a.log

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
reports="${REPORTS:-reports/slurm}"

if [ "${1:-}" = merge ]; then
    status=0
    narrowgauge merge "$reports"/shard-* --report-dir "$reports/merged" || status=$?
    [ "$status" -le 1 ] || exit "$status" # not all shards of one run
    narrowgauge gate --run "$reports/merged" --baseline "${BASELINE:-reports/baselines/sm_90.json}"
    exit "$status"
fi

shard="$SLURM_ARRAY_TASK_ID"
count="${SHARDS:-$SLURM_ARRAY_TASK_COUNT}"
narrowgauge run --tier full --device cuda --shard "$shard/$count" --report-dir "$reports/shard-$shard" ${RESUME:-}
