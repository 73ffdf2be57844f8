"""The controller of FinetuneSweeps: starts trials as FinetuneJobs, compares them, and prunes the worse ones."""
