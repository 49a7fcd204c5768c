"""Writes what a release contains, as a CycloneDX document (JSON, version 1.5); scripts/release.sh calls it.

    sbom.py --version VERSION --bundle DIR --rustc VERSION --tree FILE <OUTPUT OF cargo metadata

Crates are those that are linked into the executable, or that run as macros while it is compiled: FILE is what cargo tree
lists for it, one "name vVERSION" a line. cargo metadata alone would name more, as it adds the features that only tests ask
for. Packages are those of the bundle of CRIU.
"""

import argparse
import hashlib
import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Dict, List, Set
from urllib.parse import quote

Json = Dict[str, Any]


def crates(metadata: Json, linked: Set[str]) -> List[Json]:
    """What `rekindle` depends on, itself first, each with what it depends on."""
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    found: Dict[str, List[str]] = {}
    waiting = [metadata["resolve"]["root"]]
    while waiting:
        crate = waiting.pop()
        if crate in found:
            continue
        normal = [dep["pkg"] for dep in nodes[crate]["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
        found[crate] = [need for need in normal if f"{packages[need]['name']} v{packages[need]['version']}" in linked]
        waiting += found[crate]
    root = metadata["resolve"]["root"]
    ordered = [root, *sorted((found.keys() - {root}), key=lambda crate: (packages[crate]["name"], packages[crate]["version"]))]
    if len(ordered) != len(linked):
        raise SystemExit(f"sbom: cargo tree lists {len(linked)} crates, and {len(ordered)} of them were found")
    return [dict(packages[crate], needs=[packages[need] for need in found[crate]]) for crate in ordered]


def reference(crate: Json) -> str:
    """Its package URL, which is also its name in this document."""
    return f"pkg:cargo/{crate['name']}@{crate['version']}"


def of_crate(crate: Json, checksums: Dict[str, str]) -> Json:
    """A crate as a component."""
    component: Json = {"type": "library", "name": crate["name"], "version": crate["version"]}
    component.update({"bom-ref": reference(crate), "purl": reference(crate)})
    if crate["license"]:
        # Old manifests write a choice with a slash.
        component["licenses"] = [{"expression": crate["license"].replace("/", " OR ")}]
    checksum = checksums.get(f"{crate['name']} {crate['version']}")
    if checksum:
        component["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    return component


def read_checksums(lock: Path) -> Dict[str, str]:
    """The checksums of Cargo.lock by name and version; crates of this repository have none."""
    checksums, name, version = {}, "", ""
    for line in lock.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(" = ")
        value = value.strip('"')
        if key == "name":
            name = value
        elif key == "version":
            version = value
        elif key == "checksum":
            checksums[f"{name} {version}"] = value
    return checksums


def of_bundle(folder: Path) -> List[Json]:
    """The packages of the bundle, each with its files."""
    components: Dict[str, Json] = {}
    for line in (folder / "criu.doc" / "packages.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        file, package, version, source, source_version = line.split()
        purl = f"pkg:deb/debian/{package}@{quote(version, safe='')}?arch=amd64&distro=sid"
        kind = "application" if package == "criu" else "library"
        component = components.setdefault(
            purl, {"type": kind, "name": package, "version": version, "bom-ref": purl, "purl": purl, "properties": []}
        )
        digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        component["properties"].append({"name": f"rekindle:file:lib/rekindle/criu/{file}", "value": f"sha256:{digest}"})
        component["properties"].append({"name": "rekindle:source", "value": f"{source}={source_version}"})
        # Debian describes licences in a file for each package, most of them not as an expression.
        described = {"name": f"as in share/doc/rekindle/criu/copyright/{package}"}
        component["licenses"] = [{"license": {"id": "GPL-2.0-only"} if package == "criu" else described}]
    for component in components.values():
        unique = {(entry["name"], entry["value"]) for entry in component["properties"]}
        component["properties"] = [{"name": name, "value": value} for name, value in sorted(unique)]
    if not components:
        raise SystemExit(f"sbom: {folder} names no packages")
    return [components[purl] for purl in sorted(components)]


def main() -> None:
    """Reads, and writes the document to the standard output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", required=True)
    parser.add_argument("--rustc", required=True)
    parser.add_argument("--bundle", required=True, type=Path)
    parser.add_argument("--tree", required=True, type=Path)
    given = parser.parse_args()
    metadata = json.load(sys.stdin)
    # What follows the version is a folder, or a word such as (proc-macro).
    linked = {" ".join(line.split()[:2]) for line in given.tree.read_text(encoding="utf-8").splitlines()}
    root, *others = crates(metadata, linked)
    if root["version"] != given.version:
        raise SystemExit(f"sbom: cargo says version {root['version']}, not {given.version}")
    checksums = read_checksums(Path(metadata["workspace_root"]) / "Cargo.lock")

    bundle = of_bundle(given.bundle)
    std = {"type": "library", "name": "rust-std", "version": given.rustc, "bom-ref": "rust-std"}
    std["licenses"] = [{"expression": "MIT OR Apache-2.0"}]
    needs = {reference(crate): sorted(reference(need) for need in crate["needs"]) for crate in [root, *others]}
    needs[reference(root)] += ["rust-std", *(component["bom-ref"] for component in bundle)]
    document: Json = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))),
            "component": dict(of_crate(root, checksums), type="application"),
        },
        "components": [*(of_crate(crate, checksums) for crate in others), std, *bundle],
        "dependencies": [{"ref": ref, "dependsOn": on} for ref, on in sorted(needs.items())],
    }
    # Of the content, so that the same release gives the same bytes.
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).digest()
    document["serialNumber"] = f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=4)}"
    json.dump(document, sys.stdout, indent=1)
    print()


main()
