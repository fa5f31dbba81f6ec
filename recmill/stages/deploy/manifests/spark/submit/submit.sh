#!/bin/sh
# Submits without the Spark operator: KUBERNETES_API=https://HOST:PORT sh submit.sh
# The API server's address: kubectl config view --minify --output jsonpath='{.clusters[0].cluster.server}'
cd "$(dirname "$0")" || exit 1
exec spark-submit --master "k8s://${KUBERNETES_API:?is missing}" --deploy-mode cluster --properties-file spark.conf \
  local:///etc/recmill-spark/main.py ${shell_arguments}
