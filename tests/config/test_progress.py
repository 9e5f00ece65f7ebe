"""Progress in a log file: a line at the start, every half minute and at the end."""

import io

import tqdm.std

from drafttrain.config.progress import tracking


def test_a_file_gets_a_line_every_half_minute_and_one_at_each_end(monkeypatch):
    out, now = io.StringIO(), [1000.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    with tracking(350, "train quickstart", "step", done=100, out=out) as work:
        for step in range(250):
            now[0] += 0.25
            work.set_postfix_str(f"loss {step / 100:.3f}", refresh=False)
            work.update()
    counts = [line.split()[3] for line in out.getvalue().splitlines()]
    assert counts == ["100/350", "220/350", "340/350", "350/350"]
    assert out.getvalue().splitlines()[1].startswith("train quickstart:  63% 220/350 [00:30<00:32")
    assert out.getvalue().splitlines()[1].endswith("loss 1.190]")
    assert "\r" not in out.getvalue()


def test_nothing_is_written_where_another_process_prints_or_without_work():
    out = io.StringIO()
    with tracking(9, "distil", "row", shown=False, out=out) as work:
        work.update(9)
    with tracking(0, "distil", "row", out=out):
        pass
    assert out.getvalue() == ""
