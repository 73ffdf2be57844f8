"""ModelService files that the tests of this folder modify."""

from spotune.job_file.load import parse_service
from spotune.job_file.yaml_file import Document
from spotune.service import ModelService

SERVICE_FILE = """\
apiVersion: spotune.dev/v1alpha1
kind: ModelService
metadata: {name: text-to-sql}
spec:
  model: {finetuneJob: t5-wikisql}
  adapters:
    - {name: finance, finetuneJob: t5-finance}
    - {name: sales, claim: {name: adapters, path: sales/export}}
  replicas: {min: 1, max: 3}
"""
"""A small valid service; tests break it in one place."""

FULL_SERVICE_FILE = """\
apiVersion: spotune.dev/v1alpha1
kind: ModelService
metadata: {name: answers, namespace: team, labels: {team: nlp}, annotations: {why: because}}
spec:
  model:      {name: "team/answers:v1", source: "hf://meta-llama/Llama-3.1-8B", revision: v1, finetuneJob: "",
               tokenSecretRef: {name: hf, key: token}}
  adapters:   [{name: sql, finetuneJob: sql}, {name: chat, claim: {name: exports, path: team/chat}}]
  replicas:   {min: 1, max: 4, targetOngoingRequests: 16, scaleDownDelay: 10m}
  gpus: 1
  engine: vllm
  batchInvariant: true
  capacity: mixed
  onDemandBase: 2
  resources:  {requests: {cpu: 500m}, limits: {cpu: 8, memory: 64Gi}}
  priorityClassName: serving
  serviceAccountName: reader
  podTemplate: {spec: {nodeSelector: {pool: gpu}}}
  gateway:    {replicas: 2, resources: {requests: {cpu: 1}, limits: {memory: 2Gi}}, podTemplate: {}}
  apiKeysSecretRef: {name: keys, key: keys.txt}
  requestTimeout: 5m
  rollout:    {steps: [10, 50, 100], pause: 10m,
               promoteIf: {metric: "", notWorseBy: 0.1, maxErrorRate: 0.02, minRequests: 50}}
  ingress:    {host: models.example.com, className: nginx, tlsSecretName: models-tls,
               annotations: {cert-manager.io/cluster-issuer: letsencrypt}}
  httpRoute:  {hostnames: [models.example.com], urlScheme: https, disableTimeout: true, annotations: {team: nlp},
               parentRefs: [{name: public, namespace: gateways, sectionName: https}]}
  cluster:    {provider: auto, image: "", rayVersion: "", redisAddress: "redis.team.svc:6379",
               redisPasswordSecretRef: {name: redis, key: password}}
  suspend: false
"""
"""A file with every field of a ModelService, except those of a model on a claim."""


def a_service(**sections: object) -> ModelService:
    """A small valid service with some sections of its spec replaced by the given YAML content."""
    content = {
        "apiVersion": "spotune.dev/v1alpha1",
        "kind": "ModelService",
        "metadata": {"name": "answers"},
        "spec": {"model": {"finetuneJob": "job"}} | sections,
    }
    return parse_service(Document(content))
