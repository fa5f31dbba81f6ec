#!/bin/sh
# Submits without the Spark operator: KUBERNETES_API=https://HOST:PORT sh submit.sh
# The API server's address: kubectl config view --minify --output jsonpath='{.clusters[0].cluster.server}'
cd "$(dirname "$0")" || exit 1
exec spark-submit --master "k8s://${KUBERNETES_API:?is missing}" --deploy-mode cluster --properties-file spark.conf \
  local:///etc/recmill-spark/main.py prepare quickstart --data /data --into /runs/table --engine spark --address k8s://https://kubernetes.default.svc --memory 256MB --spark-conf spark.executor.memoryOverhead=1112m
