{{/* The operator's settings as variables; it refuses names that it does not know. */}}
{{- define "spotune.environment" -}}
{{- $found := dict -}}
{{- if and .Values.healing.drain (not .Values.healing.cordon) }}
{{- fail "healing.drain needs healing.cordon, or the pods come back to the same node" }}
{{- end }}
{{- if and .Values.healing.deleteNode (not .Values.healing.drain) }}
{{- fail "healing.deleteNode needs healing.drain, or pods lose their node without a notice" }}
{{- end }}
{{- if and .Values.watchNamespaces (or .Values.healing.drain .Values.healing.restartDevicePlugin) }}
{{- fail "healing.drain and healing.restartDevicePlugin take pods of any namespace: leave watchNamespaces empty" }}
{{- end }}
{{- $currencies := dict }}
{{- range .Values.prices }}
{{- $_ := set $currencies (splitList " " .price | last) true }}
{{- with .onDemandPrice }}{{ $_ := set $currencies (splitList " " . | last) true }}{{ end }}
{{- end }}
{{- if gt (len $currencies) 1 }}
{{- fail (printf "prices have several currencies (%s): use one" (keys $currencies | sortAlpha | join ", ")) }}
{{- end }}
{{- range $name, $value := .Values.settings }}
{{- $_ := set $found (snakecase $name | upper) $value }}
{{- end }}
{{- range $name, $value := .Values.healing }}
{{- if $value }}
{{- $_ := set $found (printf "HEAL_%s" (snakecase $name | upper)) $value }}
{{- end }}
{{- end }}
{{- with .Values.trainer.image }}{{ $_ := set $found "IMAGE" . }}{{ end }}
{{- with .Values.trainer.rayVersion }}{{ $_ := set $found "RAY_VERSION" . }}{{ end }}
{{- if .Values.serving.enabled }}{{ $_ := set $found "SERVING" true }}{{ end }}
{{- with .Values.serving.image }}{{ $_ := set $found "SERVE_IMAGE" . }}{{ end }}
{{- with .Values.serving.vllmImage }}{{ $_ := set $found "SERVE_VLLM_IMAGE" . }}{{ end }}
{{- with .Values.prices }}{{ $_ := set $found "PRICES" (toJson .) }}{{ end }}
{{- with .Values.watchNamespaces }}{{ $_ := set $found "WATCH_NAMESPACES" (join "," .) }}{{ end }}
{{- if .Values.monitoring.namespace }}{{ $_ := set $found "MONITORING_NAMESPACE" .Values.monitoring.namespace }}{{ end }}
{{- if .Values.notifications }}
{{- $targets := list }}
{{- range $index, $item := .Values.notifications }}
{{- $target := omit $item "secretRef" }}
{{- $_ := set $target "name" $item.secretRef.name }}
{{- $_ := set $target "urlFile" (printf "/etc/spotune/notifications/%d/url" $index) }}
{{- $targets = append $targets $target }}
{{- end }}
{{- $_ := set $found "NOTIFICATIONS" (toJson $targets) }}
{{- end }}
{{- range $name, $value := $found -}}
- name: SPOTUNE_OPERATOR_{{ $name }}
  value: {{ $value | toString | quote }}
{{ end }}
{{- end }}
