// Findings of a stream, newest first; consecutive steps with the same finding are one line.

import { create, keyed } from "./dom.js";
import { chip } from "./severity.js";
import { clock } from "./words.js";

const MOST = 100;

// [{ first, last, time, place, finding }]: the sentence and the time are those of the last step.
export const runsOf = (steps) => {
  const open = new Map();
  const runs = [];
  steps.forEach(({ step, time, findings }, place) => {
    for (const finding of findings ?? []) {
      const key = `${finding.severity} ${finding.code}`;
      let run = open.get(key);
      if (!run || run.place < place - 1) {
        run = { first: step };
        runs.push(run);
        open.set(key, run);
      }
      Object.assign(run, { last: step, time, place, finding });
    }
  });
  return runs.sort((one, other) => other.last - one.last);
};

const build = () => create("tr", {}, ["td", "td", "td", "td"].map((tag) => create(tag)));

const update = (row, { first, last, time, finding }) => {
  const [steps, when, severity, sentence] = row.children;
  steps.textContent = first === last ? `${last}` : `${first} to ${last}`;
  when.textContent = clock(time);
  severity.replaceChildren(chip(finding.severity));
  sentence.replaceChildren(finding.sentence, " ", create("code", {}, finding.code));
};

export class Findings {
  constructor() {
    const heading = (text) => create("th", { scope: "col" }, text);
    const head = create("thead", {}, create("tr", {}, ["Steps", "Last", "Severity", "Finding"].map(heading)));
    this.body = create("tbody");
    this.none = create("p", { class: "quiet" }, "No findings on the steps shown.");
    this.table = create(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-labelledby": "findings-title", hidden: true },
      create("table", { class: "texts" }, head, this.body),
    );
    const title = create("h3", { id: "findings-title" }, "Findings of this stream");
    this.element = create(
      "section",
      { class: "card", "aria-labelledby": "findings-title" },
      title,
      this.none,
      this.table,
    );
  }

  show(steps) {
    const runs = runsOf(steps).slice(0, MOST);
    this.none.hidden = runs.length > 0;
    this.table.hidden = runs.length === 0;
    keyed(this.body, runs, ({ first, finding }) => `${first} ${finding.severity} ${finding.code}`, build, update);
  }
}
