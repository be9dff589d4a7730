// One quantity of a stream: a chart with a legend, and the same numbers as a table.

import { Chart } from "./chart.js";
import { create, keyed, say } from "./dom.js";
import { swatch } from "./swatches.js";
import { clock, listed } from "./words.js";

const NARROWEST = 120; // pixels; narrower than this the figure is hidden or not laid out yet

export class Figure {
  #view = null;
  #chart = null;

  constructor(quantity, onPoint) {
    this.quantity = quantity;
    const { id, title, about } = quantity;
    this.picture = create("div", {
      class: "picture",
      onpointermove: (event) => onPoint(this.#chart?.placeAt(event) ?? null),
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
    new ResizeObserver(() => this.draw()).observe(this.picture);
  }

  // view: { steps, experts, classes, picked: a place in steps or null, changed: whether steps have come or gone }
  show(view) {
    const isFirst = this.#view === null;
    this.#view = { ...view, series: this.quantity.series(view), limit: this.quantity.limit?.(view) };
    if (view.changed || isFirst) {
      this.draw();
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
    this.draw();
    this.#fillTable();
    this.#showPicked();
  }

  // Again from the start: also when the width or the theme has changed.
  draw() {
    if (!this.#view || this.picture.clientWidth < NARROWEST) return;
    this.#chart?.remove();
    this.#chart = new Chart(this.picture, this.quantity, this.#view, this.#sentence());
    this.#showPicked();
  }

  #sentence() {
    const { steps, series } = this.#view;
    const { title, one, format } = this.quantity;
    const last = steps.length - 1;
    const values = series.filter(({ values }) => values[last] !== null).map(({ name, values }) =>
      `${name} ${format(values[last])}`
    );
    return `${title} over steps ${steps[0].step} to ${steps[last].step}. At step ${steps[last].step} ` +
      (values.length ? `${one} ${listed(values)}.` : "there are none: the fallback answered.");
  }

  #showPicked() {
    if (!this.#view) return;
    const { steps, series, limit, picked } = this.#view;
    this.#chart?.pick(picked === null ? null : steps[picked].step);
    const place = picked ?? steps.length - 1;
    const items = series.map((each, number) => ({ ...each, number, value: each.values[place] }));
    if (limit) items.push({ name: this.quantity.limitWords, style: "soft round0", number: 2, value: limit });
    keyed(
      this.legend,
      items,
      (each) => `${each.style} ${each.name}`,
      (each) =>
        create(
          "li",
          {},
          swatch(this.quantity.kind, each.number, each.style),
          create("span", { class: "name" }, each.name),
          create("b"),
        ),
      (item, each) => say(item.lastChild, this.quantity.format(each.value)),
    );
  }

  #fillTable() {
    if (this.table.hidden || !this.#view) return;
    const { steps } = this.#view;
    const series = this.quantity.columns?.(this.#view) ?? this.#view.series;
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
}
