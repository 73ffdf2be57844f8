"""FinetuneSweep files that the tests of sweeps modify."""

from typing import Any

import yaml

from spotune.job_file.load import parse_sweep
from spotune.job_file.yaml_file import Document
from spotune.sweep import FinetuneSweep

SWEEP_FILE = """\
apiVersion: spotune.dev/v1alpha1
kind: FinetuneSweep
metadata: {name: t5-search}
spec:
  parameters:
    training.learningRate: {logUniform: [1.0e-5, 1.0e-3]}
    training.globalBatchSize: {values: [32, 64]}
    adapter.lora.r: {integer: [8, 16]}
  search: {algorithm: random, trials: 12}
  objective: {metric: loss}
  earlyStopping: {algorithm: asha, minSteps: 100}
  maxConcurrent: 4
  template:
    spec:
      model: {source: "hf://google-t5/t5-small", task: seq2seq}
      dataset: {train: {source: shards}, eval: {fraction: 0.1}, prompt: "{q}", completion: "{a}"}
      training: {epochs: 3, evaluation: {everySteps: 50}}
"""
"""A small valid sweep; tests break it in one place."""

FULL_SWEEP_FILE = """\
apiVersion: spotune.dev/v1alpha1
kind: FinetuneSweep
metadata: {name: own-search, namespace: team, labels: {team: nlp}, annotations: {why: because}}
spec:
  parameters:
    training.config.learningRate: {logUniform: [1.0e-3, 1.0e-1]}
    training.config.momentum: {uniform: [0.5, 0.99]}
    training.config.layers: {integer: [1, 4]}
    training.config.activation: {values: [relu, gelu, 3, 0.5, true]}
  search: {algorithm: tpe, trials: 20, seed: 7}
  objective: {metric: accuracy, mode: maximize}
  earlyStopping: {algorithm: asha, minSteps: 4, reductionFactor: 2}
  maxConcurrent: 3
  budget: {maxGpuHours: 40.5, maxFailedTrials: 5}
  suspend: true
  template:
    spec:
      training: {function: "train:main", code: /data/code, config: {epochs: 8}}
      workers: {count: 2, gpus: 0}
"""
"""A file with every field of a FinetuneSweep, beside its template."""


def a_sweep(name: str = "t5-search", **sections: Any) -> FinetuneSweep:
    """The small sweep with sections of its spec replaced."""
    content = yaml.safe_load(SWEEP_FILE)
    content["metadata"] = {"name": name, "namespace": "team"}
    content["spec"] |= sections
    return parse_sweep(Document(content))
