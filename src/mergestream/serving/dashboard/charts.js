// Series over steps as pictures: [{ name, style, values }] in, shapes out. Nothing is computed but positions.

import { shape } from "./dom.js";

const MANY = 60; // steps from which points are not drawn one by one
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const round = (value) => value.toFixed(1);

// Where each series begins and ends when it is put on top of those before it; null where nothing was measured.
const stacked = (steps, series) => {
  const heights = steps.map(() => 0);
  return series.map(({ values }) =>
    values.map((value, place) => {
      if (!isNumber(value)) return null;
      const low = heights[place];
      heights[place] += Math.max(0, value);
      return [low, heights[place]];
    })
  );
};

const block = (scale, place, [low, high], space) => {
  const [x, end] = [round(scale.left(place) + space / 2), round(scale.left(place + 1) - space / 2)];
  return high > low ? `M${x} ${round(scale.y(low))}H${end}V${round(scale.y(high))}H${x}Z` : "";
};

// A bar a step.
export const drawBars = (scale, series) => {
  const space = scale.slot > 4 ? Math.min(2, scale.slot / 4) : 0;
  return stacked(scale.steps, series).map((bounds, number) =>
    shape("path", {
      class: `area bars ${series[number].style}`,
      d: bounds.map((bound, place) => (bound ? block(scale, place, bound, space) : "")).join(""),
    })
  );
};

// The places where something was measured, in runs without a gap.
const runsOf = (bounds) =>
  bounds.reduce((runs, bound, place) => {
    if (bound && place > 0 && bounds[place - 1]) runs.at(-1).push(place);
    else if (bound) runs.push([place]);
    return runs;
  }, []);

// Shares side by side without gaps, as stairs: a step has one value, and nothing lies between two steps.
export const drawAreas = (scale, series) =>
  stacked(scale.steps, series).map((bounds, number) => {
    const outline = (run) => {
      const above = run.map((place) => `V${round(scale.y(bounds[place][1]))}H${round(scale.left(place + 1))}`);
      const below = [...run].reverse().map((place) =>
        `V${round(scale.y(bounds[place][0]))}H${round(scale.left(place))}`
      );
      return `M${round(scale.left(run[0]))} ${round(scale.y(bounds[run[0]][0]))}${above.join("")}${below.join("")}Z`;
    };
    return shape("path", { class: `area ${series[number].style}`, d: runsOf(bounds).map(outline).join("") });
  });

const POINTS = [
  "M-3.5 0A3.5 3.5 0 1 1 3.5 0A3.5 3.5 0 1 1 -3.5 0Z",
  "M-3.2 -3.2H3.2V3.2H-3.2Z",
  "M0 -4.2L4.2 3.4H-4.2Z",
  "M0 -4.6L4.6 0L0 4.6L-4.6 0Z",
];
export const point = (number, style, x, y, size = 1) =>
  shape("path", {
    class: `point ${style}`,
    d: POINTS[number % POINTS.length],
    transform: `translate(${round(x)} ${round(y)}) scale(${size})`,
  });

const pathOf = (scale, values) => {
  let isOpen = false;
  return values.map((value, place) => {
    if (!isNumber(value)) {
      isOpen = false;
      return "";
    }
    const command = isOpen ? "L" : "M";
    isOpen = true;
    return `${command}${round(scale.middle(place))} ${round(scale.y(value))}`;
  }).join("");
};

// A line per series, its own point shape at its end, and at every step while there are few.
export const drawLines = (scale, series) =>
  series.flatMap(({ style, values }, number) => {
    const measured = values.flatMap((value, place) => (isNumber(value) ? [place] : []));
    const pointed = scale.steps.length <= MANY ? measured : measured.slice(-1);
    return [
      shape("path", { class: `line ${style}`, d: pathOf(scale, values) }),
      ...pointed.map((place) =>
        point(number, style, scale.middle(place), scale.y(values[place]), place === measured.at(-1) ? 1 : 0.55)
      ),
    ];
  });

export const drawLimit = (scale, value, words) => [
  shape("line", { class: "limit", x1: scale.left(0), x2: scale.width - 10, y1: scale.y(value), y2: scale.y(value) }),
  shape("text", { class: "tick", x: scale.width - 10, y: scale.y(value) + 14, "text-anchor": "end" }, words),
];

// The same mark as in the picture, for a legend.
export const swatch = (kind, number, style) =>
  shape(
    "svg",
    { class: "swatch", viewBox: "0 0 22 12", width: 22, height: 12, "aria-hidden": "true" },
    kind === "lines"
      ? [shape("path", { class: `line ${style}`, d: "M0 6H22" }), point(number, style, 11, 6)]
      : shape("rect", { class: `area ${style}`, x: 4, y: 0, width: 13, height: 12, rx: 2 }),
  );

// Shares of one, as a thin bar.
export const bar = (series) => {
  let from = 0;
  const blocks = series.map(({ style, value }) => {
    const width = Math.max(0, isNumber(value) ? value : 0) * 100;
    const block = shape("rect", {
      class: `area ${style}`,
      x: from.toFixed(2),
      y: 0,
      width: width.toFixed(2),
      height: 6,
    });
    from += width;
    return block;
  });
  return shape(
    "svg",
    { class: "bar", "aria-hidden": "true", viewBox: "0 0 100 6", preserveAspectRatio: "none" },
    blocks,
  );
};
