"""What goes over gRPC: our own calls (recmill.proto), the Open Inference Protocol (predict_v2.proto) and
TensorFlow Serving (tensorflow_serving.proto).

The *_pb2.py files are generated: `python -m recmill.stages.serve.proto.generate` writes them again.
"""

from __future__ import annotations

from google.protobuf.descriptor_pool import DescriptorPool

# Clients of the same protocol bring messages of the same names. A pool of its own lets both live in one process.
INFERENCE_POOL = DescriptorPool()
