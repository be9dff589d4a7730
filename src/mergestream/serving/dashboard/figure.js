// One quantity of a stream: a picture with a legend, and the same numbers as a table.

import { ceilingOf, frame, movePicked, scaleOf } from "./axes.js";
import { drawAreas, drawBars, drawLimit, drawLines, swatch } from "./charts.js";
import { create, keyed, say } from "./dom.js";
import { clock, listed } from "./words.js";

const HEIGHT = 210;
const DRAWN = { areas: drawAreas, bars: drawBars, lines: drawLines };
const NARROWEST = 240;

const highestOf = (kind, series, steps) => {
  const at = (place) => series.map(({ values }) => values[place] ?? 0);
  const highest = steps.map((
    _,
    place,
  ) => (kind !== "lines" ? at(place).reduce((sum, each) => sum + each, 0) : Math.max(0, ...at(place))));
  return Math.max(0, ...highest);
};

export class Figure {
  #shown = null;

  constructor(quantity, onPoint) {
    this.quantity = quantity;
    const { id, title, about } = quantity;
    this.picture = create("div", {
      class: "picture",
      onpointermove: (event) => onPoint(this.#placeAt(event)),
      onpointerleave: () => onPoint(null),
    });
    this.legend = create("ul", { class: "legend" });
    this.head = create("thead");
    this.body = create("tbody");
    this.table = create(
      "div",
      {
        class: "scroll",
        id: `${id}-table`,
        tabindex: 0,
        role: "region",
        "aria-label": `${title}, as a table`,
        hidden: true,
      },
      create("table", {}, create("caption", { class: "hidden" }, `${title}, newest step first`), this.head, this.body),
    );
    this.toggle = create(
      "button",
      {
        type: "button",
        class: "small",
        "aria-expanded": "false",
        "aria-controls": `${id}-table`,
        onclick: () => this.#toggleTable(),
      },
      "Show as table",
      create("span", { class: "hidden" }, `: ${title}`),
    );
    this.element = create(
      "figure",
      { class: "card", id: `figure-${id}` },
      create(
        "figcaption",
        {},
        create("div", { class: "title-line" }, create("h3", {}, title), this.toggle),
        create("p", { class: "quiet" }, about),
      ),
      this.picture,
      this.legend,
      this.table,
    );
    new ResizeObserver(() => this.#draw()).observe(this.picture);
  }

  // view: { steps, experts, classes, picked: a place in steps or null, changed: whether steps have come or gone }
  show(view) {
    const before = this.#shown;
    this.#shown = { ...view, series: this.quantity.series(view) };
    if (view.changed || !before) {
      this.#draw();
      this.#fillTable();
    }
    this.#showPicked();
  }

  #toggleTable() {
    const isTable = this.table.hidden;
    this.table.hidden = !isTable;
    this.picture.hidden = this.legend.hidden = isTable;
    this.toggle.setAttribute("aria-expanded", String(isTable));
    this.toggle.firstChild.textContent = isTable ? "Show as chart" : "Show as table";
    this.#draw();
    this.#fillTable();
    this.#showPicked();
  }

  #draw() {
    const width = Math.floor(this.picture.clientWidth);
    if (!this.#shown || width < NARROWEST / 2) return;
    const { steps, series } = this.#shown;
    const { kind, unit, limitWords } = this.quantity;
    const limit = this.quantity.limit?.(this.#shown);
    const top = this.quantity.top ?? ceilingOf(Math.max(highestOf(kind, series, steps), (limit ?? 0) * 1.08));
    this.scale = scaleOf(width, HEIGHT, steps, top);
    const drawn = DRAWN[kind](this.scale, series);
    const svg = frame(this.scale, unit, this.#sentence(), limit ? drawLimit(this.scale, limit, limitWords) : [], drawn);
    this.picture.replaceChildren(svg);
    this.#showPicked();
  }

  #sentence() {
    const { steps, series } = this.#shown;
    const { title, one, format } = this.quantity;
    const last = steps.length - 1;
    const told = series.filter(({ values }) => values[last] !== null).map(({ name, values }) =>
      `${name} ${format(values[last])}`
    );
    return `${title} over steps ${steps[0].step} to ${steps[last].step}. At step ${steps[last].step} ` +
      (told.length ? `${one} ${listed(told)}.` : "there are none: the safe choice answered.");
  }

  #showPicked() {
    if (!this.#shown) return;
    const { steps, series, picked } = this.#shown;
    const svg = this.picture.querySelector("svg");
    if (svg && this.scale.steps === steps) movePicked(svg, this.scale, picked);
    const place = picked ?? steps.length - 1;
    keyed(
      this.legend,
      series.map((each, number) => ({ ...each, number })),
      (each) => `${each.style} ${each.name}`,
      (each) =>
        create(
          "li",
          {},
          swatch(this.quantity.kind, each.number, each.style),
          create("span", { class: "name" }, each.name),
          create("b"),
        ),
      (item, each) => say(item.lastChild, this.quantity.format(each.values[place])),
    );
  }

  #fillTable() {
    if (this.table.hidden || !this.#shown) return;
    const { steps } = this.#shown;
    const series = this.quantity.columns?.(this.#shown) ?? this.#shown.series;
    const heading = (text) => create("th", { scope: "col" }, text);
    this.head.replaceChildren(
      create("tr", {}, heading("Step"), heading("Time"), series.map(({ name }) => heading(name))),
    );
    const row = (step, place) =>
      create(
        "tr",
        {},
        create("th", { scope: "row" }, String(step.step)),
        create("td", {}, clock(step.time)),
        series.map(({ values }) => create("td", {}, this.quantity.format(values[place]))),
      );
    this.body.replaceChildren(...steps.map(row).reverse());
  }

  #placeAt(event) {
    if (!this.scale || !this.#shown.steps.length) return null;
    return this.scale.placeAt(event.clientX - this.picture.getBoundingClientRect().left);
  }
}
