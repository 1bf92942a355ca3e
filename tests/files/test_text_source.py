from __future__ import annotations

import gzip

import pytest

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files import Want, open_source
from fedcohort.files.source import MAX_LINE


def lines(path, **want):
    return [line for b in open_source(path, Want(**want)).blocks() for line in b.x]


def test_lines_are_texts_and_blank_ones_are_left_out(tmp_path):
    content = "To be,\n\n  or not ü to be \r\nlast without end"
    (tmp_path / "a.txt").write_text(content, "utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(content.encode()))
    wanted = ["To be,", "or not ü to be", "last without end"]
    assert lines(tmp_path / "a.txt", batch_rows=2) == wanted
    assert lines(tmp_path) == 2 * wanted


def test_no_line_is_longer_than_memory_should_be(tmp_path):
    (tmp_path / "a.txt").write_text("short\n" + "x" * (MAX_LINE + 1))
    with pytest.raises(DataError, match=r"a\.txt: line 2 is longer"):
        lines(tmp_path / "a.txt")


def test_other_encodings_and_damage(tmp_path):
    (tmp_path / "a.txt").write_bytes("fine\nnicht schön".encode("latin-1"))
    with pytest.raises(DataError, match="line 2 is not UTF-8"):
        lines(tmp_path / "a.txt")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"some text " * 99)[:-12])
    with pytest.raises(DataError, match="cannot be read"):
        lines(tmp_path / "b.txt.gz")


def test_texts_have_no_columns(tmp_path):
    (tmp_path / "a.txt").write_text("to be")
    with pytest.raises(ConfigError, match="no columns, such as 'who'"):
        lines(tmp_path / "a.txt", by="who")


def test_unknown_and_missing_files(tmp_path):
    with pytest.raises(DataError, match=r"none\.csv: no such file"):
        open_source(tmp_path / "none.csv", Want())
    (tmp_path / "a.docx").touch()
    with pytest.raises(DataError, match=r"a\.docx: unknown kind of file; known are"):
        open_source(tmp_path / "a.docx", Want())
