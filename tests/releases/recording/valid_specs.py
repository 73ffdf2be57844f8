"""Specs that a release accepts. `tests.releases.record` runs this file with the code of that release.

python tests/releases/recording/valid_specs.py NUMBER OUTPUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from spotune.errors import JobError
from spotune.job_file.load import parse_job, parse_service
from spotune.job_file.yaml_file import Document
from tests.operator.support.generated_specs import KINDS, generated


def is_valid(body: dict[str, Any]) -> bool:
    """Whether the release accepts an object."""
    try:
        (parse_job if body["kind"] == "FinetuneJob" else parse_service)(Document(content=body))
    except (JobError, RecursionError):
        return False
    return True


def main() -> None:
    number, output = int(sys.argv[1]), Path(sys.argv[2])
    head = {"apiVersion": "spotune.dev/v1alpha1", "metadata": {"name": "generated", "namespace": "team"}}
    bodies = [{**head, "kind": kind, "spec": spec} for kind in KINDS for spec in generated(number, kind)]
    output.write_text(json.dumps([body for body in bodies if is_valid(body)]))


if __name__ == "__main__":
    main()
