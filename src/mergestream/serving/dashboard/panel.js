// The selected stream: its charts over steps and its findings.

import { create, say } from "./dom.js";
import { Findings } from "./findings.js";
import { Figure } from "./figure.js";
import { Quality } from "./quality.js";
import { QUANTITIES } from "./quantities.js";
import { ago, clock, NONE, plural, whole } from "./words.js";

export class Panel {
  #hovered = null; // a place among the steps, under the pointer
  #chosen = null; // the number of a step, set by the slider; null follows the newest
  #view = { steps: [], experts: [], classes: [] };
  #stream = null;

  constructor(actions) {
    this.name = create("h2", { id: "stream-title" });
    this.about = create("p", { class: "quiet" });
    this.figures = QUANTITIES.map((quantity) => new Figure(quantity, (place) => this.#hover(place)));
    this.slider = create("input", {
      type: "range",
      id: "step",
      min: 0,
      max: 0,
      value: 0,
      oninput: () => this.#slide(),
    });
    this.stepText = create("output", { for: "step", "aria-live": "off" });
    this.findings = new Findings();
    this.quality = new Quality();
    const button = (text, action) =>
      create("button", {
        type: "button",
        "data-administrator": true,
        hidden: true,
        onclick: () => action(this.#stream.name),
      }, text);
    this.element = create(
      "div",
      { id: "stream", role: "tabpanel", tabindex: 0 },
      create(
        "div",
        { class: "title-line" },
        create("div", {}, this.name, this.about),
        create(
          "div",
          { class: "choices" },
          button("Reset averages", actions.reset),
          button("Delete stream", actions.remove),
        ),
      ),
      create("div", { class: "step-choice" }, create("label", { for: "step" }, "Look at step"), this.slider, this.stepText),
      create("div", { class: "figures" }, this.figures.map((figure) => figure.element)),
      this.quality.element,
      this.findings.element,
    );
  }

  // stream: of the overview; steps: of its history, the same array while nothing has come.
  show(stream, steps, experts, classes) {
    const isOther = this.#stream?.name !== stream.name;
    const before = this.#view;
    if (isOther) this.#hovered = this.#chosen = null;
    this.#stream = stream;
    this.#view = { steps, experts, classes };
    say(this.name, stream.name);
    say(
      this.about,
      `${plural(stream.steps, "step")}, ${plural(stream.images, "image")}. Last: ${ago(stream.last_step_at)}. ` +
        `Head expert: ${stream.head_expert ?? NONE}`,
    );
    const changed = isOther || before.steps !== steps || before.experts.join("\n") !== experts.join("\n");
    if (changed) this.findings.show(steps);
    this.#showSteps(changed);
  }

  // After a change of theme: a canvas does not follow the page's colours by itself.
  redraw() {
    this.figures.forEach((figure) => figure.draw());
  }

  get #picked() {
    if (this.#hovered !== null) return Math.min(this.#hovered, this.#view.steps.length - 1);
    const place = this.#view.steps.findIndex(({ step }) => step === this.#chosen);
    return place < 0 ? null : place;
  }

  #hover(place) {
    if (this.#hovered === place) return;
    this.#hovered = place;
    this.#showSteps(false);
  }

  #slide() {
    const { steps } = this.#view;
    const place = Number(this.slider.value);
    this.#chosen = place >= steps.length - 1 ? null : steps[place].step;
    this.#showSteps(false);
  }

  #showSteps(changed) {
    const { steps } = this.#view;
    this.figures.forEach((figure) => {
      figure.element.hidden = steps.length === 0;
    });
    this.slider.disabled = steps.length < 2;
    if (!steps.length) {
      say(this.stepText, "The steps before the restart of the service are unknown.");
      return;
    }
    const picked = this.#picked;
    this.figures.forEach((figure) => figure.show({ ...this.#view, picked, changed }));
    const last = steps.length - 1;
    const step = steps[picked ?? last];
    const words = `${step.step}${picked === null ? " (newest)" : ""}, ${clock(step.time)}, ${
      step.images === 1 ? "1 image alone" : `${whole(step.images)} images answered together`
    }`;
    say(this.stepText, words);
    this.slider.max = last;
    if (this.#hovered === null) this.slider.value = picked ?? last;
    this.slider.setAttribute("aria-valuetext", words);
  }
}
