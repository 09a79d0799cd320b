"""The page of a run, in a browser, and ``offload report``."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded import END, TIMELINE, begin, losses, step, write

from offload.cli import main
from offload.run import units
from offload.run.figures import figures
from offload.run.page import page
from offload.run.reading import read_run
from offload.run.thin import POINTS_MAX, thin
from offload.run.words import words


def steps(count: int, **options: int) -> list[dict[str, Any]]:
    return [step(at + 1, loss, **options) for at, loss in enumerate(losses(count))]


RUNS: dict[str, list[dict[str, Any]]] = {
    "a usual one": [begin(), *steps(60), TIMELINE, END],
    "two drives": [begin(num_drives=2), *steps(30, num_drives=2), END],
    "no NVMe": [begin(num_drives=0), *steps(30, num_drives=0), END],
    "one step": [begin(), step(1, 5.0), END],
    "no step": [begin(), END],
    "no loss": [begin(), *(step(at) for at in range(1, 20)), END],
    "NaN in between": [begin(), *(step(at, math.nan if 10 < at < 20 else 3.0) for at in range(1, 40)), END],
    "NaN only": [begin(), *(step(at, math.nan) for at in range(1, 20)), END],
    "resumed": [begin(), *steps(40), begin(), *(step(at, 3.0) for at in range(31, 50))],
    "logged losses": [
        begin(),
        *(step(at) for at in range(1, 41)),
        *({"kind": "log", "time": 1e9, "step": at, "values": {"loss": 3.0 + 1 / at}} for at in range(10, 41, 10)),
        END,
    ],
    "metrics": [begin(), *steps(5), {"kind": "log", "time": 1e9, "step": 5, "values": {"<b>": 1.0, "acc": 0.5}}, END],
}
CHARTS = {
    "a usual one": 7, "two drives": 6, "no NVMe": 6, "one step": 6, "no step": 0, "no loss": 5, "NaN in between": 6,
    "NaN only": 5, "resumed": 6, "logged losses": 6, "metrics": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, where it is."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


def look(browser: Any, file: Path, width: int, scheme: str) -> tuple[Any, list[str]]:
    """The page as the browser has it, and what it complains of or asks the network for."""
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    faults: list[str] = []
    tab.on("console", lambda message: faults.append(message.text))
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("request", lambda request: request.url.startswith(("file:", "data:")) or faults.append(request.url))
    tab.goto(file.as_uri())
    return tab, faults


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", RUNS)
def test_a_browser_shows_every_kind_of_run(browser, tmp_path: Path, name: str) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(read_run(write(tmp_path / "run", RUNS[name]))))
    tab, faults = look(browser, file, 1200, "light")
    for width, scheme in ((1200, "light"), (390, "dark")):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(color_scheme=scheme)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        drawn = tab.locator("svg[role=img]")
        assert drawn.count() == CHARTS[name]
        assert all(drawn.nth(at).get_attribute("aria-label") for at in range(drawn.count()))
        assert "NaN" not in tab.locator("main").inner_html() and "None" not in tab.locator("main").inner_text()
        labels = tab.locator(".x span, .y span").evaluate_all(_OVERLAPS)
        assert labels == []
    assert faults == []
    tab.close()


_OVERLAPS = """spans => spans.flatMap((one, at) => {
  const next = spans[at + 1];
  if (!next || next.parentElement !== one.parentElement) return [];
  const a = one.getBoundingClientRect(), b = next.getBoundingClientRect();
  const apart = a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
  return apart ? [] : [one.textContent + " on " + next.textContent];
})"""
"""The labels of axes that cover their neighbours."""


def test_values_are_shown_under_the_pointer_and_the_timeline_zooms(browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(read_run(write(tmp_path / "run", RUNS["a usual one"]))))
    tab, faults = look(browser, file, 1200, "light")
    plot = tab.locator(".plot[data-chart]").nth(1)
    plot.hover()
    assert re.search(r"step \d+step 1\.\d+ sbound 1\.00 s", tab.locator(".tip").inner_text().replace("\n", ""))
    lanes = tab.locator(".lanes svg")
    before = lanes.get_attribute("viewBox")
    lanes.hover()
    tab.mouse.wheel(0, -300)
    tab.wait_for_function(f"document.querySelector('.lanes svg').getAttribute('viewBox') != {before!r}")
    lanes.dblclick()
    assert lanes.get_attribute("viewBox") == before
    assert faults == []
    tab.close()


def test_names_of_others_are_no_html(tmp_path: Path) -> None:
    html = page(read_run(write(tmp_path / "run", RUNS["metrics"])))
    assert "<b>:" not in html and "<h3><b></h3>" not in html and "<h3>&lt;b&gt;</h3>" in html


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    count = 20_000
    folder = write(tmp_path / "run", [begin()])
    some = [json.dumps(of_step).replace(f'"step": {of_step["step"]}', '"step": {}') for of_step in steps(500)]
    with (folder / "run.jsonl").open("a") as file:
        file.writelines(some[at % 500].replace("{}", str(at + 1), 1) + "\n" for at in range(count))
    run = read_run(folder)
    assert figures(run)["steps"] == count
    assert len(page(run)) < 400_000


def test_thinning_keeps_means_and_peaks() -> None:
    values = [1.0] * 10_000
    values[5000] = 41.0
    values[6000] = math.nan
    short = thin(range(10_000), values)
    assert len(short.x) == POINTS_MAX and short.x[-1] == 9999
    assert max(short.high) == 41 and max(short.mean) == pytest.approx(1 + 40 / 25) and min(short.low) == 1


def test_a_bound_that_was_beaten_is_shown_so_on_the_page_and_in_words(tmp_path: Path) -> None:
    beaten = [step(at, 3.0) | {"bound_seconds": 1.5, "seconds": 1.2} for at in range(1, 20)]
    run = read_run(write(tmp_path / "run", [begin(), *beaten, END]))
    found = figures(run)
    assert found["efficiency"] == pytest.approx(1.25)
    assert "125 % of the bound" in words(found) and "<b>125 %</b><span>of the bound" in page(run)


def test_numbers_in_words() -> None:
    assert [units.seconds(value) for value in (0, 2e-6, 0.0634, 1.284, 90, 86400 * 20)] == [
        "0 s", "2.00 µs", "63.4 ms", "1.28 s", "1.50 min", "20.0 d",
    ]  # fmt: skip
    assert [units.nbytes(value) for value in (0, 999, 1500, 39.3e6, 600e12)] == [
        "0 B", "999 B", "1.50 kB", "39.3 MB", "600 TB",
    ]  # fmt: skip
    assert [units.share(value) for value in (0, 0.000067, 0.76, 1)] == ["0 %", "0.0067 %", "76 %", "100 %"]
    assert [units.count(value) for value in (0, 7, 15_312_345)] == ["0", "7", "15,300,000"]
    assert units.short("50.0 ms") == "50 ms" and units.short("100 MB") == "100 MB"
    assert units.places(0, 200, 5, units.seconds) == [0, 60, 120, 180]
    assert units.ticks(0, 1.25, 5) == [0, 0.5, 1.0] and units.ticks(3, 3, 5) == [3]


def test_the_command_writes_the_page_and_the_figures(tmp_path: Path, capsys, monkeypatch) -> None:
    run = write(tmp_path / "run", RUNS["a usual one"])
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    assert "finished, 60 steps" in said and "of the bound (compute)" in said and "more such steps" in said
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["report", str(run), "--json", "--out", str(tmp_path / "page.html")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["page"] == str(tmp_path / "page.html") and (tmp_path / "page.html").exists()
    (drive,) = found["drives"]
    assert drive["write_bytes"] == 60 * 4e8 and drive["endurance_steps"] == round((600e12 - 60 * 4e8) / 4e8)
    assert drive["endurance_days"] == pytest.approx(drive["endurance_steps"] * 1.2 / 86400, rel=0.02)
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", shown.append)
    assert main(["report", str(run), "--open"]) == 0 and shown == [(run / "report.html").as_uri()]
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 2
    assert "run.jsonl is missing" in capsys.readouterr().err


def test_a_page_is_made_without_torch() -> None:
    code = "import sys, offload.run.page, offload.run.words; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
