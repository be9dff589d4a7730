// Findings on the last batch of every stream. A screen reader reads new lines, not changed numbers.

import { byId, create, keyed, say } from "./dom.js";
import { gravity, icon, wordOf } from "./severity.js";

const build = (onSelect) => ({ stream, severity, code }) =>
  create(
    "li",
    { class: severity },
    create("span", { class: "chip" }, icon(severity), wordOf(severity)),
    create("button", { type: "button", class: "link", onclick: () => onSelect(stream) }, stream),
    create("span", { class: "sentence" }),
    create("code", {}, code),
  );

export const showAlarms = (streams, onSelect) => {
  const all = streams.flatMap(({ name, alarms }) => (alarms ?? []).map((alarm) => ({ ...alarm, stream: name })));
  all.sort((one, other) => gravity(other.severity) - gravity(one.severity));
  const raised = all.filter(({ severity }) => gravity(severity) > 0);
  keyed(
    byId("alarm-list"),
    raised,
    ({ stream, code, severity }) => `${stream} ${code} ${severity}`,
    build(onSelect),
    (item, { sentence }) => say(item.querySelector(".sentence"), sentence),
  );
  byId("no-alarms").hidden = raised.length > 0;
  byId("alarms").classList.toggle("quiet-now", raised.length === 0);
  return raised.length;
};
