"""The language that operator and trainer share: FinetuneJob, plan arithmetic, retry policy, command line; all light."""
