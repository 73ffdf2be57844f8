"""The trainer's commands of `spotune`, named by the entry points in pyproject.toml; light to import, all of them."""

from spotune_trainer.cli_checkpoint import checkpoint as checkpoint
from spotune_trainer.cli_predict import predict as predict
from spotune_trainer.cli_run import run as run
from spotune_trainer.cli_shard import shard as shard
from spotune_trainer.cli_supervise import supervise as supervise
