// The cards of the pool: name, domain, metrics, and whether the expert is switched on.

import { swatch } from "./swatches.js";
import { byId, create, keyed, redraw, say } from "./dom.js";
import { expertStyle } from "./quantities.js";
import { chip } from "./severity.js";
import { fixed, plural } from "./words.js";

const AT_A_GLANCE = 1; // metrics
const number = fixed(3);

// { validation: { accuracy: 0.9 } } → [["validation accuracy", 0.9]]; what is no number is left out.
const metricsOf = (metrics, prefix = "") =>
  Object.entries(metrics ?? {}).flatMap(([name, value]) => {
    const words = `${prefix}${name.replaceAll("_", " ")}`;
    if (typeof value === "number") return [[words, value]];
    return value && typeof value === "object" && !Array.isArray(value) ? metricsOf(value, `${words} `) : [];
  });

const shown = (value) => (Number.isInteger(value) ? String(value) : number(value));

const list = (metrics) =>
  create(
    "dl",
    {},
    metrics.map(([name, value]) => create("div", {}, create("dt", {}, name), create("dd", {}, shown(value)))),
  );

// The first few are always shown, the others on demand.
const metricsList = (metrics) => {
  const all = metricsOf(metrics);
  const rest = all.slice(AT_A_GLANCE);
  if (!rest.length) return [list(all)];
  return [
    list(all.slice(0, AT_A_GLANCE)),
    create("details", {}, create("summary", {}, plural(rest.length, "more metric")), list(rest)),
  ];
};

const buildCard = (actions) => (expert) => {
  const button = create("button", { type: "button", class: "small", "data-administrator": true, hidden: true });
  button.addEventListener("click", () => actions.switchExpert(expert.name, button.dataset.on !== "true"));
  return create(
    "li",
    { class: "expert" },
    create(
      "div",
      { class: "title-line" },
      create("h3", {}, create("span", { class: "mark" }), create("span", { class: "name" }, expert.name)),
      create("span", { class: "onoff" }),
    ),
    create("p", { class: "quiet domain" }),
    create("p", { class: "quiet signer", hidden: true }),
    create("p", { class: "trouble", hidden: true }),
    create("div", { class: "metrics" }),
    button,
  );
};

// The signer and a revocation, where the service checks signatures.
const showTrust = (card, { signed_by: signer, revoked }) => {
  const line = card.querySelector(".signer");
  line.hidden = !signer;
  say(line, signer ? `Signed by ${signer}` : "");
  const trouble = card.querySelector(".trouble");
  trouble.hidden = !revoked;
  redraw(trouble, revoked, () => (revoked ? [chip("alarm", "Revoked"), ` ${revoked}`] : []));
};

const updateCard = (experts) => (card, expert) => {
  const on = expert.on !== false;
  card.classList.toggle("is-off", !on);
  say(card.querySelector(".onoff"), on ? "on" : "off");
  say(card.querySelector(".domain"), expert.domain ? `Domain: ${expert.domain}` : "Domain not stated");
  showTrust(card, expert);
  redraw(card.querySelector(".mark"), experts, () => [swatch("areas", 0, expertStyle(experts, expert.name))]);
  redraw(card.querySelector(".metrics"), expert.metrics, () => metricsList(expert.metrics));
  const button = card.querySelector("button");
  button.dataset.on = String(on);
  say(button, on ? `Switch ${expert.name} off` : `Switch ${expert.name} on`);
};

export const showPool = (pool, actions) => {
  const experts = pool.experts ?? [];
  const names = experts.map(({ name }) => name);
  const words = `${plural(experts.length, "expert")}, ${plural(pool.classes.length, "class", "classes")}`;
  redraw(byId("pool-about"), pool.hash, () => [
    create("p", { class: "quiet" }, words),
    create(
      "details",
      {},
      create("summary", {}, "Classes and hash"),
      create("p", {}, pool.classes.join(", ")),
      create("code", { class: "hash" }, pool.hash ?? ""),
    ),
  ]);
  keyed(byId("experts"), experts, ({ name }) => name, buildCard(actions), updateCard(names));
};
