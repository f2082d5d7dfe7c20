# SPDX-License-Identifier: MIT
"""Where compiled kernels are kept."""

import pytest

from tests.support.internals import _compile


def test_a_relative_cache_folder_survives_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUNORM_CACHE_DIR", "kernels")
    assert _compile.cache_folder.__wrapped__() == tmp_path / "kernels"


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_cache_folder_that_others_may_write_to_is_not_used(mode, tmp_path, monkeypatch):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(folder))
    with pytest.warns(RuntimeWarning, match="for this process only"):
        assert _compile.cache_folder.__wrapped__() != folder
