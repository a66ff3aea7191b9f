#!/usr/bin/env bash
# Gather what offline.sh needs on a machine without network: a folder of wheels.
#
#   PYTHON=python3.11 tests/gpu/gather_wheels.sh WHEELS [torch]
#
# PYTHON is of the version that the machine has. With the word torch the folder also gets torch and
# its CUDA libraries, several gigabytes, for a machine whose Python has no torch.
set -euo pipefail
python=${PYTHON:-python3.11}
wheels=$1
constraints=$(dirname "$0")/../../constraints.txt
mkdir -p "$wheels"
# Every package by its tested version. Wheels are built here of those that are published as source.
others=$(mktemp)
trap 'rm "$others"' EXIT
grep -v '^torch==' "$constraints" > "$others"
"$python" -m pip wheel --no-deps --wheel-dir "$wheels" --requirement "$others" pip setuptools
if [ "${2:-}" = torch ]; then
    "$python" -m pip wheel --constraint "$constraints" --wheel-dir "$wheels" torch
fi
