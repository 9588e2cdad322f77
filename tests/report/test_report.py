"""A report shows what the records hold, nothing that is invalid, and needs nothing but its own file."""

import csv
import io
import re
from dataclasses import replace

import pytest

from slipstream.records.store import RecordSet, read_records, write_record
from slipstream.report import lines
from slipstream.report.build import ReportError, write_report
from slipstream.report.contents import make_contents
from slipstream.report.page import html_page
from slipstream.report.series import Grid, output_per_device, tpot_median
from slipstream.report.tables import delta_table
from slipstream.report.text import cells_csv, markdown
from slipstream.report.times import time_table
from tests.report.sample import ARMS, perplexity, point, sample_set


@pytest.fixture(scope="module")
def contents():
    return make_contents(sample_set())


@pytest.fixture(scope="module")
def page(contents):
    return html_page(contents)


def test_the_page_is_self_contained(page):
    addresses = re.findall(r'(?:src|href)="([^"]{0,40})', page)
    assert addresses
    assert all(address.startswith(("data:image/svg+xml;base64,", "#")) for address in addresses)
    assert "<script" not in page


def test_what_servers_wrote_is_escaped(page):
    assert "&lt;script&gt;alert(" in page


def test_every_figure_and_section_is_there(page):
    for words in (
        "Throughput and speed-up",
        "Serving metrics",
        "Throughput against interactivity",
        "Share of drafts accepted, by position",
        "Where step time goes",
        "What decoding costs against the tokens a request has behind it",
        "Speed-up against prompt length",
        "GSM8K",
        "Perplexity",
        "A CPU that scored texts",
        "Token for token",
        "Invalid points, left out of every figure",
        "Warnings",
        "Provenance",
    ):
        assert words in page, words
    assert page.count("data:image/svg+xml") == 8


def test_prompt_lengths_are_compared_where_answers_are_as_long():
    points = [
        replace(point(arm, 4, seed, workload, context), output_tokens=answer)
        for arm in ("no-spec", "eagle3-bf16")
        for seed in (1, 2)
        for workload, context, answer in (("1k1k", 64, 60), ("1k8k", 64, 512), ("8k1k", 512, 64))
    ]
    figure = lines.speedup_by_context(Grid(points)).figure
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles == ["tp1, concurrency 4: 1k1k, 8k1k"] * 2
    drawn = [line.get_xdata() for axis in figure.axes for line in axis.lines if len(line.get_xdata()) == 2]
    assert any(list(xs) == [64, 512] for xs in drawn)
    assert lines.speedup_by_context(Grid([one for one in points if one.key.workload != "8k1k"])) is None


