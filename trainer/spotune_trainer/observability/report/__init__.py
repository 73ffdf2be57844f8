"""The HTML report of a job: what was trained, how it went, where the time went. Reads only the job's folder."""
