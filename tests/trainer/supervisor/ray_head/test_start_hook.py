"""`ray start` of a local head imports only what it needs."""

import subprocess
import sys

_PROGRAM = """
import sys
from spotune_trainer.supervisor.ray_head.start_hook import start_ray
try:
    start_ray()
finally:
    imported = [name for name in ("fastapi", "pandas", "ray.serve") if name in sys.modules]
    print(*imported, file=sys.stderr)
"""


def test_ray_start_does_not_import_what_other_commands_need() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "start", "--help"], capture_output=True, text=True, check=True
    )
    assert "--head" in found.stdout
    assert found.stderr.strip() == ""
