"""The kopf operator: reconciles FinetuneJobs into storage and RayClusters. Never imports torch or ray."""
