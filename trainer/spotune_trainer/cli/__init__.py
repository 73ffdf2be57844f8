"""The trainer's commands of `spotune`: init, run, supervise, data, shard, predict and checkpoint."""
