# SPDX-License-Identifier: MIT
"""The CSV of the timings is read as it was written."""

from dataclasses import replace

import pytest

from bench.rows import Row, read_csv, write_csv

ROW = Row(
    date="2026-01-02",
    commit="0123456+",
    device='A CPU, of "some" kind, 2 cores',
    driver="",
    versions="cunorm 0.1.0; torch 2.13.0",
    threads=2,
    operator="rms_norm",
    memory="",
    direction="forward",
    dtype="float32",
    shape="4096x4096",
    provider="cunorm",
    bytes=134234112,
    p20_us=7000.5,
    p50_us=7100.25,
    p80_us=7250.125,
    gb_per_s=18.906,
    of_copy=0.9123,
    host_us=None,
    error=2.5e-07,
)


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [ROW, replace(ROW, provider="copy", host_us=12.5, error=None)]
    write_csv(tmp_path / "rows.csv", rows)
    assert read_csv(tmp_path / "rows.csv") == rows


def test_a_table_of_other_columns_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("date,commit\n2026-01-02,0123456\n")
    with pytest.raises(ValueError, match="columns"):
        read_csv(tmp_path / "rows.csv")
