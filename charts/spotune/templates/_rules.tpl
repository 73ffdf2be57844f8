{{/* What the operator may do in the namespaces of jobs: no Secrets, no wildcards, and no way into pods. */}}
{{- define "spotune.rulesOfNamespaces" -}}
- apiGroups: [spotune.dev]
  resources: [finetunejobs]
  verbs: [list, watch, create, patch, delete] # create and patch: trials of FinetuneSweeps; delete: their ttl
- apiGroups: [spotune.dev]
  resources: [finetunesweeps]
  verbs: [list, watch, delete] # delete: their ttl
- apiGroups: [spotune.dev]
  resources: [finetunesweeps/status]
  verbs: [patch]
- apiGroups: [spotune.dev]
  resources: [finetunejobs/status]
  verbs: [patch]
# Server-side apply asks for create where the object is not there yet, and for patch where it is.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [list, watch, create, patch]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch] # get: the claim of storage.existingClaim, which others have made
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch, create, patch]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [list, watch, create, patch, delete] # delete: a job has ended; a service replaces its first one
{{- if .Values.serving.enabled }}
- apiGroups: [spotune.dev]
  resources: [modelservices]
  verbs: [get, list, watch, create, patch, delete] # all but list and watch: spec.serving of a FinetuneJob
- apiGroups: [spotune.dev]
  resources: [modelservices/status]
  verbs: [patch]
- apiGroups: [ray.io]
  resources: [rayservices]
  verbs: [list, watch, create, patch, delete] # delete: spec.suspend gives nodes back
- apiGroups: [""]
  resources: [services]
  verbs: [list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch, create, patch, delete] # delete: a single gateway has none
- apiGroups: [networking.k8s.io]
  resources: [ingresses]
  verbs: [list, watch, create, patch, delete] # delete: where spec.ingress was removed
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [list, watch, create, patch, delete] # delete: where spec.httpRoute was removed
{{- end }}
{{- if .Values.monitoring.namespace }}
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [list, watch, create, patch]
{{- end }}
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete] # delete: pods on nodes that will never say that they are gone, or are about to go
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}

{{/* What it may do to what has no namespace; the steps of healing only where they are allowed. */}}
{{- define "spotune.rulesOfCluster" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
- apiGroups: [storage.k8s.io]
  resources: [storageclasses]
  verbs: [list, watch]
{{- with .Values.healing }}
{{- if .cordon }}
- apiGroups: [""]
  resources: [nodes]
  verbs: [patch]
{{- end }}
{{- if .drain }}
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]
{{- end }}
{{- if .deleteNode }}
- apiGroups: [""]
  resources: [nodes]
  verbs: [delete]
{{- end }}
{{- end }}
{{- end }}
