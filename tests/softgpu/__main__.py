# SPDX-License-Identifier: MIT
"""Runs a command on the software GPU: ``python -m tests.softgpu python -m cunorm info``."""

import os
import sys

from . import subprocess_environment

if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **subprocess_environment()})
