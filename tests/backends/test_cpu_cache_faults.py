# SPDX-License-Identifier: MIT
"""Compilers that fail on the way and files that are damaged: the next call is as if nothing was."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import cunorm
from tests.backends.test_cpu_build import ANSWERS, posix, script
from tests.support import described
from tests.support.internals import _compile, compiler
from tests.support.processes import in_process

pytestmark = [posix, pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")]
gcc = pytest.mark.skipif(
    compiler() is None or not compiler().is_gcc, reason="other compilers take no such headers"
)

WITH_OPENMP = 'case "$*" in *-fopenmp*) if [ -e "$flag" ]; then {}; fi;; esac\n'
HALF = 'for last; do :; done; echo half > "$last"; '  # the file that it was to make
FAULTS = {
    "is killed": HALF + 'rm "$flag"; kill -9 $$',
    "finds the disk full": HALF + 'echo "error: no space left on device" >&2; exit 1',
    "may not write so much": "ulimit -f 64",
    "refuses OpenMP": 'echo "error: unrecognized option" >&2; exit 1',
}


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    return described.with_a_cache_at(tmp_path / "cache", monkeypatch)


@pytest.fixture
def flag(folder, monkeypatch, tmp_path, request) -> Path:
    """Have a compiler with this fault, where it is to use OpenMP and while a file is there."""
    folder.mkdir()
    flag = tmp_path / "flag"
    flag.touch()
    fault = WITH_OPENMP.format(FAULTS[request.param])
    command = script(tmp_path, f'{ANSWERS}flag="{flag}"\n{fault}exec $real "$@"')
    found = compiler()._replace(command=(command,))
    monkeypatch.setattr(_compile, "compiler", lambda: found)
    return flag


def check() -> None:
    y = cunorm.l2_norm(np.array([[3, 4, 0, 0]], dtype=np.float32))
    np.testing.assert_allclose(y, [[0.6, 0.8, 0, 0]], rtol=1e-6)


def uses_openmp(library: Path) -> bool:
    return b"omp_get_thread_num" in library.read_bytes()


# --- compilers that fail once ---------------------------------------------------------------------


@pytest.mark.parametrize("flag", list(FAULTS)[:3], indirect=True)
def test_a_compiler_that_is_stopped_is_an_error_and_leaves_nothing_behind(flag, folder):
    with pytest.raises(RuntimeError, match=r"killed by signal 9|no space|File size limit"):
        check()
    assert not list(folder.iterdir())
    flag.unlink(missing_ok=True)
    check()
    (library,) = folder.iterdir()
    assert uses_openmp(library)


@pytest.mark.parametrize("flag", ["refuses OpenMP"], indirect=True)
def test_a_compiler_that_refused_an_option_is_asked_again_a_day_later(flag, folder):
    def files(suffix: str) -> list[Path]:
        return sorted(folder.glob(f"*{suffix}"))

    other = partial(cunorm.l2_norm, np.ones((1, 4), np.float64))
    with ThreadPoolExecutor() as pool:  # both find out
        list(pool.map(lambda call: call(), (check, other)))
    serial, (refused,) = files(".so"), files(".json")
    assert len(serial) == 2
    assert not any(map(uses_openmp, serial))
    flag.unlink()
    for day in range(2):
        described.forget()
        check()
        assert len(files(".so")) == 2 + day
        os.utime(refused, (time.time() - 25 * 60 * 60,) * 2)
    (parallel,) = {*files(".so")} - {*serial}
    assert uses_openmp(parallel)


def test_a_compile_that_is_interrupted_leaves_nothing_behind(tmp_path):
    begun, elsewhere, cache = tmp_path / "begun", tmp_path / "temporary", tmp_path / "cache"
    elsewhere.mkdir()
    hangs = f'echo half > "$TMPDIR/half"; touch "{begun}"; exec sleep 60'
    in_process(
        "import pathlib, signal, time\n"
        "def interrupt():\n"
        f"    while not pathlib.Path({os.fspath(begun)!r}).exists():\n"
        "        time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it\n"
        "threading.Thread(target=interrupt).start()\n"
        "try:\n"
        "    check(0, False)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit()\n"
        "raise AssertionError",
        CXX=script(tmp_path, f"{ANSWERS}{hangs}"),
        CUNORM_CACHE_DIR=os.fspath(cache),
        TMPDIR=os.fspath(elsewhere),
    )
    assert not [*cache.iterdir(), *elsewhere.iterdir()]


# --- damaged files --------------------------------------------------------------------------------


def test_a_damaged_library_is_compiled_again(tmp_path):
    """A loader refuses an empty one, and crashes on what is left of one that is cut."""
    cache = tmp_path / "cache"
    in_process(
        "import pathlib\n"
        "check(0, False)\n"
        "(library,) = pathlib.Path(os.environ['CUNORM_CACHE_DIR']).iterdir()\n"
        "whole = library.read_bytes()\n"
        "one_bit = bytes([whole[3000] ^ 1])\n"
        "for damaged in (b'', whole[:4096], whole[:3000] + one_bit + whole[3001:]):\n"
        "    library.unlink()  # as its old content is mapped\n"
        "    library.write_bytes(damaged)\n"
        "    cunorm._backend.forget()\n"
        "    check(0, False)\n"
        "    assert library.read_bytes() != damaged",
        CXX=script(tmp_path, f'{ANSWERS}exec $real "$@" -O0'),
        CUNORM_CACHE_DIR=os.fspath(cache),
    )


# --- compiled headers -----------------------------------------------------------------------------

BUILDS = """
import pathlib, time
folder = pathlib.Path(os.environ["CUNORM_CACHE_DIR"])
def headers():
    return [path for path in folder.glob("headers-*") if path.suffix == ".gch"]