def test_time_is_told_by_phase_and_not_made_up_for_servers_that_do_not_tell():
    told = point("eagle3-bf16", 4, 1, context=1024)
    other = replace(point("ngram", 4, 1, context=1024), phases=None)
    table = time_table(Grid([told, other]))
    rows = {row[1]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    phases, accepted = told.phases, told.acceptance.num_accepted_tokens
    assert rows["eagle3-bf16"]["prefill"] == f"{phases.prefill_s / phases.total_s:.0%}"
    assert rows["eagle3-bf16"]["ms"] == f"{1e3 * phases.verify_s / accepted:.2f}"
    assert rows["eagle3-bf16"]["busy"] == f"{phases.total_s / told.throughput.duration_s:.0%}"
    assert {rows["ngram"][name] for name in ("prefill", "draft", "verify", "host", "ms")} == {"not told"}
    assert time_table(Grid([other])) is None


def test_changes_are_shown_as_published_in_per_cent_of_the_baseline():
    grid = Grid([point(arm, 4, seed, noise=0.0) for arm in ("no-spec", "eagle3-bf16") for seed in (1, 2, 3)])
    (setting,) = grid.settings
    table = delta_table(grid, setting)
    assert table.caption.endswith("change (Δ) from no-spec")
    assert table.header == ("Conc.", "metric", "no-spec", "eagle3-bf16")
    assert [row[1] for row in table.rows] == ["TPOT ↓", "tok/s ↑", "ITL ↓", "TTFT ↓"]
    tpot, throughput = table.rows[0], table.rows[1]
    before, after = float(throughput[2]), float(throughput[3].split()[0])
    assert f"(+{100 * (after / before - 1):.0f}" in throughput[3]
    assert "(−" in tpot[3]
    assert "▲" in tpot[3]


def test_a_planted_speed_up_is_shown_with_its_verdict(contents):
    text = markdown(contents)
    row = r"\| 1 \| [\d.]+ \| [\d.]+ \((\d\.\d\d)x\) (.) \|.*\n\|  \|  \| (\d\.\d\d)–(\d\.\d\d) \|"
    cell = re.search(row, text)
    ratio, mark, low, high = cell.groups()
    # The model behind the sample: a step of 13.15 ms against one of 16.6 ms that emits 2.83 tokens.
    assert float(low) <= 2.25 <= float(high)
    assert float(ratio) == pytest.approx(2.25, rel=0.03)
    assert mark == "▲"


def test_tables_of_four_arms_and_one_device_are_at_most_80_columns_wide():
    arms = ("no-spec", "eagle3-bf16", "eagle3-fp8", "eagle3-int4")
    points = [replace(point("no-spec", 4, 1), key=replace(point("no-spec", 4, 1).key, arm=arm)) for arm in arms]
    text = markdown(make_contents(RecordSet(points=tuple(points))))
    rows = [line for line in text.partition("## Provenance")[0].splitlines() if line.startswith("|")]
    assert len(rows) > 10
    assert [row for row in rows if len(row) > 80] == []


def test_no_interval_hides_another():
    points = [point(arm, c, seed) for arm in ARMS for c in (1, 2) for seed in (1, 2, 3)]
    (axis,) = lines.speedup_by_concurrency(Grid(points)).figure.axes
    at_one = [container.lines[2][0].get_segments()[0][0][0] for container in axis.containers]
    assert len(set(at_one)) == len(ARMS) - 1
    assert all(0.85 < x < 1.15 for x in at_one)


def test_the_baseline_comes_first_and_arms_keep_their_place():
    grid = Grid(sample_set().points)
    assert [grid.arms(setting)[0] for setting in grid.settings] == ["no-spec", "no-spec"]
    assert set(grid.all_arms()) == set(ARMS)


def test_invalid_points_count_nowhere(contents):
    grid = Grid(sample_set().points)
    setting = next(s for s in grid.settings if s.workload == "chat")
    cell = grid.cell(setting, "eagle3-fp8", 8)
    assert len(cell.records) == 2
    assert grid.speedup(cell, output_per_device).num_pairs == 2
    assert "1 of 96 points are invalid" in contents.headlines[-2]


def test_a_report_opens_with_one_figure_for_each_comparison(contents, page):
    figures = {headline.words.partition(" over ")[0]: headline for headline in contents.figures}
    assert set(figures) == set(ARMS) - {"no-spec"}
    for headline in contents.figures:
        assert headline.figure in page
        assert page.index(headline.words) < page.index('<ul class="headlines">')
    eagle = figures["eagle3-bf16"]
    low, high = re.search(r"interval (\S+) to (\S+)\.$", eagle.words).groups()
    assert 1 < float(low) < float(eagle.figure.rstrip("x")) < float(high)
    assert "geometric mean of 8 loads" in eagle.words


def test_a_speed_up_plot_shows_whole_intervals(monkeypatch):
    grid = Grid([point(arm, 1, seed, noise=0.4) for arm in ("no-spec", "eagle3-bf16") for seed in (1, 2)])
    ratio = grid.speedup(grid.cell(grid.settings[0], "eagle3-bf16", 1), output_per_device)
    drawn = []
    monkeypatch.setattr(lines, "to_svg", lambda figure: drawn.append(figure) or "")
    lines.speedup_by_concurrency(grid)
    axis = drawn[0].axes[0]
    low, high = axis.get_ylim()
    assert low < ratio.low < ratio.high < high
    assert ratio.high / ratio.low > 12
    assert axis.get_yscale() == "log"  # else the lines would lie flat below the interval


def test_arms_keep_their_order_whichever_was_measured_first():
    first = [point("no-spec", 1, 1), point("eagle3-bf16", 1, 1), point("eagle3-fp8", 1, 1)]
    later = [point(arm, 1, 1, workload="8k1k") for arm in ("eagle3-fp8", "no-spec", "eagle3-bf16")]
    grid = Grid([*first, *later])
    assert grid.arms(grid.settings[0]) == grid.arms(grid.settings[1]) == ["no-spec", "eagle3-bf16", "eagle3-fp8"]


def test_csv_holds_every_cell_with_numbers():
    rows = list(csv.DictReader(io.StringIO(cells_csv(Grid(sample_set().points)))))
    assert len(rows) == 2 * 4 * 4
    fast = [row for row in rows if row["arm"] == "eagle3-bf16"]
    assert all(row["verdict"] == "faster" and float(row["speedup low"]) > 1 for row in fast)
    assert all(row["speedup"] == "" for row in rows if row["arm"] == "no-spec")


def test_accuracy_shows_the_answers_that_changed(contents):
    text = markdown(contents)
    assert "| eagle3-bf16 | 10 | 300 | 0.9167 | 0.9000 | 0 / 0 | 1.000 |" in text
    assert "| eagle3-fp8 | 10 | 300 | 0.9133 | 0.8900 | 1 / 2 | 1.000 |" in text
    assert "| eagle3-fp8 against no-spec | 31 of 32 | 17 | 0.0021 |" in text


def test_perplexity_is_shown_with_its_change_from_the_baseline(contents, tmp_path):
    (table,) = [table for section in contents.sections for table in section.tables if table.caption == "Perplexity"]
    assert table.rows == (
        ("fp8-keys", "no-spec", "2", "30", "7.3891", "−0.01667 ± 0.04444"),
        ("alone", "–", "2", "30", "7.3891", "–"),
    )
    write_record(tmp_path / "one.json", perplexity("alone"))
    assert "7.3891" in write_report([tmp_path], tmp_path / "page").markdown.read_text()


def test_one_seed_is_reported_as_unproven():
    records = RecordSet(points=(point("no-spec", 1, 1), point("eagle3-bf16", 1, 1)))
    text = markdown(make_contents(records))
    assert ") ? |\n|  |  | one seed |" in text
    assert "not told apart at 1 of 1 loads" in text


def measured(one, tok_s, cpu, started_at="2026-01-02T03:04:05+00:00"):
    hardware = replace(one.provenance.hardware, cpu=cpu)
    return replace(
        one,
        throughput=replace(one.throughput, output_tok_s_per_device=tok_s),
        provenance=replace(one.provenance, hardware=hardware, started_at=started_at),
    )


def test_arms_are_compared_on_one_machine_only():
    arms, seeds = {"no-spec": 100.0, "eagle3-bf16": 200.0}, (1, 2, 3)
    fast = [measured(point(arm, 4, seed), tok_s, "Fast") for arm, tok_s in arms.items() for seed in seeds]
    slow = [measured(point(arm, 4, seed), 10.0, "Slow") for arm in ("no-spec", "eagle3-fp8") for seed in seeds]
    grid = Grid([*fast, *slow])
    assert len(grid.settings) == 2
    found = {cell.arm: grid.speedup(cell, output_per_device) for cell in grid.cells() if cell.arm != "no-spec"}
    assert found["eagle3-bf16"].ratio == pytest.approx(2) and found["eagle3-fp8"].ratio == pytest.approx(1)
    assert "Slow" in markdown(make_contents(RecordSet((*fast, *slow))))
    alone = Grid([one for one in (*fast, *slow) if (one.key.arm == "no-spec") == (one in slow)])
    assert [alone.speedup(cell, output_per_device) for cell in alone.cells()] == [None, None]


@pytest.mark.parametrize("turn", [1, -1])
def test_a_point_that_was_measured_again_counts_once_as_it_was_last(turn):
    first = measured(point("no-spec", 4, 1), 100.0, "A CPU")
    again = measured(point("no-spec", 4, 1), 300.0, "A CPU", "2026-01-03T03:04:05+00:00")
    (cell,) = Grid([first, again, measured(point("no-spec", 4, 2), 100.0, "A CPU")][::turn]).cells()
    assert cell.by_seed(output_per_device) == {1: 300.0, 2: 100.0}
    assert cell.mean(output_per_device) == 200.0 and len(cell.records) == 2


def test_answers_that_came_in_one_piece_have_no_ratio_of_times():
    points = [point(arm, 1, seed) for arm in ("no-spec", "eagle3-bf16") for seed in (1, 2)]
    at_once = replace(points[2].latency, tpot_ms=replace(points[2].latency.tpot_ms, median=0.0))
    points[2] = replace(points[2], latency=at_once)
    markdown(make_contents(RecordSet(tuple(points))))
    grid = Grid(points)
    assert grid.speedup(grid.cells()[1], tpot_median, higher_is_better=False).num_pairs == 1


def test_equal_records_give_equal_pages(page):
    assert html_page(make_contents(sample_set())) == page


def test_the_report_is_made_from_files(tmp_path):
    for record in (point("no-spec", 1, 1), point("eagle3-bf16", 1, 1)):
        write_record(tmp_path / "points" / record.key.file_name(), record)
    assert len(read_records([tmp_path]).points) == 2
    files = write_report([tmp_path], tmp_path / "out")
    assert files.html.read_text().startswith("<!doctype html>")
    assert files.csv.read_text().count("\n") == 3
    images = sorted(path.name for path in files.images.iterdir())
    assert "01-speed-up.svg" in images
    assert len(images) == 2 * files.html.read_text().count("data:image/svg+xml")
    assert (files.images / "01-speed-up.png").read_bytes().startswith(b"\x89PNG")
    assert "](figures/01-speed-up.svg)" in files.markdown.read_text()
    with pytest.raises(ReportError, match="no records there"):
        write_report([tmp_path / "out"], tmp_path)
