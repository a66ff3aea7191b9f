#!/usr/bin/env bash
# All GPU tests and the benchmark on a machine with Python and no network; the figures in one folder.
#
#   PYTHON=python3.11 tests/gpu/offline.sh WHEELS FIGURES
#
# WHEELS is what gather_wheels.sh made with the same version of Python. FIGURES gets environment/ (the
# packages), tests.txt, bench.txt and bench.json. The exit code is 0 if all tests passed or were
# skipped and the benchmark ended.
set -uo pipefail
python=${PYTHON:-python3.11}
wheels=$(realpath "$1") figures=$(realpath -m "$2")
cd "$(dirname "$0")/../.."
mkdir -p "$figures"
# pip runs from its own wheel: a bare machine may have none.
PYTHONPATH=$(echo "$wheels"/pip-*.whl) "$python" -m pip install --quiet --no-index --no-deps \
    --no-compile --upgrade --target "$figures/environment" "$wheels"/*.whl || exit
export PYTHONPATH=$figures/environment:$PWD
"$python" - <<'PYTHON' | tee "$figures/tests.txt" || exit
import platform, sys
try:
    import torch
except ImportError:
    sys.exit("torch is neither among the wheels nor in this Python: gather_wheels.sh WHEELS torch")
gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(f"Python {platform.python_version()}, torch {torch.__version__}, GPUs: {gpus or 'none'}")
PYTHON
bash tests/gpu/test.sh "$python" 2>&1 | tee -a "$figures/tests.txt"
code=$?
"$python" -m pretrain bench pile-base --json "$figures/bench.json" |
    tee "$figures/bench.txt"
exit $((code | $?))
