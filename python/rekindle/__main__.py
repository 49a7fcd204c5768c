"""`python -m rekindle ...` runs the executable that the wheel installed, even if its folder is not in PATH."""

import os
import sys
import sysconfig
from typing import Iterator


def _folders() -> Iterator[str]:
    yield sysconfig.get_path("scripts")
    # pip install --user
    yield sysconfig.get_path("scripts", f"{os.name}_user")
    # pip install --target
    yield os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bin")


def main() -> None:
    """Become the executable."""
    for folder in _folders():
        executable = os.path.join(folder, "rekindle")
        if os.path.isfile(executable):
            os.execv(executable, [executable, *sys.argv[1:]])
    sys.exit("rekindle: the executable is not where the wheel puts it: install the wheel again")


if __name__ == "__main__":
    main()
