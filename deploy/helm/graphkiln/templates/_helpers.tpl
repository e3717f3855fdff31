{{- define "graphkiln.labels" -}}
app.kubernetes.io/name: {{ .Release.Name }}
{{- end }}

{{- define "graphkiln.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "graphkiln.claim" -}}
{{ .Values.store.volume.claim | default (printf "%s-models" .Release.Name) }}
{{- end }}
