"""The pools of a job: the choice between them, its memory in the status, and pools that no node matches."""