def compile_one():
    y = call.pop()(np.array([[3, -3]], dtype=np.float32))
    assert np.isfinite(y).all()
call = [
    lambda x: cunorm.rms_norm(x, x[0]),
    lambda x: cunorm.layer_norm(x),
    lambda x: cunorm.rms_norm(x, dtype="float64"),
    lambda x: cunorm.rms_norm(x, dtype="float16"),
    lambda x: cunorm.rms_norm(x),
]
for _ in range(3):
    compile_one()
"""


@gcc
def test_headers_are_compiled_beside_the_third_build_and_are_taken_by_the_next(tmp_path):
    log = tmp_path / "log"
    in_process(
        f"{BUILDS}"
        "begun = time.monotonic()\n"
        "while not headers() and time.monotonic() < begun + 60: time.sleep(0.05)\n"
        "compile_one()\n"
        "(compiled,) = headers()\n"
        f"assert pathlib.Path({os.fspath(log)!r}).read_text().count(f'! {{compiled}}') == 1\n"
        "half = compiled.read_bytes()[: compiled.stat().st_size // 2]\n"
        "compiled.unlink()\n"
        "compiled.write_bytes(half)\n"
        "compile_one()\n"
        "assert compiled.stat().st_size == 0, 'they are given up'\n"
        "assert cunorm.clear_cache().files == 6 and not list(folder.iterdir())",
        CXX=script(tmp_path, f'{ANSWERS}exec $real "$@" -O0 -H 2>> "{log}"'),
        CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"),
    )


@gcc
def test_a_process_that_ends_ends_the_compile_of_headers(tmp_path):
    beats, cache = tmp_path / "beats", tmp_path / "cache"
    child = f'(for i in $(seq 600); do echo >> "{beats}"; sleep 0.1; done)'
    hangs = f'case "$*" in *c++-header*) echo half > "$TMPDIR/half"; {child} & wait;; esac'
    begun = time.monotonic()
    in_process(
        f"{BUILDS}while not os.path.exists({os.fspath(beats)!r}): time.sleep(0.05)",
        CXX=script(tmp_path, f'{ANSWERS}{hangs}\nexec $real "$@" -O0'),
        CUNORM_CACHE_DIR=os.fspath(cache),
    )
    assert time.monotonic() - begun < 55
    assert {path.suffix for path in cache.iterdir()} == {".so"}
    before = beats.read_text()
    time.sleep(1)
    assert beats.read_text() == before


def test_all_that_helps_to_compile_is_counted_and_removed(folder):
    folder.mkdir()
    (folder / f"headers-{'0' * 32}.h.gch").write_bytes(b"12345")
    (folder / f"refused-{'0' * 32}.json").write_bytes(b"[]")
    (folder / "headers-0.h.gch").touch()
    assert cunorm.cache_info()[1:3] == (0, 7)
    assert cunorm.clear_cache() == (2, 7)
    assert [path.name for path in folder.iterdir()] == ["headers-0.h.gch"]
