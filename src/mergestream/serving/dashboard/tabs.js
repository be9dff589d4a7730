// The streams as tabs: arrow keys, Home and End move and select (the WAI-ARIA pattern).

import { bar } from "./swatches.js";
import { byId, create, keyed, redraw, say } from "./dom.js";
import { expertStyle } from "./quantities.js";
import { gravity, icon, UNKNOWN, wordOf, worst } from "./severity.js";
import { ago, plural } from "./words.js";

const FILTER_FROM = 9; // streams
const MOVES = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
const isNarrow = matchMedia("(max-width: 60rem)");

export class Tabs {
  constructor(onSelect) {
    this.list = byId("tabs");
    this.filter = byId("filter");
    this.onSelect = onSelect;
    this.list.addEventListener("keydown", (event) => this.#move(event));
    this.filter.addEventListener("input", () => this.#hideOthers());
    isNarrow.addEventListener("change", () => this.#orient());
    this.#orient();
  }

  show(streams, chosen, experts) {
    byId("streams").hidden = streams.length === 0;
    byId("filter-label").hidden = streams.length < FILTER_FROM;
    keyed(
      this.list,
      streams,
      ({ name }) => name,
      (stream) => this.#build(stream),
      (tab, stream) => this.#update(tab, stream, chosen, experts),
    );
    if (streams.length < FILTER_FROM) this.filter.value = "";
    this.#hideOthers();
  }

  #build({ name }) {
    return create(
      "button",
      {
        type: "button",
        role: "tab",
        "aria-controls": "stream",
        onclick: () => this.onSelect(name),
      },
      create("span", { class: "tab-name" }, create("span", { class: "name" }, name), create("span", { class: "chip" })),
      create("span", { class: "quiet" }),
      create("span", { class: "tab-bar" }),
    );
  }

  #update(tab, stream, chosen, experts) {
    const isChosen = stream.name === chosen;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
    say(tab.querySelector(".quiet"), `${plural(stream.steps, "step")} · ${ago(stream.last_step_at)}`);
    const severity = worst(stream.alarms ?? [{ severity: UNKNOWN }]);
    const speaks = severity !== null && gravity(severity) > 0;
    redraw(tab.querySelector(".chip"), speaks && severity, () => (speaks ? [icon(severity), wordOf(severity)] : []));
    const given = stream.encoder_coefficients ?? {};
    redraw(tab.querySelector(".tab-bar"), [given, experts], () => {
      const series = Object.entries(given).map(([name, value]) => ({ style: expertStyle(experts, name), value }));
      return series.length ? [bar(series)] : [];
    });
  }

  #move(event) {
    if (!(event.key in MOVES) || event.ctrlKey || event.altKey || event.metaKey) return;
    const tabs = [...this.list.children].filter((tab) => !tab.hidden);
    const here = tabs.indexOf(document.activeElement);
    if (here < 0) return;
    event.preventDefault();
    const move = MOVES[event.key];
    const next = Number.isFinite(move) ? tabs.at((here + move) % tabs.length) : tabs.at(move < 0 ? 0 : -1);
    next.focus();
    next.click();
  }

  // The selected tab is never hidden, so that it can always be reached.
  #hideOthers() {
    const text = this.filter.value.trim().toLowerCase();
    for (const tab of this.list.children) {
      tab.hidden = !tab.dataset.key.toLowerCase().includes(text) && tab.tabIndex !== 0;
    }
  }

  #orient() {
    this.list.setAttribute("aria-orientation", isNarrow.matches ? "horizontal" : "vertical");
  }
}
