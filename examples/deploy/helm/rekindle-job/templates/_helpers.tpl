{{- define "rekindle-job.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "rekindle-job.check" -}}
{{- if and .Values.store.existingClaim .Values.store.hostPath }}
{{- fail "store.existingClaim and store.hostPath exclude each other: set one" }}
{{- end }}
{{- if le (int .Values.terminationGracePeriodSeconds) (mul 2 (int .Values.graceSeconds)) }}
{{- fail "terminationGracePeriodSeconds must be more than twice graceSeconds: the image is stored after the final snapshot" }}
{{- end }}
{{- if and .Values.replica.credentialsSecret (not .Values.replica.url) }}
{{- fail "replica.credentialsSecret needs replica.url" }}
{{- end }}
{{- end }}

{{- define "rekindle-job.claim" -}}
{{ .Values.store.existingClaim | default (printf "%s-store" .Release.Name) }}
{{- end }}
