"""The observed state: caches of objects, and the progress of the supervisors."""
