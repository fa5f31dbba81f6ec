"""Artifacts in object storage: objects under a URL, the index that names them, a local cache, and a writer's lease."""
