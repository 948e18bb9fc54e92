"""Time estimates with a clock controlled by the test."""

import io
import time

import pytest
from rich.console import Console
from screen import Clock

from megatron.utils.progress import MAX_OBSERVATIONS, ProgressMeter, WaitAnnouncer, WorkItem, estimate_seconds_left


def test_nothing_is_claimed_before_anything_is_measured() -> None:
    assert estimate_seconds_left([WorkItem("a", "train", 10)]) is None
    assert estimate_seconds_left([]) == 0


def seen(name: str, kind: str, work: float, *points: tuple[float, float]) -> WorkItem:
    """Return a job with work observed at these points: done, seconds."""
    job = WorkItem(name, kind, work)
    for done, seconds in points:
        job.advance(done, seconds)
    return job


def test_a_job_is_estimated_by_its_own_pace_then_its_kind_then_any() -> None:
    done = seen("a", "train", 100, (20, 30), (100, 70))  # 2 per second, after 20 s of startup
    running = seen("b", "train", 100, (10, 40), (20, 60))  # 0.5 per second, after 20 s of startup
    waiting = WorkItem("c", "train", 60)  # like a and b together: 120 in 90 s, after 20 s
    other = WorkItem("d", "evaluate", 30)  # like all: the same
    # b was observed to do 10 in 20 s, and 5% of its work counts as if done at a's speed.
    both = 80 / ((10 + 5) / (20 + 5 / 2)) + 20 + 60 * 90 / 120
    assert estimate_seconds_left([done, running, waiting, other]) == pytest.approx(both + 20 + 30 * 90 / 120)
    measured = seen("e", "evaluate", 10, (0, 3), (10, 4))  # too short to be observed: 10 in 4 s
    assert estimate_seconds_left([done, running, waiting, other, measured]) == pytest.approx(both + 30 / 2.5)


def test_starting_up_is_no_jump() -> None:
    """Startup causes no jump: the estimate decreases with the time passed, and the first step changes little."""
    done = seen("a", "train", 100, (10, 21), (100, 30))  # 10 per second, after 20 s
    job = WorkItem("b", "train", 100)
    left = []
    for at in range(0, 20, 5):
        job.advance(0, at)
        left.append(estimate_seconds_left([done, job]))
    assert left == pytest.approx([30, 25, 20, 15])
    job.advance(10, 21)  # observed once: startup is over, and its own speed is unknown
    assert estimate_seconds_left([done, job]) == pytest.approx(9)
    job.advance(20, 23)  # at half the speed of the other, which counts for another 5 of work
    assert estimate_seconds_left([done, job]) == pytest.approx(80 / ((10 + 5) / (2 + 5 / 10)))


def test_one_pause_does_not_move_the_estimate() -> None:
    """After a pause as long as all work so far, the estimate stays; a lasting change of speed moves it."""
    job = WorkItem("a", "train", 1000)
    for step in range(1, 401):
        job.advance(step, 10 + step)
    assert estimate_seconds_left([job]) == pytest.approx(600)
    job.advance(401, 10 + 401 + 400)
    assert estimate_seconds_left([job]) == pytest.approx(599)
    assert len(job.observations) <= MAX_OBSERVATIONS
    for step in range(402, 901):
        job.advance(step, 811 + 2 * (step - 401))
    assert estimate_seconds_left([job]) == pytest.approx(200)


def test_many_short_jobs_are_estimated_by_their_whole_time() -> None:
    """Many short jobs are estimated by their whole time: they end before a second observation, and mostly start up."""
    jobs = [seen(str(i), "train", 10, (0, 3), (10, 8)) for i in range(3)] + [
        WorkItem(str(i), "train", 10) for i in range(4)
    ]
    assert estimate_seconds_left(jobs) == pytest.approx(4 * 8)


def test_the_meter_measures_and_prints_periodically() -> None:
    clock, out = Clock(), io.StringIO()
    jobs = [WorkItem("first", "train", 100), WorkItem("second", "train", 300)]
    with ProgressMeter(Console(file=out, width=200), jobs, clock=clock, interval=15) as meter:
        meter.begin(jobs[0], "starting")
        for _ in range(10):
            clock.now += 2
            meter.update(jobs[0].done + 10, f"step {jobs[0].done:.0f}")
        meter.finish()
        meter.begin(jobs[1])
        clock.now += 30
        meter.update(150)
        meter.log("a [line] of text")
    assert (jobs[0].seconds, jobs[1].seconds) == (20, 30)
    assert out.getvalue().splitlines() == [
        "first: starting",
        "first: step 70 (about 1 min 04 s left in total)",
        "second (about 1 min 00 s left in total)",
        "second (about 30 s left in total)",
        "a [line] of text",
    ]


