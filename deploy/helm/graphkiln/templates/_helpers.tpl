{{- define "graphkiln.labels" -}}
app.kubernetes.io/name: {{ .Release.Name }}
{{- end }}

{{- define "graphkiln.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "graphkiln.claim" -}}
{{ .Values.store.volume.claim | default (printf "%s-models" .Release.Name) }}
{{- end }}

{{- /* Seconds until the port must be open: a remote store is copied before. */ -}}
{{- define "graphkiln.window" -}}
{{ add .Values.server.loadDeadline 60 (eq .Values.store.kind "remote" | ternary .Values.store.remote.copyDeadline 0) }}
{{- end }}

{{- define "graphkiln.behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - {type: Percent, value: 100, periodSeconds: 30}
    - {type: Pods, value: 2, periodSeconds: 30}
  selectPolicy: Max
scaleDown:
  stabilizationWindowSeconds: 300
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end }}
