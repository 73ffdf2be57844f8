"""Gives the training of a job on the test cluster a pace.

An endless job makes steps while faults are tried, thousands of them on a fast machine, and the undisturbed run that it
is compared with must make as many. With a pause in each step of the job, and none in the other run, both are short.
"""

from pathlib import Path
from typing import Any

from tests.proof import injected

FILES = (Path(__file__).with_name("sitecustomize.py"), Path(injected.__file__).with_name("after_import.py"))


STEP_SECONDS = 0.4


def pod_template(folder: str, step_seconds: float = STEP_SECONDS) -> dict[str, Any]:
    """A pod template of workers that run the `sitecustomize` in this folder of their volume."""
    environment = {"PYTHONPATH": folder, "SPOTUNE_TEST_STEP_SECONDS": str(step_seconds)}
    variables = [{"name": name, "value": value} for name, value in environment.items()]
    return {"spec": {"containers": [{"name": "ray-worker", "env": variables}]}}
