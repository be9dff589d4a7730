// Estimated quality of the selected stream, without labels; each number with what it assumes.

import { create, keyed, redraw, say } from "./dom.js";
import { chip, wordOf } from "./severity.js";
import { fixed, plural } from "./words.js";

const share = fixed(3);
const percent = (value) => `${(100 * value).toFixed(1)} %`;
const interval = ({ low, high }) => `${percent(low)} to ${percent(high)}`;
const heading = (text) => create("th", { scope: "col" }, text);

const buildClass = () =>
  create("tr", {}, create("th", { scope: "row" }), ["td", "td", "td", "td"].map((tag) => create(tag)));
const buildEstimate = () =>
  create("li", {}, create("span", { class: "name" }), create("b"), create("p", { class: "quiet" }));

const estimates = ({ accuracy, prediction_sets: sets }) =>
  [
    ["Accuracy, by confidence", accuracy.by_confidence],
    ["Accuracy, by threshold", accuracy.by_threshold],
  ]
    .filter(([, estimate]) => estimate)
    .map(([name, estimate]) => [name, `${percent(estimate.value)} (${interval(estimate)})`, estimate.assumes])
    .concat(
      sets
        ? [[
          "Prediction sets",
          `${fixed(2)(sets.mean_size)} classes per image, for a coverage of ${percent(sets.coverage)} ` +
            `(class shares: ${sets.prevalence})`,
          sets.assumes,
        ]]
        : [],
    );

const updateEstimate = (row, texts) => texts.forEach((text, place) => say(row.children[place], text));

const updateClass = (row, each) => {
  const [name, mean, range, declared, verdict] = row.children;
  say(name, each.name);
  say(mean, share(each.value));
  say(range, `${share(each.low)} to ${share(each.high)}`);
  say(declared, share(each.declared));
  redraw(verdict, each.far, () => (each.far ? [chip("warning", `${wordOf("warning")}: far from declared`)] : []));
};

export class Quality {
  constructor() {
    this.about = create("p", { class: "quiet" });
    this.estimates = create("ul", { class: "estimates" });
    this.classes = create("tbody");
    const headings = ["Class", "Mean probability", "95 % interval", "Declared share", "Comparison"].map(heading);
    const table = create("table", { class: "classes" }, create("thead", {}, create("tr", {}, headings)), this.classes);
    this.prevalence = create("p", { class: "quiet" });
    this.element = create(
      "section",
      { id: "quality", class: "card", "aria-labelledby": "quality-title", hidden: true },
      create("h3", { id: "quality-title" }, "Estimated quality, without labels"),
      this.about,
      this.estimates,
      create("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Classes" }, table),
      this.prevalence,
    );
  }

  // quality: of the stream; null or without an accuracy where nothing is known.
  show(quality) {
    this.element.hidden = !quality?.accuracy;
    if (this.element.hidden) return;
    say(
      this.about,
      `Over the last ${plural(quality.images, "image")}. Estimates, not measurements: ` +
        "where images differ from those of the experts' sites they can be wrong.",
    );
    keyed(this.estimates, estimates(quality), ([name]) => name, buildEstimate, updateEstimate);
    keyed(this.classes, quality.classes, ({ name }) => name, buildClass, updateClass);
    this.prevalence.hidden = !quality.prevalence_assumes;
    say(this.prevalence, `Declared shares. ${quality.prevalence_assumes ?? ""}`);
  }
}
