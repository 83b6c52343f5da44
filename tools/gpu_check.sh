#!/usr/bin/env bash
# Runs all checks of tests/gpu on one card and ends with a table of them, also where some fail, and the same as JSON.
#   tools/gpu_check.sh [--wheels DIR] [--json FILE] [--dry-run] [NAME ...]
# NAME picks files: `tools/gpu_check.sh attention speed`. --dry-run runs the same code on CPU at toy sizes and says nothing of a card.
# Exit codes: 0 all passed, 1 a check failed, 2 something it needs is missing.
#
# Needs PyTorch for CUDA (2.11 or later), pytest, numpy and packaging, and these wheels, which --wheels installs from DIR, without
# an index, into a folder of their own that lasts as long as the checks:
#   megatron-core==0.16.1 pydantic pydantic-core annotated-types typing-inspection typing-extensions
# Rows on Transformer Engine say "not installed" without it; the float64 parity row wants transformers.
# PYTHON picks the interpreter; it is .venv's, or else python3.
set -uo pipefail
cd "$(dirname "$0")/.."
wheels= json=gpu_check.json names=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=${2:?--wheels needs a folder}; shift ;;
        --json) json=${2:?--json needs a file}; shift ;;
        --dry-run) export MEGATRON_ARPO_GPU_CHECKS=cpu-dry-run ;;
        -*) echo "gpu_check: unknown option $1" >&2; exit 2 ;;
        *) names+=("tests/gpu/test_$1.py") ;;
    esac
    shift
done
[ ${#names[@]} -gt 0 ] || names=(tests/gpu/test_*.py)
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -n "$wheels" ]; then
    "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" \
        "$wheels"/*.whl || exit 2
    export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$python" -c '
import importlib.util, sys
missing = [name for name in ("torch", "pytest", "numpy", "packaging", "pydantic", "megatron") if importlib.util.find_spec(name) is None]
sys.exit("gpu_check: missing in this Python: " + ", ".join(missing) + "; see the head of tools/gpu_check.sh" if missing else 0)
' || exit 2
if [ -z "${MEGATRON_ARPO_GPU_CHECKS:-}" ]; then
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        { echo "gpu_check: PyTorch sees no CUDA device; --dry-run runs the code on CPU" >&2; exit 2; }
fi

export MEGATRON_ARPO_GPU_ROWS=$work/rows.jsonl
for file in "${names[@]}"; do
    echo "== $file"
    "$python" -m pytest "$file" -m gpu --tb=short -rN --timeout=1500
    code=$?
    # 0 passed, 1 failed checks that are rows already; all else left none
    [ $code -le 1 ] || printf '{"name": "%s", "value": null, "bound": "", "verdict": "FAIL", "note": "its process ended with %s"}\n' \
        "$file" $code >> "$MEGATRON_ARPO_GPU_ROWS"
done
echo
"$python" -m tests.gpu.rows "$MEGATRON_ARPO_GPU_ROWS" "$json"
