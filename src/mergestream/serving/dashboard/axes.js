// The frame of a chart: one slot a step from left to right, a scale with units, marks where a guard rail spoke.

import { shape } from "./dom.js";
import { sign, worst } from "./severity.js";

const FEWEST_SLOTS = 24; // so that the first steps do not fill the chart
export const MARGIN = { left: 46, right: 10, top: 24, bottom: 30 };

export const ceilingOf = (highest) => {
  if (!(highest > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(highest));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((top) => top >= highest * 1.0001) ??
    10 * power;
};

const ticksOf = (top) => {
  const power = 10 ** Math.floor(Math.log10(top));
  const gap = [0.1, 0.2, 0.25, 0.5, 1, 2, 5].map((factor) => factor * power).find((each) => top / each <= 5.001) ?? top;
  return Array.from({ length: Math.floor(top / gap + 1e-6) + 1 }, (_, place) => place * gap);
};

// Where slots and values lie in a picture of this size, in pixels.
export const scaleOf = (width, height, steps, top) => {
  const [inner, tall] = [width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom];
  const slot = inner / Math.max(steps.length, FEWEST_SLOTS);
  return {
    width,
    height,
    top,
    slot,
    steps,
    left: (place) => MARGIN.left + place * slot,
    middle: (place) => MARGIN.left + (place + 0.5) * slot,
    y: (value) => MARGIN.top + tall * (1 - value / top),
    placeAt: (x) => Math.max(0, Math.min(steps.length - 1, Math.floor((x - MARGIN.left) / slot))),
  };
};

const decimals = (top) => (top >= 10 ? 0 : top >= 1 ? 1 : top >= 0.1 ? 2 : 3);

const valueAxis = (scale, unit) => [
  ...ticksOf(scale.top).flatMap((value) => [
    shape("line", {
      class: "grid",
      x1: MARGIN.left,
      x2: scale.width - MARGIN.right,
      y1: scale.y(value),
      y2: scale.y(value),
    }),
    shape(
      "text",
      { class: "tick", x: MARGIN.left - 7, y: scale.y(value) + 4, "text-anchor": "end" },
      value.toFixed(Number.isInteger(value) && scale.top > 5 ? 0 : decimals(scale.top)),
    ),
  ]),
  shape("text", { class: "unit", x: 2, y: 12 }, unit),
];

const stepAxis = (scale) => {
  const wanted = Math.max(1, Math.floor((scale.width - MARGIN.left) / 80));
  const every = [1, 2, 5, 10, 20, 25, 50, 100].find((each) => scale.steps.length / each <= wanted) ?? 200;
  const y = scale.height - MARGIN.bottom + 16;
  const ticks = scale.steps.flatMap(({ step }, place) => (step % every ? [] : [
    shape("text", { class: "tick", x: scale.middle(place), y, "text-anchor": "middle" }, String(step)),
  ]));
  return [
    ...ticks,
    shape("text", { class: "unit", x: scale.width - MARGIN.right, y: scale.height - 1, "text-anchor": "end" }, "step"),
  ];
};

const findingMarks = (scale) =>
  scale.steps.flatMap(({ findings }, place) => {
    const severity = worst(findings ?? []);
    if (!severity || severity === "info") return [];
    const size = Math.max(5, Math.min(9, scale.slot));
    return [
      shape("g", {
        transform: `translate(${scale.middle(place) - size / 2} ${MARGIN.top - size - 3}) scale(${size / 12})`,
      }, sign(severity)),
    ];
  });

export const frame = (scale, unit, label, ...drawn) =>
  shape(
    "svg",
    {
      class: "chart",
      role: "img",
      "aria-label": label,
      viewBox: `0 0 ${scale.width} ${scale.height}`,
      width: scale.width,
      height: scale.height,
    },
    shape("g", { "aria-hidden": "true" }, valueAxis(scale, unit), stepAxis(scale), drawn, findingMarks(scale)),
    shape("line", { class: "picked", y1: MARGIN.top, y2: scale.height - MARGIN.bottom, visibility: "hidden" }),
  );

export const movePicked = (svg, scale, place) => {
  const line = svg.querySelector(".picked");
  line.setAttribute("visibility", place === null ? "hidden" : "visible");
  if (place === null) return;
  line.setAttribute("x1", scale.middle(place));
  line.setAttribute("x2", scale.middle(place));
};
