"""Feature steps at work, the Plan, and the native kernels below them."""
