"""Live page over a real socket: updates while runs progress, and rejected requests."""

import http.client
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.checkpoint.run_folder import SWEEP_LOCK, RunLock
from megatron.launch import live_server
from megatron.launch.live_server import LivePage, build_server, serve_report
from megatron.options.commands import ReportOptions
from megatron.reports.paper_experiment import Experiment, write_experiment
from megatron.reports.records import Record, read_records, write_records
from megatron.reports.run_records import RunOutcome, write_run_file
from megatron.utils.errors import UserError

from .test_training_curves import make_run, write_line


@contextmanager
def serving(page: LivePage) -> Iterator[int]:
    with build_server(page, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render a changed page at once, also on a machine where a page takes over a second."""
    monkeypatch.setattr(live_server, "RENDER_FRACTION", 1e9)


def make_page(*folders: Path) -> LivePage:
    return LivePage(list(folders), ReportOptions())


def write_results(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    records = [
        Record(
            method="rotary", train_length=64, length=length, protocol="last", metric="perplexity", value=value,
            tokens=2048, seed=1, run=str(folder),
        )
        for length, value in ((64, 6.5), (2048, 16.25))
    ]  # fmt: skip
    write_records(folder / "results.json", records)


def test_a_run_is_shown_in_training_and_followed_by_results(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 40)
    lock = RunLock(run)
    with serving(make_page(run)) as port:
        code, text, headers = ask(port)
        assert code == 200
        assert f"Training of {run}</h1>" in text
        assert 'data-seconds="5" role="status">Live</p>' in text
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "step: 50" not in text
        write_line(run, 50, 0.5)
        assert "step: 50" in ask(port)[1]
        lock.release()
        write_results(run)
        text = ask(port)[1]
        assert "No active training" in text
        assert text.index("16.25") < text.index('id="training"'), "results come first"
        assert 'id="cite"' in text


def test_runs_are_in_the_order_of_their_results(tmp_path: Path) -> None:
    """Runs are sorted by result; `find_runs` sorts by name, and runs without a result come last."""
    folders = [make_run(tmp_path / name / "seed_1", 3) for name in ("a", "b", "c")]
    records = [
        Record(
            method=run.parent.name, train_length=64, length=64, protocol="last", metric="perplexity", value=5.0,
            tokens=64, seed=1, run=str(run),
        )
        for run in (folders[2], folders[0])
    ]  # fmt: skip
    write_records(tmp_path / "results.json", records)
    text = make_page(tmp_path).render()
    table = text[text.index("Status of each run") :]
    assert re.findall(r'<th scope="row">(\w)/seed_1</th>', table) == ["c", "a", "b"]


def test_a_sweep_that_has_no_run_yet_is_live(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "sweep", name=SWEEP_LOCK, key="sweep.output")
    page = make_page(tmp_path / "sweep")
    assert ">Live</p>" in page.render()
    make_run(tmp_path / "sweep" / "a" / "seed_1", 3)
    assert "seed_1" in page.render()
    lock.release()


def test_unchanged_parts_are_not_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", 4)
    page, made = make_page(run), []
    monkeypatch.setattr(live_server, "render_report", lambda *_, **more: made.append(more) or str(len(made)))
    assert [page.render(), page.render()] == ["1", "1"]
    write_line(run, 5, 1.0)
    assert page.render() == "2"


def test_slow_pages_are_built_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that took 3 s to build is rebuilt after 30 s at the earliest."""
    monkeypatch.setattr(live_server, "RENDER_FRACTION", 0.1)
    now = [100.0]
    run = make_run(tmp_path / "run", 4)
    page, made = make_page(run), []

    def render(*_: object, **more: object) -> str:
        now[0] += 3
        made.append(more)
        return str(len(made))

    monkeypatch.setattr(live_server, "render_report", render)
    monkeypatch.setattr(live_server.time, "monotonic", lambda: now[0])
    shown = [page.render()]
    for step, seconds in ((5, 10.0), (6, 19.0), (7, 2.0)):
        write_line(run, step, 1.0)
        now[0] += seconds
        shown.append(page.render())
    assert shown == ["1", "1", "1", "2"]


def test_saved_records_are_shown(tmp_path: Path) -> None:
    """A folder of saved records is served like results; one with several results is an error that names them."""
    for name in ("a", "b"):
        write_results(tmp_path / name)
        records = read_records(tmp_path / name / "results.json")
        (tmp_path / name / "results.json").unlink()
        write_run_file(tmp_path / name / "rotary" / "seed_1.json.gz", "digest", RunOutcome(records))
        write_experiment(tmp_path / name / "results.json", Experiment("Saved", run_digests={}, num_runs=2))
    with pytest.raises(UserError, match=r"a: all saved runs are of variants that its sweep has removed or redefined"):
        make_page(tmp_path / "a").render()
    kept = Experiment("Saved", run_digests={"rotary/seed_1.json.gz": "digest"}, num_runs=2)
    write_experiment(tmp_path / "a" / "results.json", kept)
    text = make_page(tmp_path / "a").render()
    assert "16.25" in text
    assert "Saved (1 run pending)" in text
    with pytest.raises(UserError, match=r"contains 2 results; name those to report, for example .*a, .*b$"):
        make_page(tmp_path).render()


def test_results_without_runs_are_shown(tmp_path: Path) -> None:
    """Results without runs are shown, as written by `evaluate -o`.

    In a running sweep the reference method may be missing.
    """
    write_results(tmp_path)
    with serving(make_page(tmp_path)) as port:
        assert "16.25" in ask(port)[1]
        code, text, headers = ask(port, method="HEAD")
        assert (code, text) == (200, "")
        assert int(headers["Content-Length"]) > 1000
    with pytest.raises(UserError, match="nowhere: no such folder"):
        make_page(tmp_path / "nowhere").render()
    page = LivePage([tmp_path], ReportOptions(against="fox"))
    with pytest.raises(UserError, match="--against fox"):
        page.render()
    lock = RunLock(tmp_path, name=SWEEP_LOCK, key="sweep.output")
    assert "16.25" in page.render()
    lock.release()


def test_foreign_requests_are_rejected(tmp_path: Path) -> None:
    with serving(make_page(make_run(tmp_path / "run", 2))) as port:
        assert ask(port, Host=f"localhost:{port}")[0] == 200
        assert ask(port, Host="127.0.0.1:9000")[0] == 200, "of a tunnel"
        for host in ("evil.example", f"evil.example:{port}", ""):
            assert ask(port, Host=host)[0] == 403
        for path in ("/config.yml", "/../run/config.yml", "/index.html"):
            assert ask(port, path)[0] == 404
        assert ask(port, method="POST")[0] == 501
        with pytest.raises(UserError, match=f"--port {port}: cannot listen on it"):
            build_server(make_page(tmp_path), port)


def test_errors_are_shown_and_the_page_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = make_page(make_run(tmp_path / "run", 2))
    with serving(page) as port:
        with monkeypatch.context() as patch:
            patch.setattr(page, "_render", lambda *_: 1 // 0)
            code, text, _ = ask(port)
            assert (code, "ZeroDivisionError" in text) == (500, True)
        assert ask(port)[0] == 200


def test_a_folder_without_runs_is_rejected_before_opening_a_port(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no run"):
        serve_report([tmp_path], 0, print, ReportOptions())


def test_a_run_with_a_non_utf_8_name_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / os.fsdecode(b"caf\xe9"), 40)
    with serving(make_page(run)) as port:
        code, text, _ = ask(port)
        assert code == 200
        assert "caf?" in text
