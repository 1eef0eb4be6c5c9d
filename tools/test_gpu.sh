#!/usr/bin/env bash
# tests/gpu, on a machine with an NVIDIA GPU. Without a driver or a GPU it says which is missing and fails.
#
# What always holds: a test that can't run is a failure here, and not skipped as in `make test`, except vLLM's where vLLM
# can't be installed. It, PyTorch (together some 10 GB) and transformers go into .venv-gpu, which is made when it is
# missing; .venv stays as it is. The figures are in build/bench/gpu.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
probe='
from nic_offload.cuda_device import CudaDevice
from nic_offload.errors import CudaUnavailable
try:
    CudaDevice().close()
except CudaUnavailable as error:
    raise SystemExit(f"test-gpu: {error}")
'
.venv/bin/python -c "$probe"
venv=.venv-gpu
stamp=$venv/.stamp-with-vllm
if [[ ! -f $stamp || requirements-dev.txt -nt $stamp ]]; then
  rm -rf "$venv"
  .venv/bin/python -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --no-deps -r requirements-dev.txt
  for_cuda=('torch>=2.6' 'transformers>=5.19,<6')
  "$venv/bin/python" -m pip install --quiet "${for_cuda[@]}" 'vllm>=0.32,<0.33' || {
    echo "test-gpu: vLLM can't be installed here (pip's reason is above); its test is skipped" >&2
    "$venv/bin/python" -m pip install --quiet "${for_cuda[@]}"
  }
  "$venv/bin/python" -m pip install --quiet --no-build-isolation --no-deps --no-index -e .
  touch "$stamp"
fi
TRIGGERKV_GPU=1 exec "$venv/bin/python" -m pytest tests/gpu -rA "$@"
