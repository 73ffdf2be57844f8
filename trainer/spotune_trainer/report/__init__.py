"""A job as one HTML page: what was trained, how it went, and where the time went. Read from the job's folder alone."""
