"""A job whose data tests put in, for the commands that read raw rows."""

JOB = """\
apiVersion: spotune.dev/v1alpha1
kind: FinetuneJob
metadata: {name: sql}
spec:
  model: {source: model, initialise: random}
  dataset:
    prompt: "{q}"
    completion: "{a}"
    DATA
  training: {epochs: 1}
"""
"""`DATA` stands for the fields that name the data."""
