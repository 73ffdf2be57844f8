"""The trainer's commands of `spotune`, named by the entry points in pyproject.toml; light to import, all of them."""

from spotune_trainer.cli.checkpoint import checkpoint as checkpoint
from spotune_trainer.cli.predict import predict as predict
from spotune_trainer.cli.run import run as run
from spotune_trainer.cli.shard import shard as shard
from spotune_trainer.cli.supervise import supervise as supervise
