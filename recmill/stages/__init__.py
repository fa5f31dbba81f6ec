"""The stages: one package for each verb, its body in `<stage>/<stage>.py`. Stages never import each other."""
