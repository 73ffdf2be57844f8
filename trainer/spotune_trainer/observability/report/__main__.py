"""Print the report of a job directory: `python -m spotune_trainer.observability.report DIR`.

This runs in a pod that has only the volume.
"""

import sys
from pathlib import Path

from spotune.errors import UsageError
from spotune_trainer.observability.report.page import report_of_directory

try:
    sys.stdout.write(report_of_directory(Path(sys.argv[1])))
except UsageError as error:
    sys.exit(str(error))
