"""The Ray head that drivers run in: a private one on this machine, or the one of a cluster, and its Jobs API."""
