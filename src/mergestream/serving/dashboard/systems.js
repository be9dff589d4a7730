// The systems around the service: the DICOM node and the outbox of reports; each only where the service has one.

import { byId, create, keyed, redraw, say } from "./dom.js";
import { chip, wordOf } from "./severity.js";
import { NONE, plural, whole } from "./words.js";

const LATE = 300; // seconds that a report or an object may wait without a warning
const MEBIBYTE = 2 ** 20;

const age = (seconds) => (seconds ? (seconds < 120 ? `${whole(seconds)} s` : `${whole(seconds / 60)} min`) : NONE);
const mebibytes = (bytes) => `${(bytes / MEBIBYTE).toFixed(1)} MiB`;

// [severity, words], or null where all is well.
const nodeTrouble = (node) => {
  if (node.failed) return ["alarm", "The node does not work"];
  if (node.port === null) return ["warning", "The node is closed"];
  return node.oldest_waiting_seconds > LATE ? ["warning", "Objects wait"] : null;
};

const nodeFacts = (node) => [
  ["open associations", whole(node.associations)],
  ["associations accepted", whole(node.associations_accepted)],
  ["rejected", whole(node.associations_rejected)],
  ["aborted", whole(node.associations_aborted)],
  ["objects received", whole(node.objects_received)],
  ["refused", whole(node.objects_refused)],
  ["answered", whole(node.objects_answered)],
  ["not answerable", whole(node.objects_unanswerable)],
  ["waiting", `${whole(node.objects_waiting)} (${mebibytes(node.bytes_waiting)})`],
  ["oldest waits", age(node.oldest_waiting_seconds)],
];

const destinationTrouble = (each) => {
  if (each.failed) return ["alarm", plural(each.failed, "failed report")];
  return each.waiting && each.oldest_seconds > LATE ? ["warning", "Reports wait"] : null;
};

const destinationFacts = (each) => [
  ["waiting", whole(each.waiting)],
  ["sent in 30 days", whole(each.sent)],
  ["failed", whole(each.failed)],
  ["held (shadow mode)", whole(each.held)],
  ["oldest waits", age(each.oldest_seconds)],
];

const build = () =>
  create(
    "li",
    { class: "expert" },
    create("h3", {}, create("span", { class: "name" })),
    create("p", { class: "quiet about" }),
    create("p", { class: "trouble" }),
    create("dl"),
    create("p", { class: "quiet last-error" }),
  );

const update = (card, { title, about, trouble, facts, error }) => {
  say(card.querySelector(".name"), title);
  say(card.querySelector(".about"), about);
  const chips = () => (trouble ? [chip(trouble[0], `${wordOf(trouble[0])}: ${trouble[1]}`)] : []);
  redraw(card.querySelector(".trouble"), trouble, chips);
  keyed(
    card.querySelector("dl"),
    facts,
    ([name]) => name,
    ([name]) => create("div", {}, create("dt", {}, name), create("dd")),
    (line, [, value]) => say(line.querySelector("dd"), value),
  );
  const last = card.querySelector(".last-error");
  last.hidden = !error;
  say(last, error ? `Last error: ${error}` : "");
};

const nodeCard = (node) => ({
  title: "DICOM node",
  about: node.port === null ? node.ae_title : `${node.ae_title}, port ${node.port}`,
  trouble: nodeTrouble(node),
  facts: nodeFacts(node),
});

const destinationCard = (shadow) => (each) => ({
  title: `Reports to ${each.name}`,
  about: shadow ? "Shadow mode: nothing is sent." : "",
  trouble: destinationTrouble(each),
  facts: destinationFacts(each),
  error: each.last_error,
});

export const showSystems = ({ dicom, outbox }) => {
  const cards = [
    ...(dicom ? [nodeCard(dicom)] : []),
    ...(outbox?.destinations ?? []).map(destinationCard(outbox?.shadow)),
  ];
  byId("systems").hidden = cards.length === 0;
  keyed(byId("system-list"), cards, ({ title }) => title, build, update);
};
