#!/bin/sh
# Installs packages into /opt/spotune, to the same bytes in every build. Takes the arguments of `uv pip install`.
set -eu
uv pip install --quiet --python /opt/spotune --no-deps "$@"
# uv notes beside a wheel's files when the wheel was made.
find /opt/spotune/lib -name uv_cache.json | while read -r note; do
    rm "$note"
    sed --in-place '/uv_cache\.json/d' "${note%/*}/RECORD"
done
PYTHONHASHSEED=0 python3 -S -B /images/compile_bytecode.py /opt/spotune/lib
