"""Makes the Python wheel; `scripts/package.sh wheel` calls it with what it has built.

A wheel is a zip file with a list of its files (packaging.python.org, "Binary distribution format"). This one holds the module
`rekindle`, the executable for the scripts folder, and CRIU for the data folder: from bin/rekindle that is
../lib/rekindle/criu, where rekindle looks. Nothing is compiled for one version of Python, so one wheel serves all.

The tag manylinux_2_34 is true for a reason that tools which read ELF files cannot see: the bundled CRIU asks for a newer C
library, and has it beside itself.
"""

import argparse
import base64
import hashlib
import os
import re
import stat
import time
import zipfile
from pathlib import Path
from typing import Dict, List, Tuple

NAME = "rekindle"

METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: Keeps long GPU jobs alive: snapshots on an interval, automatic restart from the newest good one
License-Expression: Apache-2.0 AND GPL-2.0-only AND LicenseRef-Libraries-Of-CRIU
{licenses}
Keywords: checkpoint,restore,CRIU,CUDA,GPU,training
Classifier: Environment :: Console
Classifier: Environment :: GPU :: NVIDIA CUDA
Classifier: Intended Audience :: Science/Research
Classifier: Intended Audience :: System Administrators
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Classifier: Topic :: System :: Recovery Tools
Classifier: Typing :: Typed
Requires-Python: >=3.8
Description-Content-Type: text/markdown

{readme}"""

WHEEL = """\
Wheel-Version: 1.0
Generator: rekindle {version}
Root-Is-Purelib: false
Tag: {tag}
"""


def python_version(version: str) -> str:
    """Cargo's version as Python writes it: 1.2.0-rc.3 is 1.2.0rc3."""
    match = re.fullmatch(r"(\d+\.\d+\.\d+)(?:-(alpha|beta|rc)\.?(\d+))?", version)
    if not match:
        raise SystemExit(f"wheel: the version {version} has no form in Python: use X.Y.Z or X.Y.Z-rc.N")
    release, stage, number = match.groups()
    return release + ({"alpha": "a", "beta": "b", "rc": "rc"}[stage] + number if stage else "")


def files_below(folder: Path, prefix: str) -> List[Tuple[str, Path]]:
    """The regular files below a folder, with their names in the wheel, in one order everywhere."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    if not files:
        raise SystemExit(f"wheel: there is no file in {folder}")
    return [(prefix + path.relative_to(folder).as_posix(), path) for path in files]


def write(target: Path, entries: List[Tuple[str, bytes, int]], record: str, level: int) -> None:
    """The zip file, its list of files last, as the format wants it."""
    seconds = max(int(os.environ["SOURCE_DATE_EPOCH"]), 315532800)  # zip begins in 1980
    lines = []
    for name, content, _ in entries:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}\n")
    listed = entries + [(record, "".join([*lines, f"{record},,\n"]).encode(), 0o644)]
    with zipfile.ZipFile(target, "w") as wheel:
        for name, content, mode in listed:
            info = zipfile.ZipInfo(name, time.gmtime(seconds)[:6])
            info.create_system = 3  # Unix: else the modes count for nothing
            info.external_attr = (stat.S_IFREG | mode) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(info, content, compresslevel=level)


def main() -> None:
    """Reads the arguments and writes the wheel."""
    parser = argparse.ArgumentParser()
    for option in ("version", "glibc", "level"):
        parser.add_argument(f"--{option}", required=True)
    for option in ("tree", "module", "readme", "out"):
        parser.add_argument(f"--{option}", required=True, type=Path)
    given = parser.parse_args()

    version = python_version(given.version)
    tag = f"py3-none-manylinux_{given.glibc.replace('.', '_')}_x86_64"
    info, data = f"{NAME}-{version}.dist-info", f"{NAME}-{version}.data"
    share = given.tree / "share"
    doc = share / "doc" / NAME

    licenses = [(name, doc / name) for name in ("LICENSE", "NOTICE", "third-party.txt")]
    licenses += files_below(doc / "criu", "criu/")
    plain: Dict[str, Path] = dict(files_below(given.module, f"{NAME}/"))
    plain.update(files_below(share / "man", f"{data}/data/share/man/"))
    plain.update((f"{info}/licenses/{name}", path) for name, path in licenses)
    programs = {f"{data}/scripts/rekindle": given.tree / "bin" / "rekindle"}
    programs.update(files_below(given.tree / "lib" / NAME, f"{data}/data/lib/{NAME}/"))

    entries = [(name, path.read_bytes(), 0o644) for name, path in plain.items()]
    for name, path in programs.items():
        entries.append((name, path.read_bytes(), 0o755 if path.stat().st_mode & 0o100 else 0o644))
    metadata = METADATA.format(
        name=NAME,
        version=version,
        licenses="\n".join(f"License-File: {name}" for name, _ in licenses),
        readme=given.readme.read_text(encoding="utf-8"),
    )
    entries.append((f"{info}/METADATA", metadata.encode(), 0o644))
    entries.append((f"{info}/WHEEL", WHEEL.format(version=version, tag=tag).encode(), 0o644))

    target = given.out / f"{NAME}-{version}-{tag}.whl"
    partial = target.with_suffix(".partial")
    write(partial, entries, f"{info}/RECORD", int(given.level))
    partial.replace(target)
    print(target)


main()
