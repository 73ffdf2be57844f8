"""Job files whose optimizer does not fit the rest of the job."""

from __future__ import annotations

WORKERS = "  workers: {count: 2, min: 1}\n"

# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
WRONG_OPTIMIZERS = [
    (
        "an optimizer that there is not",
        "epochs: 3",
        "epochs: 3, optimizer: schedule_free_adam",
        (
            ":9: spec.training.optimizer: expected adamw, adamw8bit, schedule_free_adamw, muon or adafactor, not "
            '"schedule_free_adam"; did you mean schedule_free_adamw?'
        ),
    ),
    (
        "a falling learning rate for schedule-free",
        "epochs: 3",
        "epochs: 3, optimizer: schedule_free_adamw",
        (
            ":9: spec.training.scheduler: linear contradicts schedule_free_adamw, which replaces a falling learning "
            "rate: use constant or constant_with_warmup"
        ),
    ),
    (
        "schedule-free without an average",
        "epochs: 3",
        "epochs: 3, optimizer: schedule_free_adamw, scheduler: constant, adamBeta1: 0",
        ":9: spec.training.adamBeta1: must be more than 0 for schedule_free_adamw: its average would have no effect",
    ),
    (
        "a moving average of an average",
        "epochs: 3",
        "epochs: 3, optimizer: schedule_free_adamw, scheduler: constant, emaDecay: 0.999",
        ":9: spec.training.emaDecay: is not supported for schedule_free_adamw, which averages the weights: remove it",
    ),
    (
        "a moving average that never changes",
        "epochs: 3",
        "epochs: 3, emaDecay: 1",
        ":9: spec.training.emaDecay: expected less than 1, not 1",
    ),
    (
        "Muon's momentum without Muon",
        "epochs: 3",
        "epochs: 3, muonMomentum: 0.9",
        ":9: spec.training.muonMomentum: is only used by muon; optimizer is adamw",
    ),
    (
        "AdamW's hyperparameters for Adafactor",
        "epochs: 3",
        "epochs: 3, optimizer: adafactor, adamBeta2: 0.95",
        ":9: spec.training.adamBeta2: is not used by adafactor: remove it",
    ),
    (
        "Muon where matrices are cut",
        "epochs: 3, globalBatchSize: 96}\n",
        "epochs: 3, globalBatchSize: 96, optimizer: muon}\n  execution: {zeroStage: 3}\n",
        (":10: spec.execution.zeroStage: 3 cuts every matrix, but muon updates whole matrices: use auto or at most 2"),
    ),
    (
        "Adafactor in host memory",
        "epochs: 3, globalBatchSize: 96}\n",
        "epochs: 3, globalBatchSize: 96, optimizer: adafactor}\n  execution: {offload: optimizer}\n",
        (
            ":10: spec.execution.offload: optimizer is not supported for adafactor: use none, or another "
            "training.optimizer"
        ),
    ),
    (
        "Muon for an adapter",
        "epochs: 3, globalBatchSize: 96}\n",
        "epochs: 3, globalBatchSize: 96, optimizer: muon}\n  adapter: {lora: {}}\n",
        (
            ":9: spec.training.optimizer: muon is for whole weight matrices, not for those of an adapter: use another "
            "optimizer"
        ),
    ),
]
