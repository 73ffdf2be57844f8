"""A bucket as the storage of a job: the client, what goes into the bucket, and what comes back from it."""
