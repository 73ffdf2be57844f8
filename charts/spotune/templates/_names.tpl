{{/* Name of the Deployment and of what goes with it. */}}
{{- define "spotune.name" -}}
{{- .Values.fullnameOverride | default (printf "%s-operator" .Release.Name) | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{/* Name of the ServiceAccount. */}}
{{- define "spotune.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "spotune.name" .) "default") -}}
{{- end }}

{{/* By which the Deployment knows its pods, and the NetworkPolicies of jobs who may ask for progress. */}}
{{- define "spotune.selector" -}}
app.kubernetes.io/name: spotune
app.kubernetes.io/component: operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "spotune.labels" -}}
{{ include "spotune.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "spotune.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end }}
