"""`python -IS start.py FOLDER MODULE|FILE ARGUMENTS...`: runs a program with the packages of a scaffold's folder.

Its virtual environment names an interpreter by a path of another machine, so the interpreter is started alone, with nothing
of its own packages in sight, and the folder's are put there as that environment would. What the agent starts in the task's workspace sees none of this, so no
environment variable does it, and the one that the interpreter was started with is gone.
"""

from __future__ import annotations

import os
import runpy
import site
import sys


def main() -> None:
    os.environ.pop("LD_LIBRARY_PATH", None)
    folder, program = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    site.addsitedir(f"{folder}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")
    site.setquit()
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
