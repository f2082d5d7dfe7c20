# SPDX-License-Identifier: MIT
"""Copies of the working tree, in which a file may be changed and tests run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = "CUNORM_CACHE_DIR"  # of compiled kernels
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "-rf")
FAILED = re.compile(r"^FAILED (.*?)(?: - .*)?$", re.MULTILINE)
NOT_DONE = -1000  # the status of a run that was stopped

Ran = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Tree:
    """A copy of the working tree in a folder that also has the cache of compiled kernels."""

    path: Path
    folder: Path

    @classmethod
    def made(cls, folder: Path, name: str = "tree", root: Path = ROOT) -> Tree:
        """Copy the files that git tracks or does not ignore."""
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=True)
        for file in filter(None, listed.stdout.split("\0")):
            if (root / file).is_file():
                (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / file, folder / name / file)
        return cls(folder / name, folder)

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Give a file another text within the block."""
        path = self.path / file
        before = path.read_text("utf-8")
        path.write_text(text, "utf-8")
        try:
            yield
        finally:
            path.write_text(before, "utf-8")

    def pytest(self, arguments: Sequence[str], seconds: float = 900) -> Ran:
        """Run tests; stop a run that takes longer, with all processes that it has started."""
        command = [sys.executable, *PYTEST, *arguments]
        # No .pyc files: a file that changes twice within a second may keep a stale one.
        env = {"PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"}
        env = {CACHE: str(self.folder / CACHE), **os.environ, **env}  # copies share the cache
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        options = {"cwd": self.path, "env": env, "start_new_session": True}
        with subprocess.Popen(command, **pipes, **options) as process:
            try:
                out, err = process.communicate(timeout=seconds)
            except BaseException as error:  # Ctrl-C, too
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return Ran(command, NOT_DONE, out, f"{err}\nnot done in {seconds} s")
        return Ran(command, process.returncode, out, err)


def last_line(ran: Ran) -> str:
    """Return the last line that a run printed."""
    lines = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
