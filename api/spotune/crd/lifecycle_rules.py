"""CEL rules about what happens after a job has ended."""

from typing import Final

from spotune.crd.cel_rules import Rule
from spotune.job.lifecycle import TTL_ENDS_SERVING

LIFECYCLE_RULES: Final = (
    Rule("!has(self.ttlSecondsAfterFinished) || !has(self.serving)", TTL_ENDS_SERVING, "ttlSecondsAfterFinished"),
)
