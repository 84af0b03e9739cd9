"""The driver that Triton asks for its device: the CPU, always there."""

# pyright: reportMissingImports=false
# Runs in vLLM's environment, whose packages the project's has not.

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class Interpreted(DriverBase):
    def __init__(self):
        # The base class would build a compiler's tools.
        pass

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cpu", 0, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError("nothing is compiled: set TRITON_INTERPRET=1")

    def get_benchmarker(self):
        raise NotImplementedError("nothing is measured here")
