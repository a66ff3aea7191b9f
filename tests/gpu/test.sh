#!/usr/bin/env bash
# All tests of this folder: several at a time, then speed by itself.
#
#   tests/gpu/test.sh [PYTHON]
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3.11}
# pytest-benchmark, where a machine has it, warns of xdist, and warnings are errors.
export ZEROCLAP_TEST_DEVICE=${ZEROCLAP_TEST_DEVICE:-cuda}
"$python" -m pytest -p no:benchmark -n 8 -rsP -m "gpu and not alone" tests/gpu
first=$?
"$python" -m pytest -p no:benchmark -rsP -m "gpu and alone" tests/gpu
exit $((first | $?))
