"""Stage: recipe -> manifests, charts, Dockerfiles."""
