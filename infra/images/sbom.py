"""Bills of materials of the images that are here: `python infra/images/sbom.py FOLDER`, a CycloneDX file an image.

Of each image: the Python packages that pip says it has (kept in it when it is built), Debian's packages, and the npm packages of its
scaffold, each with a package URL. The licence is told where the package tells it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

# Runs in the image, of which it needs no more than a Python.
INSIDE = """
import json, pathlib, subprocess
npm = []
for path in pathlib.Path("/opt/scaffolds").glob("*/node_modules/**/package.json"):
    try:
        found = json.loads(path.read_text())
    except (ValueError, OSError):
        continue
    if "node_modules" in path.parent.parent.parts[-2:] and found.get("name") and found.get("version"):
        npm.append([found["name"], found["version"], found.get("license")])
pypi = []
for meta in pathlib.Path("/opt/scaffolds").glob("*/lib/python3*/site-packages/*.dist-info/METADATA"):
    name, version = meta.parent.name.removesuffix(".dist-info").split("-", 1)
    pypi.append([name, version])
dpkg = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture}\\\\n"], capture_output=True, text=True)
print(json.dumps({"pip": json.loads(pathlib.Path("/opt/packtrain/packages.json").read_text()), "npm": npm, "pypi": pypi,
                  "dpkg": [line.split() for line in dpkg.stdout.splitlines()]}))
"""


def main(folder: Path) -> None:
    listed = docker(
        "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", "--filter", "reference=packtrain/*"
    )
    images = sorted(set(listed.split()))
    if not images:
        sys.exit("no image of packtrain is here: make images")
    folder.mkdir(parents=True, exist_ok=True)
    for image in images:
        bill = of_image(image)
        path = folder / f"{image.removeprefix('packtrain/').replace(':', '-')}.json"
        path.write_text(json.dumps(bill, indent=1))
        print(f"{path}: {len(bill['components'])} components")


def of_image(image: str) -> dict[str, Any]:
    entry = ("run", "--rm", "--network", "none", "--entrypoint", "/opt/packtrain/bin/python", image)
    found = json.loads(docker(*entry, "-c", INSIDE))
    parts = [of_package(each["metadata"]) for each in found["pip"]["installed"]]
    parts += [component("pypi", name, version) for name, version in found["pypi"]]
    parts += [component("npm", name, version, licence) for name, version, licence in found["npm"]]
    parts += [
        component("deb", f"debian/{name}", version, qualifiers=f"?arch={arch}")
        for name, version, arch in found["dpkg"]
    ]
    name, _, version = image.partition(":")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": {
                "type": "container",
                "bom-ref": image,
                "name": name,
                "version": version,
                "properties": [
                    {"name": "image-id", "value": docker("image", "inspect", "-f", "{{.Id}}", image).strip()}
                ],
            },
        },
        "components": list({part["bom-ref"]: part for part in parts}.values()),
    }


def of_package(told: dict[str, Any]) -> dict[str, Any]:
    return component(
        "pypi", told["name"].lower().replace("_", "-"), told["version"], told.get("license_expression")
    )


def component(
    kind: str, name: str, version: str, licence: Any = None, qualifiers: str = ""
) -> dict[str, Any]:
    url = f"pkg:{kind}/{quote(name, safe='/')}@{quote(version, safe='')}{qualifiers}"
    part = {
        "type": "library",
        "bom-ref": url,
        "name": name.rpartition("debian/")[2],
        "version": version,
        "purl": url,
    }
    if isinstance(licence, str) and licence:
        part["licenses"] = [{"license": {"name": licence}}]
    return part


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], check=True, stdout=subprocess.PIPE, text=True)  # noqa: S607  # the one on PATH
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
