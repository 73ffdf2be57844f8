"""Reads the code of the user from `training.codeFrom`: a git repository, an archive or a ConfigMap."""
