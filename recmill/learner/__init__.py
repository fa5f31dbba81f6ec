"""Learners: a dense model, the embedding tables that feed it and their optimizers, with steps and predictions.

Training calls steps, checkpoints hold all of its state, evaluation calls predictions. It is single-process code:
`recmill.distributed` applies parallelism from outside.
"""
