"""Claim the next generation, unless ranks that were given up have committed meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from spotune_trainer.checkpoint.generations import Generation, claim, is_newest, withdraw
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.driver.bucket import DriverBucket
from spotune_trainer.job_directory.layout import JobDirectory


def claim_from(
    directory: JobDirectory, bucket: DriverBucket, chosen: Checkpoint | None, corrupt: Iterable[CheckpointName]
) -> Generation | None:
    """Claim the next generation, which starts from `chosen`; None if a newer checkpoint was committed meanwhile.

    Ranks of an older generation delete nothing once they see the claim. If they had not seen it when they deleted
    `chosen`, their newer commit was there before the claim, and is found here.

    Args:
        directory: of the job.
        bucket: the driver's.
        chosen: what `choose_checkpoint` has chosen.
        corrupt: as for `choose_checkpoint`.
    """
    generation = bucket.when_reachable(lambda: claim(directory, chosen.name if chosen else None))
    bucket.refresh()
    if is_newest(directory, chosen, corrupt, generation):
        return generation
    bucket.when_reachable(lambda: withdraw(directory, generation))
    return None
