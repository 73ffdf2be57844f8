"""`spotune doctor`: whether a cluster is fit for FinetuneJobs, what is missing, and how to mend it."""
