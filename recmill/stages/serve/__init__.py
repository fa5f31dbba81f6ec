"""serve: Bundle -> answers, in process and over gRPC and HTTP. Imports nothing that trains models."""
