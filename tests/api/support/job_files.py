"""Job files that the tests of this folder modify."""

from pathlib import Path

import pytest

from spotune.job import FinetuneJob
from spotune.job_file.load import parse_job
from spotune.job_file.yaml_file import Document
from tests.command_line import run_spotune

JOB_FILE = """\
apiVersion: spotune.dev/v1alpha1
kind: FinetuneJob
metadata: {name: t5-wikisql}
spec:
  model: {source: "hf://google-t5/t5-small", task: seq2seq}
  dataset:
    train: {source: shards/train}
    eval: {fraction: 0.1, seed: 1}
  training: {epochs: 3, globalBatchSize: 96}
  workers: {count: 2, min: 1}
"""
"""A small valid job; tests break it in one place."""

FULL_JOB_FILE = """\
apiVersion: spotune.dev/v1alpha1
kind: FinetuneJob
metadata: {name: t5-wikisql, namespace: team, labels: {team: nlp}, annotations: {why: because}}
spec:
  model:      {source: "hf://google-t5/t5-3b", revision: main, task: seq2seq, dtype: bfloat16, initialise: pretrained,
               trustRemoteCode: false, tokenSecretRef: {name: hf, key: token}, tokenizer: ""}
  adapter:    {lora: {r: 16, alpha: 32, dropout: 0.05, targetModules: all-linear}, quantization: none}
  dataset:    {train: {source: "s3://bucket/wikisql/train", format: mds}, eval: {source: "s3://bucket/wikisql/eval"},
               maxLength: 512, maxCompletionLength: 128, packing: false,
               prompt: "{instruction}: {input}", completion: "{output}", keep: [database], chosen: "", rejected: "",
               label: "", labels: [], query: "", positive: "", negative: "",
               tools: "", trainOn: assistant, trainTrailingWhitespace: false, maxSkipped: 0,
               prepare: {source: "hf://datasets/me/raw", config: en, split: train},
               credentials: {secretName: bucket, endpoint: ""}}
  training:   {objective: sft, preference: {labelSmoothing: 0.0, desirableWeight: 1.0, undesirableWeight: 1.0},
               embedding: {pooling: mean, normalize: true, temperature: 0.05}, epochs: 3, maxSteps: 1000,
               globalBatchSize: 96, learningRate: 1e-4, scheduler: cosine, warmupRatio: 0.03, warmupSteps: 0,
               optimizer: adamw, adamBeta1: 0.9, adamBeta2: 0.98, adamEpsilon: 1.0e-9, muonMomentum: 0.95,
               weightDecay: 0.0, emaDecay: 0.999, maxGradNorm: 1.0, labelSmoothing: 0.1, neftuneNoiseAlpha: 5.0,
               shuffleBlockSize: 0, maxBadSteps: 5, seed: 42,
               evaluation: {everySteps: 200, generate: true, maxNewTokens: 64, samples: 500, batchSize: 16,
                            metrics: [loss, exactMatch, executionAccuracy, "my_metrics:bleu"],
                            sql: {databases: "s3://bucket/databases", column: database},
                            best: {metric: "my_metrics:bleu", mode: max}, earlyStopping: {patience: 3, minDelta: 0.01},
                            harness: {tasks: [arc_easy], everySteps: 400, includePath: /data/tasks, numFewshot: 0,
                                      limit: 100, batchSize: 8, chatTemplate: true}}}
  execution:  {microBatchSize: auto, zeroStage: auto, offload: none, gradientCheckpointing: auto,
               offloadActivations: auto, attention: auto, compile: auto, precision: auto, deterministic: true,
               reproducible: none, flopsProfile: 10}
  checkpoint: {every: 300s, keep: 2, keepEverySteps: 0, memoryCopies: auto, peerCopy: auto,
               peerCopyRate: 200}
  tracking:   {tensorboard: true, wandb: {project: x, keySecretRef: {name: wandb, key: key}},
               mlflow: {uri: "http://mlflow:5000", experiment: x}}
  output:     {hub: {repo: me/t5, private: true, strategy: end, tokenSecretRef: {name: hf, key: write}},
               export: auto, mergeAdapter: true}
  workers:    {count: 4, min: 1, gpus: 1, capacity: spot, resources: {limits: {cpu: 8, memory: 64Gi}},
               serviceAccountName: "", podTemplate: {spec: {nodeSelector: {pool: gpu}}}, resizeCooldown: 10m,
               onDemandAfter: 10m, pools: [], poolPatience: 10m, mixGpuTypes: false,
               nodeCheck: auto, onStraggler: report}
  head:       {capacity: on-demand, resources: {requests: {cpu: 500m}}, podTemplate: {}}
  storage:    {bucket: "s3://bucket/t5", credentials: {secretName: bucket, endpoint: ""},
               storageClassName: "", size: 200Gi, existingClaim: "", retain: true}
  cluster:    {provider: auto, image: "", rayVersion: "", queueName: "", queuePriorityClass: ""}
  retry:      {appFailureLimit: 3, backoff: {initial: 5s, max: 5m}, hangTimeout: 30m, maxGpuHours: 0}
  deadline: 36h
  maxCost: 120 USD
  suspend: false
  cleanup:    {cluster: delete, after: 5m}
  serving:    {name: sql, adapters: [{name: finance, finetuneJob: finance}, {name: b, claim: {name: c, path: d}}],
               replicas: {min: 0, max: 2, targetOngoingRequests: 8, scaleDownDelay: 5m},
               rollout: {steps: [10, 100], pause: 5m, promoteIf: {metric: loss, notWorseBy: 0.1, maxErrorRate: 0.01,
                         minRequests: 20}}, gpus: 1, engine: vllm,
                         batchInvariant: true, capacity: mixed, onDemandBase: 1,
               resources: {limits: {memory: 64Gi}}, priorityClassName: serving, serviceAccountName: reader,
               podTemplate: {}, gateway: {replicas: 1, resources: {requests: {cpu: 1}}, podTemplate: {}},
               apiKeysSecretRef: {name: keys, key: keys}, requestTimeout: 10m,
               ingress: {host: sql.example.com, className: "", tlsSecretName: "", annotations: {}},
               httpRoute: {hostnames: [sql.example.com], parentRefs: [{name: public, namespace: "", sectionName: ""}],
                           urlScheme: http, disableTimeout: false, annotations: {}},
               cluster: {provider: auto, image: "", rayVersion: "", redisAddress: "redis:6379",
                         redisPasswordSecretRef: {name: redis, key: password}}, suspend: false}
"""
"""A job file with every field of the API."""


def a_job(**sections: object) -> FinetuneJob:
    """A small valid job with some sections of its spec replaced by the given YAML content."""
    spec = {
        "model": {"source": "model", "task": "seq2seq"},
        "dataset": {"train": {"source": "shards"}},
        "training": {"epochs": 1},
    }
    content = {
        "apiVersion": "spotune.dev/v1alpha1",
        "kind": "FinetuneJob",
        "metadata": {"name": "job"},
        "spec": spec | sections,
    }
    return parse_job(Document(content))


def run_validate(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code of ``spotune validate`` and what it printed on standard error."""
    code, _, printed = run_spotune(capsys, "validate", *words)
    return code, printed


def check_broken_job(
    valid: str,
    broken: str,
    line: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str = JOB_FILE,
) -> None:
    """Validate the small job file, or another valid file, with one text replaced: one error line and exit code 20."""
    assert valid in text, "the test must break something"
    monkeypatch.chdir(folder)
    Path("job.yaml").write_text(text.replace(valid, broken, 1))
    code, printed = run_validate(capsys, "job.yaml")
    assert printed == f"job.yaml{line}\n"
    assert code == 20
    assert [path.name for path in folder.iterdir()] == ["job.yaml"]
