{{- define "graphkiln.labels" -}}
app.kubernetes.io/name: {{ .Release.Name }}
{{- end }}

{{- /* An image by its repository and tag; a digest is a tag, too. */ -}}
{{- define "graphkiln.image" -}}
{{ .repository }}{{ hasPrefix "sha256:" .tag | ternary "@" ":" }}{{ .tag }}
{{- end }}

{{- define "graphkiln.account" -}}
{{ .Values.serviceAccount.name | default .Release.Name }}
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

{{- /* A quantity as a number. */ -}}
{{- define "graphkiln.amount" -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- mulf (regexFind "^[0-9.]+" (toString .) | float64) (get $units (regexFind "[A-Za-z]*$" (toString .))) -}}
{{- end }}

{{- /* Of temporary files: weights that several instances share lie there, as much as they have in memory. */ -}}
{{- define "graphkiln.temporary" -}}
{{- $memory := toString .Values.resources.limits.memory -}}
{{ gt (include "graphkiln.amount" $memory | float64) (include "graphkiln.amount" "20Gi" | float64) | ternary $memory "20Gi" }}
{{- end }}

{{- /* What no schema can compare, and no API server either. */ -}}
{{- define "graphkiln.check" -}}
{{- $limits := .Values.resources.limits -}}
{{- if gt (include "graphkiln.amount" .Values.sharedMemory | float64) (include "graphkiln.amount" $limits.memory | float64) -}}
{{- fail (printf "sharedMemory is %s, more than resources.limits.memory, which is %v: what lies there counts as memory" .Values.sharedMemory $limits.memory) -}}
{{- end -}}
{{- if ge (include "graphkiln.amount" (printf "%si" .Values.artifactSize) | float64) (include "graphkiln.amount" .Values.cacheSize | float64) -}}
{{- fail (printf "artifactSize is %s, no less than cacheSize, which is %s: stores are copied there, too, and pods whose volume is full are evicted" .Values.artifactSize .Values.cacheSize) -}}
{{- end -}}
{{- range .Values.server.extraArguments -}}
{{- if and $.Values.server.adminKeySecret (hasPrefix "--admin-key-file" .) -}}
{{- fail (printf "server.extraArguments has %s, and server.adminKeySecret is %s: the key is one or the other" . $.Values.server.adminKeySecret) -}}
{{- end -}}
{{- end -}}
{{- range $name, $amount := .Values.resources.requests -}}
{{- $limit := get $limits $name -}}
{{- if and $limit (gt (include "graphkiln.amount" $amount | float64) (include "graphkiln.amount" $limit | float64)) -}}
{{- fail (printf "resources.requests.%s is %v, more than resources.limits.%s, which is %v" $name $amount $name $limit) -}}
{{- end -}}
{{- end -}}
{{- end }}
