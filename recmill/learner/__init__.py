"""What learns: a dense model, the embedding tables that feed it and their optimizers, with steps and predictions.

Training takes it step by step, checkpoints hold all of it, evaluation asks it for predictions.
"""
