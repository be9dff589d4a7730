// The severity of a finding, as a word and a shape; colour only adds to them.

import { create, shape } from "./dom.js";

export const UNKNOWN = "unknown"; // whether there is an alarm, since a restart
const ORDER = ["info", UNKNOWN, "warning", "alarm"];
const OUTLINES = {
  alarm: "M6 0.5 L12 11.5 L0 11.5 Z",
  warning: "M6 0 L12 6 L6 12 L0 6 Z",
  [UNKNOWN]: "M6 0 A6 6 0 1 1 5.99 0 Z M6 2.5 A3.5 3.5 0 1 0 6.01 2.5 Z",
  info: "M6 0 A6 6 0 1 1 5.99 0 Z",
};
const WORDS = { alarm: "Alarm", warning: "Warning", [UNKNOWN]: "Unknown", info: "Note" };

const gradeOf = (severity) => (ORDER.includes(severity) ? severity : "warning");
export const wordOf = (severity) => WORDS[gradeOf(severity)];
export const gravity = (severity) => ORDER.indexOf(gradeOf(severity));
export const worst = (findings) =>
  findings.map((each) => gradeOf(each.severity)).sort((one, other) => gravity(other) - gravity(one))[0] ?? null;

export const icon = (severity, size = 14) =>
  shape(
    "svg",
    { class: "icon", viewBox: "-1 -1 14 14", width: size, height: size, "aria-hidden": "true" },
    shape("path", { class: `sign ${gradeOf(severity)}`, d: OUTLINES[gradeOf(severity)] }),
  );

export const chip = (severity, words = wordOf(severity)) => create("span", { class: "chip" }, icon(severity), words);
