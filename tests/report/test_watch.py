from __future__ import annotations

import http.client
import shutil
import socket
import threading

import pytest

from fedcohort.report.watch import server


@pytest.fixture
def watched(comparison_folder, tmp_path):
    """Serve a run whose last four rounds have not happened yet."""
    folder = tmp_path / "uniform"
    shutil.copytree(comparison_folder / "uniform", folder)
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:8]))
    serving = server([folder])
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield serving.server_port, folder / "rounds.jsonl", "".join(lines)
    serving.shutdown()
    serving.server_close()


def ask(port, method="GET", path="/version", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_it_answers_only_this_machine_and_only_reads(watched):
    port, _, _ = watched
    assert ask(port)[0] == 200
    assert ask(port, host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1.evil:{port}"):
        assert ask(port, host=host)[0] == 403
    assert ask(port, path="/../etc/passwd")[0] == 404
    for method in ("POST", "PUT", "DELETE"):
        assert ask(port, method)[0] == 501
    with socket.socket() as other, pytest.raises(OSError):  # no other address listens
        other.connect(("127.0.0.2", port))


def test_new_rounds_change_the_version_and_a_damaged_folder_is_reported(watched):
    port, rounds, whole = watched
    before = ask(port)[1]
    rounds.write_text(whole)
    assert ask(port)[1] != before
    rounds.write_text("{}\n")
    status, text = ask(port, path="/")
    assert status == 503 and b"not a round record" in text


def test_the_page_updates_itself(browser, watched):
    port, rounds, whole = watched
    tab = browser.new_page()
    tab.set_default_timeout(120_000)  # a busy machine takes its time to bundle the scripts
    errors = []
    tab.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    tab.goto(f"http://127.0.0.1:{port}/")
    tab.wait_for_selector("html[data-ready=true]", timeout=120_000)
    assert "Not all runs are finished" in tab.inner_text("main")
    points = "document.querySelectorAll('#chart-accuracy-rounds g.mark-symbol > path').length"
    assert tab.evaluate(points) == 4
    with tab.expect_response("**/version"):  # then it knows the first version
        pass
    rounds.write_text(whole)
    tab.wait_for_function(f"() => {points} == 6", timeout=120_000)
    assert "Not all runs are finished" not in tab.inner_text("main")
    tab.close()
    assert [e for e in errors if "favicon" not in e and "404" not in e] == []


def test_watch_refuses_what_is_not_a_run(tmp_path, fails):
    assert "no run found" in fails("watch", tmp_path)
