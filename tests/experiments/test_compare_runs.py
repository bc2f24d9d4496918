"""The page that compares runs: its data, what it refuses, and what a browser shows of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from tests.worlds import refused_by, run_main

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """A finished run, and one that was killed while it wrote the metrics of its third step, without pass@1 so far."""
    for name, steps, rate in (("finished", 20, 1e-3), ("killed", 2, 1e-4)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        config = {"name": name, "steps": 20, "trainer": {"learning_rate": rate, "zero_stage": 1}}
        (folder / "config.json").write_text(json.dumps(config))
        rows: list[dict[str, Any]] = [
            {"training/global_step": step, "critic/rewards/mean": step / 20 * 500 * rate, "<odd>": float("nan")}
            for step in range(1, steps + 1)
        ]
        if name == "finished":
            rows.insert(0, {"training/global_step": 0, "val-core/pass@1": 0.25})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "metrics.jsonl").write_text(text if name == "finished" else text + '{"training/global_step": 3, "cri')
    return [str(tmp_path / "runs" / name) for name in ("finished", "killed")]


def test_what_the_page_holds(runs: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run_main("compare_runs", [*runs, "--output", str(page)])
    found = re.search(r"const DATA = (.*);\n", page.read_text())
    assert found is not None
    data = json.loads(found[1])
    finished, killed = data["runs"]
    assert (finished["name"], finished["step"], killed["name"], killed["step"]) == ("finished", 20, "killed", 2)
    assert killed["curves"]["critic/rewards/mean"] == [[1, pytest.approx(0.0025)], [2, pytest.approx(0.005)]]
    assert data["main"] == ["critic/rewards/mean", "val-core/pass@1"] and data["others"] == ["<odd>"]
    assert data["differ"] == result["differ"] == {"trainer.learning_rate": [1e-3, 1e-4]}
    assert result["last"]["finished"] == {"critic/rewards/mean": 0.5, "val-core/pass@1": 0.25}
    assert not re.search(r"(src|href)=|@import|url\(", page.read_text()), "the page needs nothing else"
    assert "<odd>" not in page.read_text(), "a name cannot end the script"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")
def test_a_browser_shows_the_curves(runs: list[str], tmp_path: Path) -> None:
    run_main("compare_runs", [*runs, "--output", str(tmp_path / "page.html")])
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,800"]
    for what in (f"--screenshot={tmp_path / 'page.png'}", "--dump-dom"):
        command = [str(CHROMIUM), *flags, what, f"file://{tmp_path / 'page.html'}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    curves = re.findall(r'<path class="curve" d="M([^"]*)"', done.stdout)
    assert [curve.count("L") + 1 for curve in curves] == [20, 2, 1], "rewards of both, pass@1 of one"
    heights = [float(point.split(",")[1]) for point in curves[0].split("L")]
    assert np.allclose(np.diff(heights), np.diff(heights)[0], atol=0.11) and heights[0] > heights[-1], "a straight rise"
    picture = plt.imread(tmp_path / "page.png")[:, :, :3]
    first_chart = picture[100:330, 20:440]
    for colour in ((0, 0x72, 0xB2), (0xD5, 0x5E, 0)):
        assert (np.abs(first_chart * 255 - colour).max(axis=2) < 8).sum() > 20, "a curve of each run's colour"
    assert "0.05" in done.stdout and "20 of 20" in done.stdout and "2 of 20" in done.stdout


def test_what_is_no_run(tmp_path: Path) -> None:
    told = refused_by("compare_runs", [str(tmp_path / "none"), "--output", str(tmp_path / "page.html")])
    assert "there is no step in" in told and "give a run's folder" in told
    (tmp_path / "metrics.jsonl").write_text('{"training/global_step": 1}\n{"training/\n{"training/global_step": 3}\n')
    told = refused_by("compare_runs", [str(tmp_path), "--output", str(tmp_path / "page.html")])
    assert "metrics.jsonl:2: not valid JSON" in told
    (tmp_path / "metrics.jsonl").write_text('{"training/global_step": 1}\n')
    told = refused_by("compare_runs", [str(tmp_path), "--output", str(tmp_path / "page.html")])
    assert f"error: runs='{tmp_path}': {tmp_path}/config.json is missing; restore it" in told
    (tmp_path / "config.json").write_text('{"steps": ')
    told = refused_by("compare_runs", [str(tmp_path), "--output", str(tmp_path / "page.html")])
    assert f"{tmp_path}/config.json: not valid JSON" in told
    (tmp_path / "config.json").write_text("{}")
    for row in ('{"critic/rewards/mean": 1}', "[1]", '{"training/global_step": null}'):
        (tmp_path / "metrics.jsonl").write_text('{"training/global_step": 1}\n' + row + "\n")
        told = refused_by("compare_runs", [str(tmp_path), "--output", str(tmp_path / "page.html")])
        assert f"error: runs='{tmp_path}': {tmp_path}/metrics.jsonl:2 has no `training/global_step`; restore" in told
    assert "give the folder of at least one run" in refused_by("compare_runs", [])
