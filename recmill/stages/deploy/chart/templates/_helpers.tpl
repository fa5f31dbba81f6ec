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
{{- if and (eq .Values.storage.access "ReadWriteOnce") (gt $most 1) (not .Values.publish.url) -}}
  {{- fail (printf "storage.access=ReadWriteOnce needs serve.max_replicas of 1, got %d" $most) -}}
{{- end -}}
{{- if and .Values.serve.split (not .Values.recipe.can_split) -}}
  {{- fail "serve.split must be false for this recipe: its features and ranking cannot run apart" -}}
{{- end -}}
{{- if and .Values.publish.url (ne .Values.storage.kind "none") -}}
  {{- fail "storage.kind must be none with publish.url: servers mount nothing" -}}
{{- end -}}
{{- if and .Values.redis.enabled (not .Values.recipe.can_use_redis) -}}
  {{- fail "redis.enabled must be false for this recipe: it scores rows, without users and items" -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Labels of all pods of this release, whatever their component. */}}
{{- define "recmill.instance" -}}
app.kubernetes.io/name: recmill
app.kubernetes.io/instance: {{ include "recmill.name" . | quote }}
{{- end -}}

{{/* Labels that never change, by which a Service finds its pods. Called with (list . "component"). */}}
{{- define "recmill.selector" -}}
{{ include "recmill.instance" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "recmill.labels" -}}
{{ include "recmill.selector" . }}
app.kubernetes.io/part-of: recmill
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end -}}

{{/* Not empty when servers ask for tokens: clients from outside of the cluster always need one. */}}
{{- define "recmill.tokens" -}}
{{- if or .Values.serve.token_secret .Values.serve.ingress.host .Values.serve.node_port -}}
{{- .Values.serve.token_secret | default (printf "%s-tokens" (include "recmill.name" .)) -}}
{{- end -}}
{{- end -}}

{{- define "recmill.redisSecret" -}}
{{- .Values.redis.auth_secret | default (printf "%s-redis" (include "recmill.name" .)) -}}
{{- end -}}

{{- define "recmill.redisUrl" -}}
{{- if eq (int .Values.redis.replicas) 1 -}}
redis://:$(REDIS_PASSWORD)@{{ include "recmill.name" . }}-redis:6379
{{- else -}}
{{- $sentinels := list -}}
{{- range splitList " " (include "recmill.redisPeers" .) -}}
  {{- $sentinels = append $sentinels (printf "%s:26379" .) -}}
{{- end -}}
redis+sentinel://:$(REDIS_PASSWORD)@{{ join "," $sentinels }}/features?sentinel_password=$(REDIS_PASSWORD)
{{- end -}}
{{- end -}}

{{/* The name of each replica. */}}
{{- define "recmill.redisPeers" -}}
{{- $redis := printf "%s-redis" (include "recmill.name" .) -}}
{{- range $number := until (int .Values.redis.replicas) -}}
{{- if $number }} {{ end }}{{ $redis }}-{{ $number }}.{{ $redis }}
{{- end -}}
{{- end -}}

{{- define "recmill.redisPorts" -}}
[{protocol: TCP, port: 6379}{{ if gt (int .Values.redis.replicas) 1 }}, {protocol: TCP, port: 26379}{{ end }}]
{{- end -}}

{{/* Fields of every pod: not root, no token of the cluster. */}}
{{- define "recmill.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: 60
{{- with .Values.image.pull_secret }}
imagePullSecrets: [{name: {{ . | quote }}}]
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 .Values.user }}
  runAsGroup: {{ int64 .Values.group }}
  fsGroup: {{ int64 .Values.group }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "recmill.containerSecurity" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end -}}

{{- define "recmill.serverResources" -}}
requests: {cpu: {{ .Values.serve.cpus | quote }}, memory: {{ .Values.serve.memory | quote }}}
limits: {cpu: {{ .Values.serve.cpus | quote }}, memory: {{ .Values.serve.memory | quote }}}
{{- end -}}

{{/* An init container: there is nothing to serve before a first bundle is published. */}}
{{- define "recmill.firstBundle" -}}
- name: first-bundle
  image: {{ .Values.image.serve | quote }}
  imagePullPolicy: {{ .Values.image.pull_policy }}
  command: [recmill, bundle, wait, {{ include "recmill.bundle" . | quote }}]
  {{- include "recmill.credentials" . | nindent 2 }}
  env:
    {{- include "recmill.env" . | nindent 4 }}
  resources:
    {{- include "recmill.serverResources" . | nindent 4 }}
  securityContext: {{ include "recmill.containerSecurity" . }}
  volumeMounts:
    {{- include "recmill.mounts" . | nindent 4 }}
{{- end -}}

{{- define "recmill.bundle" -}}
{{- .Values.publish.url | default "/runs/bundle" -}}
{{- end -}}

{{- define "recmill.credentials" -}}
{{- with .Values.publish.secret -}}
envFrom: [{secretRef: {name: {{ . | quote }}}}]
{{- end -}}
{{- end -}}

{{/* What reads bundles: from a volume, or from a URL by way of a cache. */}}
{{- define "recmill.env" -}}
- {name: HOME, value: /tmp}
- {name: USER, value: recmill}
{{- if .Values.publish.url }}
- {name: RECMILL_CACHE, value: /var/cache/recmill}
{{- end -}}
{{- end -}}

{{- define "recmill.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.publish.url }}
- {name: cache, mountPath: /var/cache/recmill}
{{- else }}
- {name: runs, mountPath: /runs, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "recmill.volumes" -}}
- {name: tmp, emptyDir: {sizeLimit: 2Gi}}
{{- if .Values.publish.url }}
- {name: cache, emptyDir: {sizeLimit: {{ .Values.publish.cache | quote }}}}
{{- else }}
- {name: runs, persistentVolumeClaim: {claimName: {{ include "recmill.name" . }}-runs}}
{{- end -}}
{{- end -}}

{{- define "recmill.toDns" -}}
- to: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: kube-system}}}]
  ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]
{{- end -}}
