"""A Triton backend that is there and compiles nothing: kernels run in Triton's interpreter, on tensors in memory."""
