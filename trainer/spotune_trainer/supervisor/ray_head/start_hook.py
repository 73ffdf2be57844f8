"""`ray start` of a local head, without the commands and services that one job does not need.

A full head starts an autoscaler, a Ray Client server and a dashboard of nine processes; the Jobs API needs two of
these. Without the others a head is ready in half the time (4.3 s instead of 8.4 s on 2 cores) and uses less memory.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ray._private import services

if TYPE_CHECKING:
    from ray._private.parameter import RayParams

DASHBOARD_MODULES = ("JobHead", "NodeHead")
"""The Jobs API, and the module that gives it the address of the head node."""
_OTHER_COMMANDS = ("ray.dashboard.modules.job.cli", "ray.serve.scripts", "ray.util.state.state_cli")
"""Groups of Ray's commands whose imports (FastAPI, pandas) take longer than all that `ray start` needs."""


def start_ray() -> None:
    """The command `ray`, with the arguments of this process."""
    # Importing a module that is None here raises ImportError, and Ray leaves out commands that it cannot import.
    sys.modules.update(dict.fromkeys(_OTHER_COMMANDS))  # type: ignore[arg-type]
    from ray.scripts.scripts import main

    main()


def start_only_needed_services(parameters: RayParams, head: bool) -> None:
    """RAY_START_HOOK: change the parameters that `ray start` is about to use; Ray calls this."""
    if not head:
        return
    parameters.no_monitor = True
    parameters.ray_client_server_port = None
    start_process = services.start_ray_process

    def start_with_fewer_modules(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        if process_type == "dashboard":
            command = [*command, f"--modules-to-load={','.join(DASHBOARD_MODULES)}"]
        return start_process(command, process_type, *args, **kwargs)

    services.start_ray_process = start_with_fewer_modules
