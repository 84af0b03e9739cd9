"""The compiler that Triton wants beside a driver, and never calls under TRITON_INTERPRET=1."""

# pyright: reportMissingImports=false
# Runs in vLLM's environment, whose packages the project's has not.

from triton.backends.compiler import BaseBackend


class Interpreter(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreted"

    def parse_options(self, options):
        return options

    def add_stages(self, stages, options, *arguments):
        raise NotImplementedError("nothing is compiled: set TRITON_INTERPRET=1")

    def load_dialects(self, context):
        raise NotImplementedError("nothing is compiled: set TRITON_INTERPRET=1")

    def get_module_map(self):
        return {}
