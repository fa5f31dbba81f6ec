"""serve: Bundle -> answers, in process and over gRPC and HTTP. Nothing here knows how models are trained."""
