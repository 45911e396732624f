"""Results of evaluations that the dashboard shows: what is kept, its limits, and its page."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dashboard_lines import SCRIPT, cluster_with, pages_of

from trainyard.dashboard.views import Pages
from trainyard.evaluate import kept_evaluations as kept
from trainyard.evaluate.questions import Question
from trainyard.evaluate.scores import Answered, Report, summarise


def result(count: int = 4, text: str = "no", files: Sequence[str] = ("a", "b")) -> dict[str, Any]:
    """Return a result of questions of several files; `run` has the second half of them right, `base` the first question."""
    asked = [
        Question(files[n % len(files)], ({"role": "user", "content": f"{SCRIPT}{n}?"},), f"{n}.") for n in range(count)
    ]
    reports = [
        Report("base", [Answered("0." if n == 0 else text, 1, False, 2.0, 3) for n in range(count)], 10.0),
        Report("run", [Answered(f"{n}." if 2 * n >= count else text, 1, True) for n in range(count)], 20.0),
    ]
    return summarise(asked, reports, 0)[0]


def test_what_is_kept_of_each_file(tmp_path: Path) -> None:
    path = kept.keep_evaluation(tmp_path, result())
    assert path.stat().st_mode & 0o777 == 0o600
    [found] = kept.kept_evaluations(path.parent).values()
    assert found.subjects == ["base", "run"] and [file.file for file in found.files] == ["a", "b"]
    first, second = found.files  # questions 0 and 2; 1 and 3
    assert [(each.subject, each.right, each.questions) for each in first.scores] == [("base", 1, 2), ("run", 1, 2)]
    assert (first.changes, second.changes) == ([kept.Change("run", 1, 1, 1.0)], [kept.Change("run", 1, 0, 1.0)])
    assert [(one.reference, one.answers) for one in first.changed] == [
        ("0.", [("0.", True), ("no", False)]),
        ("2.", [("no", False), ("2.", True)]),
    ]
    assert [one.reference for one in second.changed] == ["3."] and second.scores[1].tokens_per_second == 20.0


def test_limits_of_size_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept.keep_evaluation(tmp_path, result(2000, "\N{GRINNING FACE}" * 20_000))
    assert path.stat().st_size < kept.LIMIT
    [found] = kept.kept_evaluations(path.parent).values()
    for file in found.files:
        assert file.changed and file.left_out + len(file.changed) == 500 + (file.file == "a")
    monkeypatch.setattr(kept, "KEPT", 3)
    os.utime(path, (1, 1))
    names = {kept.keep_evaluation(tmp_path, result()).stem for _ in range(3)}
    assert kept.kept_evaluations(path.parent).keys() == names and not path.exists()
    monkeypatch.setattr(kept, "LIMIT", 100)
    with pytest.raises(OSError, match="larger than"):
        kept.keep_evaluation(tmp_path, result())


def test_what_is_not_a_result_is_left_out(tmp_path: Path) -> None:
    path = kept.keep_evaluation(tmp_path, result())
    folder, content = path.parent, path.read_text()
    texts = ["", "[", "[" * 100_000, "{}", content.replace('"low"', '"no"'), "x" * (kept.LIMIT + 1)]
    for number, text in enumerate(texts):
        (folder / f"20260101-000000-00000{number}.json").write_text(text)
    (folder / "notes.json").write_text(content)
    os.mkfifo(folder / "20260101-000000-aaaaaa.json")
    assert list(kept.kept_evaluations(folder)) == [path.stem] and not kept.kept_evaluations(tmp_path / "none")


def page(pages: Pages, *names: str) -> str:
    return pages.page("evaluations", *names).partition("<main")[2]


def test_the_page_shows_the_scores_and_hostile_answers_as_text(tmp_path: Path) -> None:
    pages = pages_of(cluster_with(), tmp_path)
    assert "No evaluation is known" in page(pages)
    hostile = f"{SCRIPT}\x1b[2J\x00"
    path = kept.keep_evaluation(tmp_path / ".trainyard", result(text=hostile))
    asyncio.run(pages.evaluations.update())
    html = page(pages)
    assert "&lt;script&gt;" in html and SCRIPT not in html and not re.search("[\x00\x1b]", html)
    words = re.sub(r"<[^>]*>|\s+", " ", html)
    assert re.search(r"base → run : 1 wrong answers became right, 1 right ones wrong \(p = 1\.000\)", words)
    assert re.search(r"run *50 % *1 of 2 *9 % to 91 %", words)
    assert html == page(pages, path.stem) and page(pages, "20200101-000000-abcdef").count("<section") == 3
