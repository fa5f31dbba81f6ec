"""Learners: a dense model, the embedding tables that feed it and their optimizers, with steps and predictions.

Training calls its steps, checkpoints hold all of its state, evaluation calls its predictions. It is code of one
process: `recmill.distributed` applies parallelism from outside.
"""
