from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from fedcohort import storage
from fedcohort.exceptions import ConfigError, FolderInUse
from fedcohort.storage import (
    LOCK,
    SUFFIX,
    locked_folder,
    read_toml,
    remove_leftovers,
    write_atomically,
)

WRITER = """
import os, signal, sys
from fedcohort import storage
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
storage.write_atomically(sys.argv[1], b"new")
"""
HOLDER = """
import sys, time
from fedcohort.storage import locked_folder
with locked_folder(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_writer_leaves_the_old_file_and_a_leftover_that_is_removed(tmp_path):
    target = tmp_path / "x"
    target.write_bytes(b"old")
    subprocess.run([sys.executable, "-c", WRITER, str(target)], check=False)
    assert target.read_bytes() == b"old"
    left = [p for p in tmp_path.iterdir() if p != target]
    assert len(left) == 1
    assert left[0].name.endswith(SUFFIX)
    assert remove_leftovers(tmp_path) == left
    assert list(tmp_path.iterdir()) == [target]


def test_the_temporary_file_of_a_live_writer_is_kept(tmp_path, monkeypatch):
    """The writer cleans up in the middle of its own write, where its file looks like a leftover."""
    real = os.replace

    def replace(old, new):
        assert remove_leftovers(tmp_path) == []
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    write_atomically(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_file_deleted_before_its_writer_locked_it_is_written_again(tmp_path, monkeypatch):
    """Between open and lock, the file looks like a leftover; the first three writes lose it."""
    real, removed = filelock.lock_descriptor, []

    def lock(handle, blocking):
        if len(removed) < 3:
            monkeypatch.setattr(filelock, "lock_descriptor", real)
            removed.extend(remove_leftovers(tmp_path))
            monkeypatch.setattr(filelock, "lock_descriptor", lock)
        return real(handle, blocking=blocking)

    monkeypatch.setattr(filelock, "lock_descriptor", lock)
    write_atomically(tmp_path / "x", b"new")
    assert len(removed) == 3
    assert (tmp_path / "x").read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_other_hidden_files_are_not_touched(tmp_path):
    for name in (".x.part", "x" + SUFFIX, ".gitignore"):
        (tmp_path / name).touch()
    assert remove_leftovers(tmp_path) == []


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(tmp_path / "x", b"new")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_synced_after_the_rename(tmp_path, monkeypatch):
    calls = []
    real_sync, real_replace = os.fsync, os.replace
    kind = lambda handle: "folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file"  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda h: (calls.append(kind(h)), real_sync(h)))
    monkeypatch.setattr(os, "replace", lambda *n: (calls.append("rename"), real_replace(*n)))
    write_atomically(tmp_path / "x", b"new")
    assert calls == ["file", "rename", "folder"]


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "x", b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_a_folder_is_held_by_one_process_until_it_dies(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FolderInUse, match="by another process"), locked_folder(tmp_path):
            raise AssertionError("the lock was given twice")
        holder.kill()
    deadline = time.monotonic() + 10
    while True:
        try:
            with locked_folder(tmp_path):
                break
        except FolderInUse:
            assert time.monotonic() < deadline
    assert [p.name for p in tmp_path.iterdir()] == [LOCK]


def test_devices_and_links_are_written_to_and_stay(tmp_path):
    """``-o /dev/stdout`` must not put a file in the place of a device, even for root."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, b"abc")
    assert os.read(reader, 10) == b"abc"
    os.close(reader)
    assert pipe.is_fifo()
    file.write_bytes(b"old")
    link.symlink_to(file)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert file.read_bytes() == b"new"
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path, b"")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *((content, "") for content in ("a = ", "a = " + "[" * 9999, "\xff", "#" * (1 << 23))),
        (".".join("a" * 50_000), "a key of more than 32 parts"),  # would take gigabytes
        ("x = {" + ".".join("a" * 99) + "=1}", "a key of more than 32 parts"),
    ],
)
def test_toml_that_cannot_be_read_is_one_error(tmp_path, content, reason):
    path = tmp_path / "x.toml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"x\.toml: {reason}"):
        read_toml(path)


def test_nothing_is_unpickled_and_no_file_runs_code():
    """`joblib`, `torch.load` and `shelve` unpickle; `np.load` does if it is allowed to."""
    runs_code = re.compile(
        r"\b(pickle|marshal|shelve|joblib|dill)\b"
        r"|torch\.load|allow_pickle=True|(?<![\w.])(eval|exec)\(|yaml\.(unsafe_)?load\(",
        re.M,
    )
    sources = [*Path(storage.__file__).parent.rglob("*.py")]
    assert len(sources) > 100
    assert [path.name for path in sources if runs_code.search(path.read_text())] == []
