#!/bin/bash
# Packs vLLM 0.24.0, Ray 2.60.0 with Serve, and what spotune_serve imports, for a GPU machine without a
# network that has Python 3.12, torch 2.11, transformers 5 and CUDA 13. Writes four pieces OUT/{1,2,3,4}/pN of less than
# 55 MB, for machines that take little at once. There: collect the pieces in /tmp/parts and run OUT/4/unpack.sh, then
# PYTHONPATH=/tmp/site:... python3 -m benchmarks.serving_speed.
#
# Usage: gpu_pack_serving.sh OUT
# Needs uv (UV=its path), a Python 3.12 (PYTHON312=its path where uv finds none), 12 GB of disk and some 5 minutes.
# VENV=folder keeps the environment, and uses it if it exists. COMPRESS=command replaces xz -T0 -4.
set -euo pipefail
out=$(realpath -m "$1"); work=$(mktemp -d -p "${TMPDIR:-/tmp}"); trap 'rm -rf "$work"' EXIT
uv=${UV:-uv}; venv=$(realpath -m "${VENV:-$work/venv}")
if [ ! -d "$venv" ]; then
  "$uv" venv --quiet --python "${PYTHON312:-3.12}" "$venv"
  printf '%s\n' vllm==0.24.0 'ray[serve]==2.60.0' peft prometheus-client jinja2 |
    "$uv" pip install --quiet --python "$venv/bin/python" -r -
fi
tree=$work/tree; mkdir "$tree"; site=$venv/lib/python3.12/site-packages
# What that machine has of its own, or what only other models and GPUs need. Links, so that nothing is copied.
(cd "$site" && cp -al . "$tree"); cd "$tree"
rm -rf torch torch-* triton* nvidia* functorch torchgen torchaudio* torchvision* numpy* sympy* networkx* mpmath* cv2 \
  opencv* llvmlite* numba* mistral_common* pycountry* transformers* tokenizers* sentencepiece* tiktoken tiktoken-* \
  huggingface_hub* hf_xet* anthropic* safetensors* PIL pillow* tilelang* flashinfer* cuda cuda_* z3* quack* humming* \
  nvidia_cutlass_dsl* tokenspeed* ninja* supervisor* pip* setuptools* peft* accelerate* cudnn include \
  vllm/third_party/{deep_gemm,fmha_sm100} vllm/vllm_flash_attn/_vllm_fa2_C* vllm/_qutlass_C* vllm/_flashmla* \
  vllm/_moe_C* vllm/vllm-rs ray/jars ray/rllib ray/tune/examples ray/cpp ray/dashboard/client
find . -name __pycache__ -prune -exec rm -rf {} +; find . -name tests -type d -prune -exec rm -rf {} +
for library in $(find xgrammar -name '*.so') ray/_raylet.so ray/core/src/ray/{gcs/gcs_server,raylet/raylet}; do
  strip --strip-unneeded -o "$work/stripped" "$library"; rm "$library"; install -m 755 "$work/stripped" "$library"
done
tar c . | split --bytes=96M --filter="${COMPRESS:-xz -T0 -4}" > "$work/all"
split --number=4 --numeric-suffixes=1 --suffix-length=1 "$work/all" "$work/p"
for n in 1 2 3 4; do mkdir -p "$out/$n"; mv "$work/p$n" "$out/$n/p$n"; done
cat > "$out/4/unpack.sh" <<'U'
set -e
mkdir -p /tmp/site; cat /tmp/parts/p1 /tmp/parts/p2 /tmp/parts/p3 /tmp/parts/p4 | xz -dc | tar x -C /tmp/site
U
du -sm "$out"/*
