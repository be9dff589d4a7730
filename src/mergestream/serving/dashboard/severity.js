// How grave a finding is: told by a word and by a shape, the colour only adds to it.

import { shape } from "./dom.js";

const ORDER = ["info", "warning", "alarm"];
const OUTLINES = {
  alarm: "M6 0.5 L12 11.5 L0 11.5 Z",
  warning: "M6 0 L12 6 L6 12 L0 6 Z",
  info: "M6 0 A6 6 0 1 1 5.99 0 Z",
};
const WORDS = { alarm: "Alarm", warning: "Warning", info: "Note" };

const known = (severity) => (ORDER.includes(severity) ? severity : "warning");
export const wordOf = (severity) => WORDS[known(severity)];
export const gravity = (severity) => ORDER.indexOf(known(severity));
export const worst = (findings) =>
  findings.map((each) => known(each.severity)).sort((one, other) => gravity(other) - gravity(one))[0] ?? null;

export const sign = (severity) => shape("path", { class: `sign ${known(severity)}`, d: OUTLINES[known(severity)] });
export const icon = (severity) =>
  shape("svg", { class: "icon", viewBox: "-1 -1 14 14", width: 14, height: 14, "aria-hidden": "true" }, sign(severity));
