"""`spotune doctor`: checks whether a cluster can run FinetuneJobs, and says how to fix what is missing."""
