"""Compiles the modules of an image that have no bytecode yet, to the same bytes in every build.

python3 -S -B compile_bytecode.py /opt/spotune/lib

One process compiles them in one order: what the compiler has interned is part of the bytecode. Python does not compare
the times of these files with those of the modules, as all files of an image have the same.
"""

import py_compile
import sys
from importlib.util import cache_from_source
from pathlib import Path

for module in sorted(Path(sys.argv[1]).rglob("*.py")):
    if not Path(cache_from_source(str(module))).exists():
        # A package may have modules of another Python, as templates; these stay as they are.
        py_compile.compile(str(module), quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
