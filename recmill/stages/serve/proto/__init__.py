"""The gRPC protocols.

Our own calls are in recmill.proto, the Open Inference Protocol in predict_v2.proto, TensorFlow Serving in
tensorflow_serving.proto. The *_pb2.py files are generated: `python -m recmill.stages.serve.proto.generate` writes
them again.
"""

from __future__ import annotations

from google.protobuf.descriptor_pool import DescriptorPool

# A client of the same protocol defines messages of the same names. A separate pool lets both live in one process.
INFERENCE_POOL = DescriptorPool()
