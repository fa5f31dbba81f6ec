{{/* What every name begins with: `name`, or else the release's. Values that do not go together end here. */}}
{{- define "recmill.name" -}}
{{- $name := .Values.name | default .Release.Name -}}
{{- $least := int .Values.serve.replicas -}}
{{- $most := int .Values.serve.max_replicas -}}
{{- $target := int .Values.serve.hpa.target -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$" $name) -}}
  {{- $expected := "lower-case letters, digits and -, from a letter on, at most 40 characters" -}}
  {{- fail (printf "name must be %s, got %s. Add --set name=..." $expected $name) -}}
{{- end -}}
{{- if lt $most $least -}}
  {{- fail (printf "serve.max_replicas must be at least serve.replicas (%d), got %d" $least $most) -}}
{{- end -}}
{{- if and (eq .Values.serve.hpa.metric "cpu") (gt $target 100) -}}
  {{- fail (printf "serve.hpa.target must be a percentage with serve.hpa.metric=cpu, got %d" $target) -}}
{{- end -}}
{{- if and (eq .Values.storage.access "ReadWriteOnce") (gt $most 1) -}}
  {{- fail (printf "storage.access=ReadWriteOnce wants serve.max_replicas of 1, got %d" $most) -}}
{{- end -}}
{{- $name -}}
{{- end -}}