def test_no_line_repeats_the_previous_one() -> None:
    """No line repeats the previous one: while the speed is unknown, the elapsed time differs."""
    clock, out = Clock(), io.StringIO()
    with ProgressMeter(Console(file=out, width=200), [job := WorkItem("only", "train", 100)], clock=clock) as meter:
        meter.begin(job, "step 0 of 9")
        for _ in range(2):
            clock.now += 15
            meter.update(0, "step 0 of 9")
    assert out.getvalue().splitlines() == [
        "only: step 0 of 9",
        "only: step 0 of 9 (15 s)",
        "only: step 0 of 9 (30 s)",
    ]


def test_silent_work_is_announced() -> None:
    clock, out, job = Clock(), io.StringIO(), WorkItem("first", "train", 100)

    def wait_for_line(line: str) -> None:
        deadline = time.monotonic() + 20
        while not out.getvalue().endswith(f"\n{line}\n"):
            assert time.monotonic() < deadline, out.getvalue()
            time.sleep(0.01)

    with ProgressMeter(Console(file=out, width=200), [job], clock=clock, interval=0.1) as meter:
        meter.begin(job, "loading")
        assert out.getvalue() == "first: loading\n"
        clock.now += 10
        wait_for_line("first: loading (10 s)")
        meter.update(20, "step 1")  # ten seconds of startup
        clock.now += 10
        meter.update(60, "step 2")
        clock.now += 4
        wait_for_line("first: step 2 (about 6 s left)")
        clock.now += 7
        wait_for_line("first: step 2 (31 s)")
        meter.finish()
        clock.now += 1
        wait_for_line("first (done)")
    lines = out.getvalue()
    clock.now += 10
    time.sleep(0.1)
    assert out.getvalue() == lines


def test_starting_up_does_not_count_for_the_speed() -> None:
    job = WorkItem("a", "train", 100)
    for done, seconds in ((0, 5), (10, 20), (30, 24)):  # at least 15 s of startup, then 5 per second
        job.advance(done, seconds)
    assert estimate_seconds_left([job]) == pytest.approx(70 / 5)


def test_the_forecast_comes_once_with_the_first_measured_speed() -> None:
    clock, reported = Clock(), []
    jobs = [WorkItem("first", "train", 100), WorkItem("second", "train", 300)]
    with ProgressMeter(None, jobs, clock=clock, forecast=reported.append) as meter:
        meter.begin(jobs[0])
        for passed, done in ((7, 0), (8, 20), (2, 40), (2, 60)):  # 10 per second after 15 s of startup
            clock.now += passed
            meter.update(done)
            assert reported == ([60 / 10 + 13 + 300 / 10] if done >= 40 else [])


def test_skipped_jobs_do_not_affect_the_speed_estimate() -> None:
    jobs = [WorkItem("first", "train", 100), seen("second", "train", 100, (0, 1), (25, 5), (50, 10))]
    ProgressMeter(None, jobs).skip(jobs[0])
    assert estimate_seconds_left(jobs) == pytest.approx(10)


def test_a_terminal_gets_a_bar() -> None:
    out, jobs, clock = io.StringIO(), [WorkItem("first", "train", 100)], Clock()
    with ProgressMeter(Console(file=out, width=100, force_terminal=True), jobs, clock=clock) as meter:
        meter.begin(jobs[0])
        meter.update(20, "step [2]")
        meter._bar.refresh()
        assert "left" not in out.getvalue()
        clock.now += 5
        meter.update(40, "step [4]")
        meter._bar.refresh()
    assert "first: step [4]" in out.getvalue()
    assert "about 15 s left" in out.getvalue()


def test_a_wait_is_announced_and_again_while_it_lasts() -> None:
    output: list[str] = []
    with WaitAnnouncer(output.append, "reading 9 tokens", first=0.01, every=0.01):
        deadline = time.monotonic() + 20
        while len(output) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert output[:3] == ["reading 9 tokens", "reading 9 tokens (0 s)", "reading 9 tokens (0 s)"]
    with WaitAnnouncer(output.append, "what is there at once"):
        pass
    assert "what is there at once" not in output
