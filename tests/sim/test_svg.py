"""Plots: well-formed, alone, the same each time, and with every axis named."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from sim.svg import Bars, Chart, Series, _Axis, figure, si


def _texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def _line(name: str = "a & b <c>") -> Series:
    return Series(name, [1, 10, 100], [1.0, 2.0, 3.0], marked=True)


def test_a_figure_is_well_formed_and_has_its_description() -> None:
    svg = figure([Chart("title", "size, B", "seconds", [_line()], x_log=True)], caption=("A caveat. " * 30,))
    words = _texts(svg)
    for expected in ("title", "size, B", "seconds", "a & b <c>", "1", "10", "100"):
        assert expected in words
    assert sum(word.startswith("A caveat.") for word in words) > 1, "long sentences are wrapped"
    assert svg == figure(
        [Chart("title", "size, B", "seconds", [_line()], x_log=True)], caption=("A caveat. " * 30,)
    )


def test_a_figure_is_self_contained() -> None:
    svg = figure([Bars("t", "x", ["g"], [("s", [1.0])], rule=(2.0, "here"))])
    assert svg.count("http") == 1, "the namespace is a name, nothing is fetched"
    assert "<script" not in svg
    assert "href" not in svg


def test_everything_drawn_is_within_the_picture() -> None:
    svg = figure(
        [Chart("t", "x", "y", [Series("s", [1, 1e13], [1e-6, 5e3])], x_log=True, y_log=True), *[_bars()] * 2],
        columns=2,
    )
    root = ET.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert (width, height) == (1200, 800)
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 600
            assert 0 <= y <= 400


def _bars() -> Bars:
    return Bars("t", "x", ["one", "two"], [("a", [1.0, 2.0]), ("b", [3.0, math.nan])])


def test_a_panel_without_data_says_so() -> None:
    assert "nothing to draw: no data" in _texts(figure([Chart("t", "x", "y", [Series("s", [], [])])]))
    assert "nothing to draw: no data" in _texts(figure([Bars("t", "x", ["g"], [("s", [math.nan])])]))


def test_values_without_a_logarithm_are_left_out() -> None:
    svg = figure([Chart("t", "x", "y", [Series("s", [0, 1, 10], [1.0, -1.0, 5.0])], x_log=True, y_log=True)])
    (line,) = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}polyline")
    assert len(line.attrib["points"].split()) == 1


@pytest.mark.parametrize(
    ("low", "high", "log"),
    [(0.0, 5e12, False), (3, 3, False), (0, 0, False), (1e-6, 1, True), (7, 7, True), (20, 90, True)],
)
def test_an_axis_has_enough_ticks_and_covers_its_values(low: float, high: float, log: bool) -> None:  # noqa: FBT001
    axis = _Axis([low, high], 0, 100, log=log, zero=False)
    assert 2 <= len(axis.ticks) <= 14
    assert -0.01 <= axis(low) <= axis(high) <= 100.01


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (5e12, "5 TB"),
        (999.9e9, "1 TB"),
        (1.5e-6, "1.5 uB"),
        (0.02, "20 mB"),
    ],
)
def test_numbers_are_formatted_briefly(value: float, text: str) -> None:
    assert si(value, "B") == text


def test_the_number_after_a_bar_does_not_touch_the_next_one() -> None:
    groups = [f"part {i}" for i in range(12)]
    bars = Bars("busy", "%", groups, [(name, [1.0 + i for i in range(12)]) for name in "abc"])
    found = [float(y) for y in re.findall(r'<rect x="[\d.]+" y="([\d.]+)"', figure([bars]))]
    steps = [below - above for above, below in pairwise(sorted(found))]
    assert len(found) == 36
    assert min(steps) >= 10.9, "a line of text is ten high"
