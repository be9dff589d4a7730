// Small marks beside names: a series in a legend, an expert on its card, the shares of a stream.

import { dashOf } from "./chart.js";
import { shape } from "./dom.js";

// The same mark as in the chart, for a legend.
export const swatch = (kind, number, style) =>
  shape(
    "svg",
    { class: `swatch ${style}`, viewBox: "0 0 22 12", width: 22, height: 12, "aria-hidden": "true" },
    kind === "lines"
      ? shape("path", { class: "line", d: "M0 6H22", "stroke-dasharray": dashOf(number).join(" ") || null })
      : shape("rect", { class: "area", x: 4, y: 0, width: 13, height: 12, rx: 2 }),
  );

// Shares of one, as a thin bar.
export const bar = (shares) => {
  let start = 0;
  const blocks = shares.map(({ style, value }) => {
    const width = 100 * Math.max(0, value ?? 0);
    const block = shape("rect", { class: `area ${style}`, x: start, y: 0, width, height: 6 });
    start += width;
    return block;
  });
  return shape("svg", { class: "bar", "aria-hidden": "true", viewBox: "0 0 100 6", preserveAspectRatio: "none" }, blocks);
};
