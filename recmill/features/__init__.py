"""The implementation of feature steps, the Plan, and the native kernels below them."""
