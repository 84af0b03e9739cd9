"""Docker or Podman, as far as Harbor does not speak for it: a container's limits, its process, and what was left behind."""

from __future__ import annotations

import asyncio
from typing import Any

from pipeline.harnesses.workspaces.base import Spec, WorkspaceFailed

_PROJECT = "com.docker.compose.project"
_KINDS = (
    (("ps", "--all", "--quiet"), ("rm", "--force", "--volumes")),
    (("network", "ls", "--quiet"), ("network", "rm")),
    (("volume", "ls", "--quiet"), ("volume", "rm", "--force")),
    (("image", "ls", "--quiet"), ("image", "rm", "--force")),
)
"""How things of a kind are listed, and removed: in an order in which none is in use."""
_MAIN = "main"
"""Harbor's name of the service that is the sandbox; its image is PROJECT-main."""


class Engine:
    """`environment` is Harbor's class, which knows the engine's command line."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def overlay(self, spec: Spec, network: bool) -> dict[str, Any]:
        """What a compose file adds to Harbor's own for the sandbox."""
        service: dict[str, Any] = {
            "environment": {key: _plain(value) for key, value in spec.env.items()},
            "memswap_limit": max(1, spec.limits.memory_bytes >> 20) << 20,
            "pids_limit": spec.limits.processes,
            # Its first process sleeps, and would be waited for.
            "stop_signal": "SIGKILL",
            "volumes": [
                {
                    "type": "bind",
                    "source": _plain(str(mount.source.absolute())),
                    "target": _plain(mount.target),
                    "read_only": True,
                    "bind": {"create_host_path": False},
                }
                for mount in spec.mounts
            ],
        }
        if not network:
            service["network_mode"] = "none"
        return {"services": {_MAIN: service}}

    async def process(self, project: str) -> tuple[int, str]:
        """(number of its first process on the engine's machine, id) of a project's sandbox."""
        names = await self._say("ps", "--quiet", "--no-trunc", *_of(project))
        container = names.split()[0] if names else ""
        told = await self._say("inspect", "--format", "{{.State.Pid}}", container) if container else ""
        if not told.strip().isdigit() or told.strip() == "0":
            raise WorkspaceFailed(f"the container of {project} does not run")
        return int(told), container

    async def projects(self) -> set[str]:
        """Compose projects that have a container, a network or an image here."""
        label = ("--filter", f"label={_PROJECT}", "--format")
        said = await self._say("ps", "--all", *label, f'{{{{.Label "{_PROJECT}"}}}}')
        said += await self._say("network", "ls", *label, f'{{{{.Label "{_PROJECT}"}}}}')
        images = (await self._say("image", "ls", *label, "{{.Repository}}")).split()
        return {*said.split(), *(image.rpartition("/")[2].removesuffix(f"-{_MAIN}") for image in images)}

    async def remove(self, project: str) -> None:
        """Removes whatever there is of a project."""
        for find, remove in _KINDS:
            found = (await self._say(*find, *_of(project))).split()
            if found:
                await self._say(*remove, *dict.fromkeys(found))

    async def _say(self, *arguments: str) -> str:
        command = self._environment.runtime().engine_cmd(*arguments)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, error = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            raise
        if process.returncode:
            said = error.decode(errors="replace").strip()[-500:]
            raise WorkspaceFailed(f"`{' '.join(command)}` exited with {process.returncode}: {said}")
        return out.decode(errors="replace")


def _of(project: str) -> tuple[str, str]:
    return "--filter", f"label={_PROJECT}={project}"


def _plain(text: str) -> str:
    """As a compose file says it: there `$` starts a variable."""
    return text.replace("$", "$$")
