# SPDX-License-Identifier: MIT
"""Which features of a GPU its launch plans use."""

from __future__ import annotations

import pytest

from cunorm import _features, _info
from cunorm._features import Features, described, features_of


def test_features_that_no_gpu_has_proven_are_used_where_asked_for(monkeypatch):
    monkeypatch.delenv("CUNORM_FEATURES", raising=False)
    assert features_of("90") == Features()
    monkeypatch.setenv("CUNORM_FEATURES", "clusters, async_copies")
    assert features_of("75") == Features()
    assert features_of("89") == Features(async_copies=True)
    assert features_of("120") == Features(clusters=True, async_copies=True)
    monkeypatch.setenv("CUNORM_FEATURES", "cluster")
    with pytest.raises(ValueError, match="CUNORM_FEATURES names 'cluster', expected some of clus"):
        features_of("90")


def test_features_that_a_gpu_has_proven_are_used_there(monkeypatch):
    monkeypatch.delenv("CUNORM_FEATURES", raising=False)
    monkeypatch.setitem(_features.PROVEN, "90", Features(clusters=True))
    assert features_of("90") == Features(clusters=True)
    assert features_of("100") == Features()


def test_info_says_which_features_are_used_and_how_to_turn_them_on(monkeypatch):
    monkeypatch.delenv("CUNORM_FEATURES", raising=False)
    assert described("clusters").startswith("not used")
    assert "CUNORM_FEATURES=clusters" in described("clusters")
    monkeypatch.setenv("CUNORM_FEATURES", "clusters")
    assert described("clusters").startswith("used from compute capability 9.0 on")
    monkeypatch.setenv("CUNORM_FEATURES", "cluster")
    assert "CUNORM_FEATURES names 'cluster', expected" in _info.report()
    monkeypatch.delenv("CUNORM_FEATURES")
    monkeypatch.setitem(_features.PROVEN, "90", Features(clusters=True))
    assert described("clusters") == "used with compute capability 9.0"
