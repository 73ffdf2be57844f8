"""The trainer's commands of `spotune`: run, supervise, shard, predict and checkpoint."""
