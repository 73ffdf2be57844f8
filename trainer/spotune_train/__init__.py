"""Exact resumption and truthful progress for training functions of your own (`training.function`).

Each part works alone, and beside Ray Train's own functions:

- `checkpoint.save` and `checkpoint.latest`: complete, verified checkpoints of any state.
- `samples`: the samples of each step, the same whenever training resumes and with any number of workers.
- `report`: progress, which status, ETA, goodput and the detection of hangs rely on.
- `notice`: seconds until the worker group has to leave.
"""

from spotune_train import checkpoint
from spotune_train.progress import notice, report
from spotune_train.sampling import Samples, samples

__all__ = ["Samples", "checkpoint", "notice", "report", "samples"]
