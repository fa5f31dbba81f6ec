"""A learner's dense part as ONNX graphs."""
