// One quantity of a stream over its steps, drawn by uPlot (vendor/). One slot per step, from left to right.

import { create } from "./dom.js";
import { icon, worst } from "./severity.js";

const { uPlot } = globalThis;
const HEIGHT = 210;
const FEWEST_SLOTS = 24; // so that the first steps do not fill the chart
const STEP_GAPS = [1, 2, 5, 10, 20, 50, 100, 200];
const FONT = "11.5px system-ui, sans-serif";
const ALPHA = { round0: "", round1: "99", round2: "59" }; // from the ninth expert on the colours come again, lighter
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3]]; // so that lines differ by more than their colour

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const colourOf = (style) => {
  const [name, round] = style.split(" ");
  return `${variable(name)}${ALPHA[round]}`;
};
export const dashOf = (number) => DASHES[number % DASHES.length];

// Lower and upper edge of every series when each is put on top of those before it; null where nothing was measured.
const stacked = (series, steps) => {
  const heights = steps.map(() => 0);
  return series.map(({ values }) => {
    const low = [...heights];
    const high = values.map((value, place) => (value === null ? null : (heights[place] += Math.max(0, value))));
    return { low, high };
  });
};

const blocks = (series, steps, width) => {
  const column = (values) => ({ unit: 1, values: () => values });
  const edges = stacked(series, steps);
  return {
    rows: edges.map(({ high }) => high),
    drawn: series.map(({ style }, number) => ({
      fill: colourOf(style),
      width: 0,
      points: { show: false },
      paths: uPlot.paths.bars({
        disp: {
          x0: column(steps.map(({ step }) => step - width / 2)),
          size: column([width]),
          y0: column(edges[number].low),
          y1: column(edges[number].high),
        },
      }),
    })),
  };
};

const lines = (series) => ({
  rows: series.map(({ values }) => values),
  drawn: series.map(({ style }, number) => ({
    stroke: colourOf(style),
    width: 2,
    dash: dashOf(number),
    points: { size: 6, fill: colourOf(style), dash: [] },
  })),
});

const DRAWN = { areas: (series, steps) => blocks(series, steps, 1), bars: (series, steps) => blocks(series, steps, 0.9), lines };

const limitLine = { stroke: () => variable("soft"), width: 1, dash: [3, 4], points: { show: false } };

const axesOf = (unit, lastStep) => {
  const common = { stroke: variable("soft"), font: FONT, labelFont: FONT, ticks: { show: false } };
  return [
    {
      ...common,
      label: "step",
      labelSize: 16,
      size: 24,
      space: 60,
      incrs: STEP_GAPS,
      grid: { show: false },
      values: (_, steps) => steps.map((step) => (step > lastStep ? null : String(step))),
    },
    { ...common, label: unit, labelSize: 18, size: 42, grid: { stroke: variable("line"), width: 1 } },
  ];
};

const highest = (rows) => Math.max(0, ...rows.flat().filter((value) => value !== null));

export class Chart {
  #picked = create("div", { class: "picked", hidden: true });
  #step = null; // the picked one

  // quantity: of quantities.js; label: the chart in words, for screen readers.
  constructor(target, { kind, unit, top }, { steps, series, limit }, label) {
    const { rows, drawn } = DRAWN[kind](series, steps);
    if (limit) {
      rows.push(steps.map(() => limit));
      drawn.push(limitLine);
    }
    const [first, last] = [steps[0].step, steps.at(-1).step];
    const ceiling = top ?? (highest(rows) * 1.08 || 1);
    this.plot = new uPlot(
      {
        class: "chart",
        width: Math.floor(target.clientWidth),
        height: HEIGHT,
        padding: [16, 8, 0, 0],
        legend: { show: false },
        cursor: { show: false },
        scales: {
          x: { time: false, range: [first - 0.5, first - 0.5 + Math.max(last - first + 1, FEWEST_SLOTS)] },
          y: { range: [0, ceiling] },
        },
        axes: axesOf(unit, last),
        series: [{}, ...drawn],
        hooks: { ready: [() => this.#ready(steps)] },
      },
      [steps.map(({ step }) => step), ...rows],
      target,
    );
    this.plot.root.setAttribute("role", "img");
    this.plot.root.setAttribute("aria-label", label);
  }

  pick(step) {
    this.#step = step;
    this.#picked.hidden = step === null;
    if (step !== null && this.plot.status === 1) this.#place(this.#picked, step);
  }

  // The place among the steps that the pointer is over.
  placeAt(event) {
    return this.plot.posToIdx(event.clientX - this.plot.over.getBoundingClientRect().left);
  }

  remove() {
    this.plot.destroy();
  }

  #ready(steps) {
    const marks = steps.flatMap(({ step, findings }) => {
      const severity = worst(findings ?? []);
      if (!severity || severity === "info") return [];
      const mark = create("span", { class: "finding-mark" }, icon(severity, 9));
      this.#place(mark, step);
      return [mark];
    });
    this.plot.over.append(...marks, this.#picked);
    this.pick(this.#step);
  }

  #place(element, step) {
    element.style.left = `${this.plot.valToPos(step, "x")}px`;
  }
}
